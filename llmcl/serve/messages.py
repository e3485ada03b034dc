"""POST /v1/messages and /v1/messages/count_tokens, as Anthropic's clients call them."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from llmcl.serve.body import read_fields
from llmcl.serve.conversation import Ending, anthropic_messages, check_goes_on, thinking, thought_budget
from llmcl.serve.events import event
from llmcl.serve.fields import Fields
from llmcl.serve.generation import GenerationResponse
from llmcl.serve.images import load_images
from llmcl.serve.prepared import encode_with_tools, prepare
from llmcl.serve.sampling import MAX_STOPS, max_tokens, read_sampling
from llmcl.serve.served import Answer, Ask
from llmcl.serve.service import Service
from llmcl.serve.structure import read_structure
from llmcl.serve.tools import anthropic_tools, as_object
from llmcl.tokenizer.answer_parts import CallPart, Part, Thought

if TYPE_CHECKING:
    from llmcl.tokenizer import Tokenizer


async def messages(request: Request, service: Service) -> GenerationResponse:
    """Answers a conversation. docs/guide/server.md lists the fields."""
    served = service.served()
    fields = await read_fields(request, service.settings, takes_images=served.takes_images)
    fields.required("max_tokens", "a whole number")
    most = max_tokens(fields, "max_tokens") or served.max_context
    _refuse_what_is_missing(fields)
    options = read_sampling(fields, served)
    stop = fields.strings("stop_sequences", MAX_STOPS)
    stream = fields.flag("stream")
    use = anthropic_tools(fields)
    config = fields.object("output_config")
    format = fields.object("output_format") if config.given("format") is None else config.object("format")
    structure = await read_structure(fields, served, format)
    said = _messages(fields)
    variables, ending, budget = _variables(fields), _ending(said), _budget(fields)
    pixels = await load_images(request, service, served, said)
    prepared = await prepare(
        served, said, use, structure, variables, ending=ending, most=most, budget=budget, pixels=pixels
    )
    prompt, reader = prepared.prompt, prepared.reader
    options |= prepared.options
    most_tokens = min(most, served.max_context)
    ask = Ask(prompt, most_tokens, options, stop, reader=reader, budget=prepared.budget, images=prepared.images)
    form = MessageForm(served.name, len(prompt), most, served.tokenizer)
    return GenerationResponse(service, served, [ask], form, stream=stream)


async def count_tokens(request: Request, service: Service) -> Response:
    """Counts a conversation's prompt tokens."""
    served = service.served()
    fields = await read_fields(request, service.settings, takes_images=served.takes_images)
    _refuse_what_is_missing(fields)
    said, use, variables = _messages(fields), anthropic_tools(fields), _variables(fields)
    pixels = await load_images(request, service, served, said)
    counting = encode_with_tools(served, said, use, variables, ending=_ending(said), counted=True, pixels=pixels)
    prompt = await service.count(request, counting)
    return JSONResponse({"input_tokens": len(prompt.ids)})


def _ending(said: list[dict[str, Any]]) -> Ending:
    """Returns how the prompt ends: an assistant message at the end is continued."""
    if said[-1]["role"] != "assistant":
        return "answer"
    check_goes_on(said, "messages")
    return "within"


def _messages(fields: Fields) -> list[dict[str, Any]]:
    fields.text("model")
    return anthropic_messages(fields)


def _refuse_what_is_missing(fields: Fields) -> None:
    fields.refuse("MCP servers are not supported", "mcp_servers")


def _variables(fields: Fields) -> dict[str, Any]:
    """Returns the template variables for `thinking` and `effort`."""
    kind = fields.object("thinking").one_of("type", "enabled", "disabled", "adaptive")
    return thinking({"enabled": True, "disabled": False}.get(kind or ""), fields.object("output_config").text("effort"))


def _budget(fields: Fields) -> int | None:
    thinks = fields.object("thinking")
    return thought_budget(thinks, "budget_tokens") if thinks.given("type") == "enabled" else thought_budget(fields)


