"""Responses that the server keeps: reading, forgetting and continuing them, and POST /v1/responses/compact.

Sources: OpenAI's API reference, "Responses"; Open Responses, version 2026-04-24, for compaction.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llmcl.errors import shown
from llmcl.serve.body import read_fields
from llmcl.serve.compaction import INSTRUCTION, compaction_item, users_merged
from llmcl.serve.conversation import responses_messages, thinking
from llmcl.serve.errors import RequestError, unsupported
from llmcl.serve.fields import Fields, wrong
from llmcl.serve.generation import AsciiJSONResponse, GenerationResponse
from llmcl.serve.images import load_images
from llmcl.serve.kept import Kept, KeptResponse
from llmcl.serve.prepared import prepare
from llmcl.serve.sampling import read_sampling
from llmcl.serve.served import Answer, Ask
from llmcl.serve.service import Service
from llmcl.serve.tools import NO_TOOLS

_MOST_ITEMS, _SOME_ITEMS = 100, 20  # OpenAI's limit and default for a list
_SUMMARY_SHARE = 4  # a summary has at most this part of the context
_IDS = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_", "function_call_output": "fco_"}


async def retrieve(request: Request, service: Service) -> Response:
    """Returns a kept response."""
    if request.query_params.get("stream") == "true":
        raise unsupported("stream", "events of a response that has ended are not kept")
    return AsciiJSONResponse(_kept(request, service).response)


async def delete(request: Request, service: Service) -> Response:
    """Forgets a kept response. Later responses that continue it stay."""
    name = _kept(request, service).response["id"]
    service.kept.remove(name)
    return AsciiJSONResponse({"id": name, "object": "response", "deleted": True})


async def input_items(request: Request, service: Service) -> Response:
    """Lists the input of a kept response, by default the latest items first."""
    items = _kept(request, service).items
    query = request.query_params
    limit, order, after = query.get("limit", str(_SOME_ITEMS)), query.get("order", "desc"), query.get("after")
    if not limit.isascii() or not limit.isdigit() or not 1 <= int(limit[:9]) <= _MOST_ITEMS:
        raise wrong("limit", limit, f"a whole number from 1 to {_MOST_ITEMS}")
    if order not in ("asc", "desc"):
        raise wrong("order", order, "asc or desc")
    items = items if order == "asc" else items[::-1]
    if after is not None:
        place = next((n for n, item in enumerate(items) if item["id"] == after), None)
        if place is None:
            raise wrong("after", after, "the id of an item in the list")
        items = items[place + 1 :]
    page = items[: int(limit)]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    more = {"first_id": first, "last_id": last, "has_more": len(page) < len(items)}
    return AsciiJSONResponse({"object": "list", "data": page, **more})


async def compact(request: Request, service: Service) -> GenerationResponse:
    """Replaces a conversation by its user messages and a summary that the model writes."""
    served = service.served()
    fields = await read_fields(request, service.settings, takes_images=served.takes_images)
    fields.required("model", "a name")
    fields.text("model")
    earlier = earlier_response(fields, service)
    messages, items = [], []
    if earlier is None or fields.given("input") is not None:
        messages, items = responses_messages(fields), read_items(fields)
    elif instructions := fields.text("instructions"):
        messages = [{"role": "system", "content": instructions}]
    if earlier is not None:
        at = bool(fields.text("instructions"))
        messages[at:at] = earlier.messages
        items = [*items_after(earlier), *items]
    asked = users_merged([*messages, {"role": "user", "content": INSTRUCTION}])
    pixels = await load_images(request, service, served, asked)
    prepared = await prepare(served, asked, NO_TOOLS, {}, thinking(False), pixels=pixels)
    options = read_sampling(fields, served)
    most = max(1, served.max_context // _SUMMARY_SHARE)
    more: dict[str, Any] = {"reader": prepared.reader, "budget": prepared.budget, "images": prepared.images}
    ask = Ask(prepared.prompt, most, options, **more)
    form = CompactionForm(latest_users(items, served.max_context))
    return GenerationResponse(service, served, [ask], form, stream=False)


def earlier_response(fields: Fields, service: Service, latest: Kept | None = None) -> KeptResponse | None:
    """Returns the kept response that the request continues; None if it continues none.

    latest: the response that a WebSocket keeps; it is taken out, so nothing can continue it after a failure.
    """
    if (name := fields.text("previous_response_id")) is None:
        return None
    if latest is not None and (kept := latest.get(name)) is not None:
        latest.remove(name)
    elif (kept := service.kept.get(name)) is None:
        message = (
            f"previous_response_id: no response {shown(name)} is kept; it was not stored, or the server was started "
            "again or has forgotten it since: send the whole conversation as input"
        )
        raise RequestError(400, message, "previous_response_id", "previous_response_not_found")
    return kept


def check_results(earlier: Sequence[dict[str, Any]], messages: Sequence[dict[str, Any]]) -> None:
    """Raises RequestError for a tool's result in `messages` without its call there or in the earlier messages."""
    calls = {call["id"] for message in (*earlier, *messages) for call in message.get("tool_calls", ())}
    for message in messages:
        if message["role"] == "tool" and (call := message.get("tool_call_id", "")) not in calls:
            text = f"input: no function_call has the call_id {shown(call)} of a function_call_output"
            raise RequestError(400, text, "input", "invalid_value")


