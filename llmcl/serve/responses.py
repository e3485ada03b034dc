"""POST /v1/responses, OpenAI's newer API: stateless, each request brings its whole conversation."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llmcl.serve.body import read_fields
from llmcl.serve.chat_completions import refuse_tools
from llmcl.serve.conversation import responses_messages
from llmcl.serve.errors import unsupported
from llmcl.serve.events import event
from llmcl.serve.fields import Fields
from llmcl.serve.generation import GenerationResponse
from llmcl.serve.sampling import read_sampling
from llmcl.serve.served import Answer, Ask
from llmcl.serve.service import Service


async def responses(request: Request, service: Service) -> Response:
    """Answers a conversation; see docs/guide/server.md for the fields."""
    served = service.served()
    fields = await read_fields(request, service.settings)
    fields.text("model")
    messages = responses_messages(fields)
    _refuse_what_is_missing(fields)
    options = read_sampling(fields, served)
    max_tokens = fields.whole("max_output_tokens", None, 1)
    stream = fields.flag("stream")
    prompt = await served.encode_chat(messages)
    ask = Ask(prompt, min(max_tokens or served.max_context, served.max_context), options)
    form = ResponseForm(served.name, len(prompt), fields, options, max_tokens)
    return GenerationResponse(service, served, [ask], form, stream=stream)


def _refuse_what_is_missing(fields: Fields) -> None:
    refuse_tools(fields)
    fields.refuse("nothing is kept between requests", "previous_response_id", "conversation")
    fields.refuse("prompts that are kept at the server are not supported", "prompt")
    fields.refuse("answers that nobody waits for are not supported", "background")
    fields.refuse("probabilities of tokens are not supported", "top_logprobs")
    if fields.object("text").object("format").one_of("type", "text", "json_object", "json_schema") not in (
        None,
        "text",
    ):
        raise unsupported("text.format", "JSON mode and schemas are not supported")


class ResponseForm:
    """A response object with one message, and the events of one, which are numbered."""

    def __init__(self, model: str, n_prompt: int, fields: Fields, options: dict[str, Any], max_tokens: int | None):
        self._n_prompt = n_prompt
        self._item_id = "msg_" + secrets.token_hex(12)
        self._n_events = 0
        self._head = {
            "id": "resp_" + secrets.token_hex(12),
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "instructions": fields.text("instructions"),
            "max_output_tokens": max_tokens,
            "metadata": fields.object("metadata").strings_by_name(),
            "parallel_tool_calls": fields.flag("parallel_tool_calls", True),
            "previous_response_id": None,
            "temperature": options["temperature"],
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": options["top_p"],
            "truncation": "disabled",
        }

    def begin(self) -> bytes:
        started = self._response("in_progress", [], None)
        return b"".join(
            (
                self._event("response.created", response=started),
                self._event("response.in_progress", response=started),
                self._event("response.output_item.added", output_index=0, item=self._item("in_progress", [])),
                self._event("response.content_part.added", **self._place(), part=_part("")),
            )
        )

    def text(self, answer: Answer, text: str) -> bytes:
        return self._event("response.output_text.delta", **self._place(), delta=text, logprobs=[])

    def finish(self, answer: Answer) -> bytes:
        part, item = _part(answer.text), self._item(_status(answer), [_part(answer.text)])
        return b"".join(
            (
                self._event("response.output_text.done", **self._place(), text=answer.text, logprobs=[]),
                self._event("response.content_part.done", **self._place(), part=part),
                self._event("response.output_item.done", output_index=0, item=item),
            )
        )

    def end(self, answers: Sequence[Answer]) -> bytes:
        return self._event(f"response.{_status(answers[0])}", response=self.whole(answers))

    def error(self, body: dict[str, Any]) -> bytes:
        error = body["error"]
        return self._event("error", code=error["code"], message=error["message"], param=error["param"])

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        (answer,) = answers
        return self._response(_status(answer), [self._item(_status(answer), [_part(answer.text)])], answer)

    def _response(self, status: str, output: list[dict[str, Any]], answer: Answer | None) -> dict[str, Any]:
        usage = None
        if answer is not None:
            n_tokens = len(answer.token_ids)
            usage = {
                "input_tokens": self._n_prompt,
                "input_tokens_details": {"cached_tokens": answer.cached_tokens, "cache_write_tokens": 0},
                "output_tokens": n_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": self._n_prompt + n_tokens,
            }
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        made = {**self._head, "status": status, "error": None, "incomplete_details": cut}
        return made | {"output": output, "usage": usage}

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def _event(self, kind: str, **values: Any) -> bytes:
        number, self._n_events = self._n_events, self._n_events + 1
        return event({"type": kind, "sequence_number": number, **values}, kind)


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _status(answer: Answer) -> str:
    return "incomplete" if answer.finish_reason == "length" else "completed"