class MessageForm:
    """Writes a message object and the events of a streamed message."""

    def __init__(self, model: str, n_prompt: int, max_tokens: int, tokenizer: Tokenizer):
        self._head = {"id": "msg_" + secrets.token_hex(12), "type": "message", "role": "assistant", "model": model}
        self._n_prompt = n_prompt
        self._max_tokens = max_tokens
        self._tokenizer = tokenizer
        self._blocks: list[dict[str, Any]] = []
        self._is_open = False  # whether the last block is open
        self._arguments = ""  # arguments in the last block
        self._is_complete = False  # whether the arguments are complete

    def begin(self) -> bytes:
        nothing: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        message = {**self._head, **nothing, "usage": {"input_tokens": self._n_prompt, "output_tokens": 0}}
        return _event({"type": "message_start", "message": message})

    def text(self, answer: Answer, text: str) -> bytes:
        return b"".join(self._part(part) for part in answer.parts(text))

    def finish(self, answer: Answer) -> bytes:
        rest = self.text(answer, "")
        if not self._blocks:
            rest += self._opened({"type": "text", "text": "", "citations": None})
        ending = {"type": "message_delta", "delta": self._ending(answer), "usage": self._usage(answer)}
        return rest + self._close() + _event(ending)

    def _part(self, part: Part) -> bytes:
        """Returns a part's events and adds the part to `_blocks`."""
        if isinstance(part, CallPart):
            block = {"type": "tool_use", "id": part.call.id, "name": part.call.name, "input": {}}
            begun = self._opened(block) if part.is_first else b""
            self._arguments += part.delta
            if part.delta:
                begun += self._delta({"type": "input_json_delta", "partial_json": part.delta})
            self._is_complete = part.is_last
            return begun + (self._close() if part.is_last else b"")
        if isinstance(part, Thought):
            begun = self._opened({"type": "thinking", "thinking": "", "signature": ""}, unless="thinking")
            self._blocks[-1]["thinking"] += part.text
            return begun + self._delta({"type": "thinking_delta", "thinking": part.text})
        begun = self._opened({"type": "text", "text": "", "citations": None}, unless="text")
        self._blocks[-1]["text"] += part.text
        return begun + self._delta({"type": "text_delta", "text": part.text})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event({"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta})

    def _opened(self, block: dict[str, Any], unless: str | None = None) -> bytes:
        """Ends the previous block and begins a new one. unless: does nothing while a block of this type is open."""
        if self._is_open and self._blocks[-1]["type"] == unless:
            return b""
        ended = self._close()
        self._blocks.append(block)
        self._is_open, self._arguments = True, ""
        return ended + _event(
            {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": dict(block)}
        )

    def _close(self) -> bytes:
        if not self._is_open:
            return b""
        self._is_open = False
        if self._blocks[-1]["type"] == "tool_use":
            self._blocks[-1]["input"] = as_object(self._arguments, is_complete=self._is_complete)
        return _event({"type": "content_block_stop", "index": len(self._blocks) - 1})

    def end(self, answers: Sequence[Answer]) -> bytes:
        return _event({"type": "message_stop"})

    def error(self, body: dict[str, Any]) -> bytes:
        return _event(body)

    def alive(self, answer: Answer) -> bytes:
        return _event({"type": "ping"})

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        (answer,) = answers
        self.text(answer, answer.text)
        self.finish(answer)
        return {**self._head, "content": self._blocks, **self._ending(answer), "usage": self._usage(answer)}

    def _usage(self, answer: Answer) -> dict[str, int]:
        """Counts like Anthropic: cached tokens are not part of input_tokens."""
        return {
            "input_tokens": self._n_prompt - answer.cached_tokens,
            "cache_read_input_tokens": answer.cached_tokens,
            "output_tokens": len(answer.token_ids),
        }

    def _ending(self, answer: Answer) -> dict[str, str | None]:
        stop = answer.stop_string(self._tokenizer)
        if answer.finish_reason == "length":
            is_context = len(answer.token_ids) < self._max_tokens
            reason = "model_context_window_exceeded" if is_context else "max_tokens"
        elif stop is not None:
            reason = "stop_sequence"
        else:
            reason = "tool_use" if answer.calls else "end_turn"
        return {"stop_reason": reason, "stop_sequence": stop}


def _event(data: dict[str, Any]) -> bytes:
    return event(data, data["type"])
