"""POST /v1/messages and /v1/messages/count_tokens, as Anthropic's clients call them."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from llmcl.serve.body import read_fields
from llmcl.serve.chat_completions import refuse_tools
from llmcl.serve.conversation import anthropic_messages
from llmcl.serve.errors import unsupported
from llmcl.serve.events import event
from llmcl.serve.fields import Fields
from llmcl.serve.generation import GenerationResponse
from llmcl.serve.sampling import MAX_STOPS, read_sampling
from llmcl.serve.served import Answer, Ask, Served
from llmcl.serve.service import Service

if TYPE_CHECKING:
    from llmcl.tokenizer import Tokenizer


async def messages(request: Request, service: Service) -> Response:
    """Answers a conversation; see docs/guide/server.md for the fields."""
    served = service.served()
    fields = await read_fields(request, service.settings)
    fields.required("max_tokens", "a whole number")
    max_tokens = fields.whole("max_tokens", None, 1) or 1
    _refuse_what_is_missing(fields)
    options = read_sampling(fields, served)
    stop = fields.strings("stop_sequences", MAX_STOPS)
    stream = fields.flag("stream")
    prompt = await _prompt(fields, served)
    ask = Ask(prompt, min(max_tokens, served.max_context), options, stop)
    form = MessageForm(served.name, len(prompt), served.tokenizer)
    return GenerationResponse(service, served, [ask], form, stream=stream)


async def count_tokens(request: Request, service: Service) -> Response:
    """How long the prompt of a conversation is."""
    served = service.served()
    fields = await read_fields(request, service.settings)
    _refuse_what_is_missing(fields)
    return JSONResponse({"input_tokens": len(await _prompt(fields, served))})


async def _prompt(fields: Fields, served: Served) -> list[int]:
    fields.text("model")
    return await served.encode_chat(anthropic_messages(fields))


def _refuse_what_is_missing(fields: Fields) -> None:
    refuse_tools(fields)
    fields.refuse("MCP servers are not supported", "mcp_servers")
    fields.refuse("schemas are not supported", "output_format", "output_config")
    if fields.object("thinking").one_of("type", "enabled", "disabled", "adaptive") == "enabled":
        raise unsupported("thinking", "thinking that is kept apart from the answer is not supported")


class MessageForm:
    """A message, and the events of one."""

    def __init__(self, model: str, n_prompt: int, tokenizer: Tokenizer):
        self._head = {"id": "msg_" + secrets.token_hex(12), "type": "message", "role": "assistant", "model": model}
        self._n_prompt = n_prompt
        self._tokenizer = tokenizer

    def begin(self) -> bytes:
        nothing: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        message = {**self._head, **nothing, "usage": {"input_tokens": self._n_prompt, "output_tokens": 0}}
        block = {"type": "text", "text": "", "citations": None}
        return _event({"type": "message_start", "message": message}) + _event(
            {"type": "content_block_start", "index": 0, "content_block": block}
        )

    def text(self, answer: Answer, text: str) -> bytes:
        return _event({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}})

    def finish(self, answer: Answer) -> bytes:
        return _event({"type": "content_block_stop", "index": 0}) + _event(
            {"type": "message_delta", "delta": self._ending(answer), "usage": self._usage(answer)}
        )

    def end(self, answers: Sequence[Answer]) -> bytes:
        return _event({"type": "message_stop"})

    def error(self, body: dict[str, Any]) -> bytes:
        return _event(body)

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        (answer,) = answers
        content = [{"type": "text", "text": answer.text, "citations": None}]
        return {**self._head, "content": content, **self._ending(answer), "usage": self._usage(answer)}

    def _usage(self, answer: Answer) -> dict[str, int]:
        """As Anthropic counts: cached tokens are no part of input_tokens."""
        return {
            "input_tokens": self._n_prompt - answer.cached_tokens,
            "cache_read_input_tokens": answer.cached_tokens,
            "output_tokens": len(answer.token_ids),
        }

    def _ending(self, answer: Answer) -> dict[str, str | None]:
        stop = answer.stop_string(self._tokenizer)
        reason = "max_tokens" if answer.finish_reason == "length" else "end_turn" if stop is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": stop}


def _event(data: dict[str, Any]) -> bytes:
    return event(data, data["type"])
