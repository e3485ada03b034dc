"""POST /v1/completions: continues a prompt, without a chat template."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request

from llmcl.serve.body import read_fields
from llmcl.serve.chat_completions import usage_of
from llmcl.serve.errors import RequestError, unsupported
from llmcl.serve.events import DONE, TEXT, TextEvents, event
from llmcl.serve.fields import Fields, as_whole, wrong
from llmcl.serve.generation import GenerationResponse
from llmcl.serve.infill import suffix_prompt, with_ends
from llmcl.serve.logprobs import MAX_TOP, LogProbWriter
from llmcl.serve.sampling import MAX_ANSWERS, MAX_STOPS, max_tokens, of_choice, read_sampling
from llmcl.serve.served import Answer, Ask, Served
from llmcl.serve.service import Service
from llmcl.serve.structure import read_structure

_MAX_TOKENS = 16  # OpenAI's default
_EXPECTED = "a text, a list of texts, a list of token ids, or a list of such lists"


async def completions(request: Request, service: Service) -> GenerationResponse:
    """Continues one or several prompts. docs/guide/server.md lists the fields."""
    served = service.served()
    fields = await read_fields(request, service.settings)
    fields.text("model")
    options = read_sampling(fields, served)
    options |= await read_structure(fields, served, fields.object("response_format"))
    if (top := fields.whole("logprobs", None, 0, MAX_TOP)) is not None:
        options["logprobs"] = top
    n = fields.whole("n", 1, 1, MAX_ANSWERS) or 1
    if (fields.whole("best_of", n, 1, MAX_ANSWERS) or n) != n:
        raise unsupported("best_of", "a choice among more answers than n is not supported")
    most = max_tokens(fields, "max_tokens", default=_MAX_TOKENS, least=0)
    stop = fields.strings("stop", MAX_STOPS)
    echo, stream = fields.flag("echo"), fields.flag("stream")
    with_usage = fields.object("stream_options").flag("include_usage")
    suffix = fields.text("suffix")
    if suffix and echo:
        raise RequestError(400, "echo: does not go with suffix; leave one out", "echo", "invalid_value")
    prompts = await _prompts(fields, served, suffix, with_text=echo)
    if suffix:
        options, stop = with_ends(served, options, stop)
    asks = [
        Ask(
            prompt,
            served.max_context if most is None else min(most, served.max_context),
            of_choice(options, i),
            stop,
            head=text if echo else "",
            prompt_logprobs=top if echo else None,
        )
        for prompt, text in prompts
        for i in range(n)
    ]
    writer = None if top is None else LogProbWriter(served.tokenizer)
    form = CompletionForm(served.name, sum(len(prompt) for prompt, _ in prompts), writer, with_usage=with_usage)
    progress = form.progress if fields.flag("return_progress") else None
    return GenerationResponse(service, served, asks, form, stream=stream, progress=progress)


async def _prompts(
    fields: Fields, served: Served, suffix: str | None, *, with_text: bool
) -> list[tuple[list[int], str]]:
    """Returns token ids for each prompt, with the text if asked for. suffix: text after the answer."""
    value = fields.required("prompt", _EXPECTED)
    if isinstance(value, str) or (isinstance(value, list) and value and as_whole(value[0]) is not None):
        value = [value]
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_ANSWERS:
        raise wrong("prompt", value, f"{_EXPECTED}, {MAX_ANSWERS} at most")
    prompts = []
    for index, prompt in enumerate(value):
        if isinstance(prompt, str):
            ids = await (suffix_prompt(served, prompt, suffix) if suffix else served.encode(prompt))
            prompts.append((ids, prompt))
        elif suffix:
            raise wrong("prompt", prompt, "a text or a list of texts, as there is a suffix")
        elif ids := _ids(prompt):
            served.check(ids)
            prompts.append((ids, served.tokenizer.decode(ids) if with_text else ""))
        else:
            raise wrong(f"prompt[{index}]" if len(value) > 1 else "prompt", prompt, _EXPECTED)
    return prompts


def _ids(value: object) -> list[int]:
    """Returns token ids, or an empty list if `value` is not a list of whole numbers."""
    if isinstance(value, list) and {*map(type, value)} == {int}:  # the common case
        return value
    ids = [as_whole(item) for item in value] if isinstance(value, list) else []
    return [] if None in ids else [item for item in ids if item is not None]


class CompletionForm:
    """Writes text_completion objects. A stream uses the same objects."""

    def __init__(self, model: str, n_prompt: int, logprobs: LogProbWriter | None, *, with_usage: bool):
        self._head = {"id": "cmpl-" + secrets.token_hex(12), "created": int(time.time()), "model": model}
        self._n_prompt = n_prompt
        self._logprobs = logprobs
        self._with_usage = with_usage
        self._texts: dict[int, TextEvents] = {}

    def begin(self) -> bytes:
        return b""

    def text(self, answer: Answer, text: str) -> bytes:
        if self._logprobs is not None:
            return self._chunk(answer, text, None)
        if (texts := self._texts.get(answer.index)) is None:
            texts = self._texts[answer.index] = TextEvents(self._object([self._choice(answer, TEXT, None)], None))
        return texts(text)

    def finish(self, answer: Answer) -> bytes:
        return self._chunk(answer, "", answer.finish_reason)

    def end(self, answers: Sequence[Answer]) -> bytes:
        if not self._with_usage:
            return DONE
        return event(self._object([], usage_of(self._n_prompt, answers))) + DONE

    def error(self, body: dict[str, Any]) -> bytes:
        return event(body)

    def alive(self, answer: Answer) -> bytes:
        return event(self._object([self._empty(answer)], None))

    def progress(self, answer: Answer, numbers: dict[str, Any]) -> bytes:
        """Writes llama-server's progress event."""
        return event(self._object([self._empty(answer)], None) | {"prompt_progress": numbers})

    def _empty(self, answer: Answer) -> dict[str, Any]:
        return {"index": answer.index, "text": "", "logprobs": None, "finish_reason": None}

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        choices = [self._choice(answer, answer.ask.head + answer.text, answer.finish_reason) for answer in answers]
        return self._object(choices, usage_of(self._n_prompt, answers))

    def _chunk(self, answer: Answer, text: str, finish_reason: str | None) -> bytes:
        return event(self._object([self._choice(answer, text, finish_reason)], None))

    def _object(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> dict[str, Any]:
        response = {**self._head, "object": "text_completion", "choices": choices}
        return response | {"usage": usage} if usage is not None or self._with_usage else response

    def _choice(self, answer: Answer, text: str, finish_reason: str | None) -> dict[str, Any]:
        logprobs = None if self._logprobs is None else self._logprobs.completion(answer)
        return {"index": answer.index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
