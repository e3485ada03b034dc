"""POST /v1/chat/completions, as OpenAI's clients call it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request

from llmcl.serve.body import read_fields
from llmcl.serve.conversation import openai_messages, read_ending, template_variables, thinking, thought_budget
from llmcl.serve.errors import unsupported
from llmcl.serve.events import DONE, TEXT, TextEvents, event
from llmcl.serve.fields import Fields, wrong
from llmcl.serve.generation import GenerationResponse
from llmcl.serve.images import load_images
from llmcl.serve.logprobs import MAX_TOP, LogProbWriter
from llmcl.serve.prepared import prepare
from llmcl.serve.sampling import MAX_ANSWERS, MAX_STOPS, max_tokens, of_choice, read_sampling
from llmcl.serve.served import Answer, Ask, cached_tokens
from llmcl.serve.service import Service
from llmcl.serve.structure import read_structure
from llmcl.serve.tools import openai_tools
from llmcl.tokenizer.answer_parts import CallPart, Part, Said


async def chat_completions(request: Request, service: Service) -> GenerationResponse:
    """Answers a conversation. docs/guide/server.md lists the fields."""
    served = service.served()
    fields = await read_fields(request, service.settings, takes_images=served.takes_images)
    fields.text("model")  # there is one model, whatever name a client sends
    messages = openai_messages(fields)
    pixels = await load_images(request, service, served, messages)
    variables = thinking(None, fields.text("reasoning_effort")) | template_variables(fields)
    _refuse_what_is_missing(fields)
    use = openai_tools(fields)
    structure = await read_structure(fields, served, fields.object("response_format"))
    options = read_sampling(fields, served)
    top = fields.whole("top_logprobs", None, 0, MAX_TOP)
    if with_logprobs := fields.flag("logprobs"):
        options["logprobs"] = top or 0
    elif top is not None:
        raise wrong("top_logprobs", top, "it with logprobs: true alone")
    most = max_tokens(fields, "max_completion_tokens", "max_tokens") or served.max_context
    n = fields.whole("n", 1, 1, MAX_ANSWERS) or 1
    stop = fields.strings("stop", MAX_STOPS)
    stream = fields.flag("stream")
    with_usage = fields.object("stream_options").flag("include_usage")
    ending, budget = read_ending(fields, messages), thought_budget(fields)
    prepared = await prepare(
        served, messages, use, structure, variables, ending=ending, most=most, budget=budget, pixels=pixels
    )
    prompt, reader = prepared.prompt, prepared.reader
    options |= prepared.options
    most = min(most, served.max_context)
    more: dict[str, Any] = {"reader": reader, "budget": prepared.budget, "images": prepared.images}
    asks = [Ask(prompt, most, of_choice(options, i), stop, **more) for i in range(n)]
    writer = LogProbWriter(served.tokenizer) if with_logprobs else None
    form = ChatForm(served.name, len(prompt), writer, with_usage=with_usage)
    progress = form.progress if fields.flag("return_progress") else None
    return GenerationResponse(service, served, asks, form, stream=stream, progress=progress)


def _refuse_what_is_missing(fields: Fields) -> None:
    fields.refuse("functions are not supported, tools are", "functions")
    if fields.items("modalities") not in ([], ["text"]):
        raise unsupported("modalities", "answers other than text are not supported")


def usage_of(n_prompt: int, answers: Sequence[Answer]) -> dict[str, Any]:
    """Returns the `usage` object of OpenAI's completions. n_prompt: total number of prompt tokens."""
    n_tokens = sum(len(answer.token_ids) for answer in answers)
    n_thought = sum(answer.thought_tokens for answer in answers)
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_tokens,
        "total_tokens": n_prompt + n_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens(answers)},
        "completion_tokens_details": {"reasoning_tokens": n_thought},
    }


