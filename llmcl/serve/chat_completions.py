"""POST /v1/chat/completions, as OpenAI's clients call it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llmcl.serve.body import read_fields
from llmcl.serve.conversation import openai_messages
from llmcl.serve.errors import unsupported
from llmcl.serve.events import DONE, event
from llmcl.serve.fields import Fields, wrong
from llmcl.serve.generation import GenerationResponse
from llmcl.serve.logprobs import MAX_TOP, LogProbWriter
from llmcl.serve.sampling import MAX_ANSWERS, MAX_STOPS, of_choice, read_sampling
from llmcl.serve.served import Answer, Ask, cached_tokens
from llmcl.serve.service import Service

_ROOM = 1 << 31  # more tokens than any context: the answer ends where that does


async def chat_completions(request: Request, service: Service) -> Response:
    """Answers a conversation; see docs/guide/server.md for the fields."""
    served = service.served()
    fields = await read_fields(request, service.settings)
    fields.text("model")  # there is one model, whatever clients call it
    messages = openai_messages(fields)
    _refuse_what_is_missing(fields)
    options = read_sampling(fields, served)
    top = fields.whole("top_logprobs", None, 0, MAX_TOP)
    if with_logprobs := fields.flag("logprobs"):
        options["logprobs"] = top or 0
    elif top is not None:
        raise wrong("top_logprobs", top, "it with logprobs: true alone")
    max_tokens = fields.whole("max_completion_tokens", None, 1) or fields.whole("max_tokens", _ROOM, 1) or _ROOM
    n = fields.whole("n", 1, 1, MAX_ANSWERS) or 1
    stop = fields.strings("stop", MAX_STOPS)
    stream = fields.flag("stream")
    with_usage = fields.object("stream_options").flag("include_usage")
    prompt = await served.encode_chat(messages)
    asks = [Ask(prompt, min(max_tokens, served.max_context), of_choice(options, i), stop) for i in range(n)]
    writer = LogProbWriter(served.tokenizer) if with_logprobs else None
    form = ChatForm(served.name, len(prompt), writer, with_usage=with_usage)
    return GenerationResponse(service, served, asks, form, stream=stream)


def _refuse_what_is_missing(fields: Fields) -> None:
    refuse_tools(fields)
    if fields.object("response_format").one_of("type", "text", "json_object", "json_schema") not in (None, "text"):
        raise unsupported("response_format", "JSON mode and schemas are not supported")
    if fields.items("modalities") not in ([], ["text"]):
        raise unsupported("modalities", "answers other than text are not supported")


def refuse_tools(fields: Fields) -> None:
    fields.refuse("tools are not supported", "tools", "functions")


def usage_of(n_prompt: int, answers: Sequence[Answer]) -> dict[str, Any]:
    """The field `usage` of OpenAI's completions. n_prompt: tokens of the prompt, or of all prompts."""
    n_tokens = sum(len(answer.token_ids) for answer in answers)
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_tokens,
        "total_tokens": n_prompt + n_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens(answers)},
    }


class ChatForm:
    """chat.completion objects, and their chunks."""

    def __init__(self, model: str, n_prompt: int, logprobs: LogProbWriter | None, *, with_usage: bool):
        self._head = {"id": "chatcmpl-" + secrets.token_hex(12), "created": int(time.time()), "model": model}
        self._n_prompt = n_prompt
        self._logprobs = logprobs
        self._with_usage = with_usage
        self._begun: set[int] = set()

    def begin(self) -> bytes:
        return b""

    def text(self, answer: Answer, text: str) -> bytes:
        return self._opening(answer) + self._chunk(answer, {"content": text}, None, self._logprobs_of(answer))

    def finish(self, answer: Answer) -> bytes:
        return self._opening(answer) + self._chunk(answer, {}, answer.finish_reason)

    def end(self, answers: Sequence[Answer]) -> bytes:
        if not self._with_usage:
            return DONE
        return event(self._object("chat.completion.chunk", [], usage_of(self._n_prompt, answers))) + DONE

    def error(self, body: dict[str, Any]) -> bytes:
        return event(body)

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        choices = [
            {
                "index": answer.index,
                "message": {"role": "assistant", "content": answer.text, "refusal": None},
                "logprobs": self._logprobs_of(answer),
                "finish_reason": answer.finish_reason,
            }
            for answer in answers
        ]
        return self._object("chat.completion", choices, usage_of(self._n_prompt, answers))

    def _opening(self, answer: Answer) -> bytes:
        """The first chunk of an answer has its role."""
        if answer.index in self._begun:
            return b""
        self._begun.add(answer.index)
        return self._chunk(answer, {"role": "assistant", "content": ""}, None)

    def _logprobs_of(self, answer: Answer) -> dict[str, Any] | None:
        return None if self._logprobs is None else self._logprobs.chat(answer)

    def _chunk(
        self, answer: Answer, delta: dict[str, str], reason: str | None, logprobs: dict[str, Any] | None = None
    ) -> bytes:
        choice = {"index": answer.index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return event(self._object("chat.completion.chunk", [choice], None))

    def _object(self, kind: str, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> dict[str, Any]:
        made = {**self._head, "object": kind, "choices": choices}
        return made | {"usage": usage} if usage is not None or self._with_usage else made