def items_after(kept: KeptResponse) -> list[dict[str, Any]]:
    """Returns the items of a conversation up to this response's output."""
    return [*kept.items, *kept.response.get("output", ())]


def read_items(fields: Fields) -> list[dict[str, Any]]:
    """Returns the field `input` as a list of complete items: with ids, states, and lists of content."""
    text = fields.given("input")
    items = [{"role": "user", "content": text}] if isinstance(text, str) else fields.items("input")
    return [_completed(item) for item in items]


def _completed(item: dict[str, Any]) -> dict[str, Any]:
    kind = item.get("type") or "message"
    item = {"type": kind, **{name: value for name, value in item.items() if value is not None}}
    item.setdefault("id", _IDS.get(kind, "item_") + secrets.token_hex(12))
    if kind == "message" and isinstance(content := item.get("content"), str):
        is_answer = item.get("role") == "assistant"
        part = {"type": "output_text", "annotations": [], "logprobs": []} if is_answer else {"type": "input_text"}
        item["content"] = [part | {"text": content}]
    elif kind == "reasoning":
        item.setdefault("summary", [])
    if kind in ("message", "function_call", "function_call_output"):
        item.setdefault("status", "completed")
    return item


def latest_users(items: Sequence[dict[str, Any]], most_characters: int) -> list[dict[str, Any]]:
    """Returns the latest user messages with this many characters at most: about a quarter of the context."""
    users: list[dict[str, Any]] = []
    for item in reversed(items):
        if item["type"] == "message" and item.get("role") == "user":
            most_characters -= sum(len(part.get("text") or "") for part in item["content"])
            if most_characters < 0:
                break
            users.insert(0, item)
    return users


def _kept(request: Request, service: Service) -> KeptResponse:
    service.served()
    name = request.path_params["id"]
    if (kept := service.kept.get(name)) is None:
        raise RequestError(404, f"Response with id {shown(name)} not found.", code="not_found")
    return kept


class CompactionForm:
    """Writes the object of /v1/responses/compact. users: the user messages that stay."""

    def __init__(self, users: Sequence[dict[str, Any]]):
        self._users = users

    def begin(self) -> bytes:
        raise AssertionError("a compaction is not streamed")

    def text(self, answer: Answer, text: str) -> bytes:
        return self.begin()

    def finish(self, answer: Answer) -> bytes:
        return self.begin()

    def end(self, answers: Sequence[Answer]) -> bytes:
        return self.begin()

    def error(self, body: dict[str, Any]) -> bytes:
        return self.begin()

    def alive(self, answer: Answer) -> bytes:
        return self.begin()

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        (answer,) = answers
        summary = answer.text if answer.reader is None else answer.reader.text
        return {
            "id": "resp_" + secrets.token_hex(12),
            "object": "response.compaction",
            "created_at": int(time.time()),
            "output": [*self._users, compaction_item(summary.strip())],
            "usage": usage_of(answer),
        }


def usage_of(answer: Answer) -> dict[str, Any]:
    """Returns the `usage` object of a response."""
    n_prompt, n_tokens = len(answer.ask.prompt), len(answer.token_ids)
    return {
        "input_tokens": n_prompt,
        "input_tokens_details": {"cached_tokens": answer.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": n_tokens,
        "output_tokens_details": {"reasoning_tokens": answer.thought_tokens},
        "total_tokens": n_prompt + n_tokens,
    }