class ChatForm:
    """Writes chat.completion objects and chunks."""

    def __init__(self, model: str, n_prompt: int, logprobs: LogProbWriter | None, *, with_usage: bool):
        self._head = {"id": "chatcmpl-" + secrets.token_hex(12), "created": int(time.time()), "model": model}
        self._n_prompt = n_prompt
        self._logprobs = logprobs
        self._with_usage = with_usage
        self._begun: set[int] = set()
        self._said: dict[int, TextEvents] = {}

    def begin(self) -> bytes:
        return b""

    def text(self, answer: Answer, text: str) -> bytes:
        parts: list[Part] = [Said(text)] if answer.reader is None else answer.reader.take()
        logprobs = self._logprobs_of(answer)
        if logprobs is not None and not parts:
            parts = [Said("")]
        chunks = self._opening(answer)
        for n, part in enumerate(parts):
            if isinstance(part, Said) and (logprobs is None or n):
                chunks += self._text(answer, part.text)
            else:
                chunks += self._chunk(answer, _delta(part), None, None if n else logprobs)
        return chunks

    def finish(self, answer: Answer) -> bytes:
        rest = b"" if answer.reader is None else self.text(answer, "")
        return self._opening(answer) + rest + self._chunk(answer, {}, _reason(answer))

    def end(self, answers: Sequence[Answer]) -> bytes:
        if not self._with_usage:
            return DONE
        return event(self._object("chat.completion.chunk", [], usage_of(self._n_prompt, answers))) + DONE

    def error(self, body: dict[str, Any]) -> bytes:
        return event(body)

    def alive(self, answer: Answer) -> bytes:
        return self._opening(answer) + self._chunk(answer, {}, None)

    def progress(self, answer: Answer, numbers: dict[str, Any]) -> bytes:
        """Writes llama-server's progress event."""
        data = self._data(answer, {}, None, None)
        return self._opening(answer) + event(data | {"prompt_progress": numbers})

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        choices = [
            {
                "index": answer.index,
                "message": _message(answer),
                "logprobs": self._logprobs_of(answer),
                "finish_reason": _reason(answer),
            }
            for answer in answers
        ]
        return self._object("chat.completion", choices, usage_of(self._n_prompt, answers))

    def _opening(self, answer: Answer) -> bytes:
        """Returns the first chunk of an answer, with the role; b"" if already sent."""
        if answer.index in self._begun:
            return b""
        self._begun.add(answer.index)
        return self._chunk(answer, {"role": "assistant", "content": ""}, None)

    def _logprobs_of(self, answer: Answer) -> dict[str, Any] | None:
        return None if self._logprobs is None else self._logprobs.chat(answer)

    def _chunk(
        self, answer: Answer, delta: dict[str, Any], reason: str | None, logprobs: dict[str, Any] | None = None
    ) -> bytes:
        return event(self._data(answer, delta, reason, logprobs))

    def _text(self, answer: Answer, text: str) -> bytes:
        """Returns a chunk with text only, the common case."""
        if (said := self._said.get(answer.index)) is None:
            said = self._said[answer.index] = TextEvents(self._data(answer, {"content": TEXT}, None, None))
        return said(text)

    def _data(
        self, answer: Answer, delta: dict[str, Any], reason: str | None, logprobs: dict[str, Any] | None
    ) -> dict[str, Any]:
        choice = {"index": answer.index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return self._object("chat.completion.chunk", [choice], None)

    def _object(self, kind: str, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> dict[str, Any]:
        response = {**self._head, "object": kind, "choices": choices}
        return response | {"usage": usage} if usage is not None or self._with_usage else response


def _reason(answer: Answer) -> str | None:
    return "tool_calls" if answer.calls and answer.finish_reason == "stop" else answer.finish_reason


def _message(answer: Answer) -> dict[str, Any]:
    """Builds the message. reasoning_content is not in OpenAI's API; other servers use the same name."""
    if (reader := answer.reader) is None:
        return {"role": "assistant", "content": answer.text, "refusal": None}
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in reader.calls
    ]
    message = {"role": "assistant", "content": reader.text if reader.text or not calls else None, "refusal": None}
    message |= {"reasoning_content": reader.thoughts} if reader.thoughts else {}
    return message | ({"tool_calls": calls} if calls else {})


def _delta(part: Part) -> dict[str, Any]:
    if isinstance(part, Said):
        return {"content": part.text}
    if not isinstance(part, CallPart):
        return {"reasoning_content": part.text}
    call: dict[str, Any] = {"index": part.index, "function": {"arguments": part.delta}}
    if part.is_first:
        call |= {"id": part.call.id, "type": "function"}
        call["function"]["name"] = part.call.name
    return {"tool_calls": [call]}
