"""POST /v1/responses, OpenAI's newer API. A request brings the whole conversation or continues an earlier response."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from llmcl.errors import ContextLengthError
from llmcl.serve.access_log import record_of
from llmcl.serve.body import read_fields
from llmcl.serve.conversation import answered, responses_messages, thinking, thought_budget
from llmcl.serve.events import event
from llmcl.serve.fields import Fields, wrong
from llmcl.serve.generation import GenerationResponse, as_refusal
from llmcl.serve.images import load_images
from llmcl.serve.kept import Kept, KeptResponse
from llmcl.serve.kept_responses import check_results, earlier_response, items_after, read_items, usage_of
from llmcl.serve.prepared import prepare
from llmcl.serve.responses_socket import LATEST
from llmcl.serve.sampling import max_tokens, read_sampling
from llmcl.serve.served import Answer, Ask, Served
from llmcl.serve.service import Service
from llmcl.serve.structure import read_structure
from llmcl.serve.tools import NO_TOOLS, ToolUse, openai_tools
from llmcl.tokenizer.answer_parts import CallPart, Part, Said, Thought


async def responses(request: Request, service: Service) -> ASGIApp:
    """Answers a conversation. docs/guide/server.md lists the fields.

    When the prompt is too long, Codex shortens the conversation if the stream reports the failure, but gives up at
    status 400. So Codex gets a stream.
    """
    served = service.served()
    fields = await read_fields(request, service.settings, takes_images=served.takes_images)
    fields.text("model")
    latest: Kept | None = request.scope.get(LATEST)
    stream = _check_message(fields) if latest is not None else fields.flag("stream")
    try:
        return await _answer(request, fields, served, service, latest, stream=stream)
    except ContextLengthError as error:
        if not (stream and request.headers.get("originator", "").startswith("codex")):
            raise
        refusal = as_refusal(error, served)
        record_of(request.scope).error = refusal.message
        form = ResponseForm(served.name, 0, fields, read_sampling(fields, served), None)
        events = form.begin() + form.failed(refusal.body(request.url.path)["error"])
        return Response(events, media_type="text/event-stream")


def _check_message(fields: Fields) -> bool:
    """Checks what only a WebSocket's message has. Returns True: its answer is a stream."""
    if fields.text("type") != "response.create":
        raise wrong("type", fields.given("type"), "response.create")
    fields.refuse("several streams over one connection are not supported", "stream_id")
    return True


async def _answer(
    request: Request, fields: Fields, served: Served, service: Service, latest: Kept | None, *, stream: bool
) -> GenerationResponse:
    earlier = earlier_response(fields, service, latest)
    messages = responses_messages(fields)
    n_instructions = bool(fields.text("instructions"))  # instructions of an earlier response do not count
    if earlier is not None:
        check_results(earlier.messages, messages)
        messages[n_instructions:n_instructions] = earlier.messages
    _refuse_what_is_missing(fields)
    use = openai_tools(fields)
    structure = await read_structure(fields, served, fields.object("text").object("format"))
    options = read_sampling(fields, served)
    limit = max_tokens(fields, "max_output_tokens")
    variables = thinking(None, fields.object("reasoning").text("effort"))
    budget = thought_budget(fields)
    pixels = await load_images(request, service, served, messages)
    prepared = await prepare(served, messages, use, structure, variables, most=limit, budget=budget, pixels=pixels)
    prompt, reader = prepared.prompt, prepared.reader
    # A warm-up reads the prompt, so its pages are cached; the token is dropped.
    warms_up = latest is not None and not fields.flag("generate", True)
    most = 1 if warms_up else min(limit or served.max_context, served.max_context)
    options_now = {**options, **prepared.options}
    ask = Ask(prompt, most, options_now, reader=reader, budget=prepared.budget, images=prepared.images)
    said = messages[n_instructions:]
    keepers = [*([service.kept] if fields.flag("store", True) else []), *([] if latest is None else [latest])]

    def keep(response: dict[str, Any], answer: Answer) -> None:
        items = [*([] if earlier is None else items_after(earlier)), *read_items(fields)]
        kept = KeptResponse([*said, *([] if warms_up else [_as_message(answer)])], response, items)
        for keeper in keepers:
            keeper.add(response["id"], kept)

    form = ResponseForm(served.name, len(prompt), fields, options, limit, use, keep if keepers else None, warms_up)
    return GenerationResponse(service, served, [ask], form, stream=stream)


def _as_message(answer: Answer) -> dict[str, Any]:
    if (reader := answer.reader) is None:
        return answered(answer.text)
    return answered(reader.text, reader.thoughts, reader.calls)


def _refuse_what_is_missing(fields: Fields) -> None:
    fields.refuse("conversations that are kept at the server are not supported", "conversation")
    fields.refuse("prompts that are kept at the server are not supported", "prompt")
    fields.refuse("answers that nobody waits for are not supported", "background")
    fields.refuse("probabilities of tokens are not supported", "top_logprobs")


class ResponseForm:
    """Writes a response object with items (thoughts, a message, function calls), and a stream's numbered events."""

    def __init__(
        self,
        model: str,
        n_prompt: int,
        fields: Fields,
        options: dict[str, Any],
        max_tokens: int | None,
        use: ToolUse = NO_TOOLS,
        keep: Callable[[dict[str, Any], Answer], None] | None = None,
        warms_up: bool = False,
    ):
        """keep: stores the whole response; None: nothing is stored. warms_up: the response has no output."""
        self._keep, self._warms_up = keep, warms_up
        self._n_prompt = n_prompt
        self._n_events = 0
        self._items: list[dict[str, Any]] = []
        self._is_open = False  # whether the last item is open
        format = fields.object("text").object("format").values
        choice = fields.given("tool_choice")
        self._head = {
            "id": "resp_" + secrets.token_hex(12),
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "instructions": fields.text("instructions"),
            "max_output_tokens": max_tokens,
            "metadata": fields.object("metadata").strings_by_name(),
            "parallel_tool_calls": fields.flag("parallel_tool_calls", True),
            "previous_response_id": fields.text("previous_response_id"),
            "temperature": options["temperature"],
            "presence_penalty": options["presence_penalty"],
            "frequency_penalty": options["frequency_penalty"],
            "top_logprobs": 0,
            "reasoning": {"effort": fields.object("reasoning").text("effort"), "summary": None},
            "max_tool_calls": None,
            "store": fields.flag("store", True),
            "background": False,
            "service_tier": "default",
            "safety_identifier": fields.text("safety_identifier"),
            "prompt_cache_key": fields.text("prompt_cache_key"),
            "text": {"format": _FORMATS.get(format.get("type"), dict)(format) or {"type": "text"}},
            "tool_choice": choice if choice == "none" or (choice is not None and use.tools) else "auto",
            "tools": [
                {
                    "type": "function",
                    "name": tool.name,
                    "description": tool.description or None,
                    "parameters": tool.parameters,
                    "strict": tool.strict,
                }
                for tool in use.tools
            ],
            "top_p": options["top_p"],
            "truncation": "disabled",
        }

    def begin(self) -> bytes:
        started = self._response("in_progress", None)
        return self._event("response.created", response=started) + self._event("response.in_progress", response=started)

    def text(self, answer: Answer, text: str) -> bytes:
        return b"" if self._warms_up else b"".join(self._part(part) for part in answer.parts(text))

    def finish(self, answer: Answer) -> bytes:
        if self._warms_up:
            return b""
        rest = self.text(answer, "")
        if not self._items:
            rest += self._opened("message")
        return rest + self._close(_status(answer))

    def end(self, answers: Sequence[Answer]) -> bytes:
        status = "completed" if self._warms_up else _status(answers[0])
        return self._event(f"response.{status}", response=self._response(status, answers[0]))

    def error(self, body: dict[str, Any]) -> bytes:
        error = body["error"]
        return self._event("error", code=error["code"], message=error["message"], param=error["param"])

    def failed(self, error: dict[str, Any]) -> bytes:
        said = {"code": error["code"], "message": error["message"]}
        return self._event("response.failed", response=self._response("failed", None) | {"error": said})

    def alive(self, answer: Answer) -> bytes:
        return self._event("response.in_progress", response=self._response("in_progress", None))

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        (answer,) = answers
        self.text(answer, answer.text)
        self.finish(answer)
        return self._response(_status(answer), answer)

    def _response(self, status: str, answer: Answer | None) -> dict[str, Any]:
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        ended = int(time.time()) if status == "completed" else None
        response = {**self._head, "completed_at": ended, "status": status, "error": None, "incomplete_details": cut}
        usage = None if answer is None else usage_of(answer)
        response |= {"output": [dict(item) for item in self._items], "usage": usage}
        if answer is not None and self._keep is not None:
            self._keep(response, answer)
        return response

    # ---- items --------------------------------------------------------------------------------------

    def _part(self, part: Part) -> bytes:
        kind = "message" if isinstance(part, Said) else "reasoning" if isinstance(part, Thought) else "function_call"
        if isinstance(part, CallPart):
            begun = self._opened(kind, part) if part.is_first else b""
            item = self._items[-1]
            item["arguments"] += part.delta
            if part.delta:
                at = {"item_id": item["id"], "output_index": len(self._items) - 1}
                begun += self._event("response.function_call_arguments.delta", **at, delta=part.delta)
            return begun + (self._close("completed") if part.is_last else b"")
        begun = b"" if self._is_open and self._items[-1]["type"] == kind else self._opened(kind)
        self._items[-1]["content"][0]["text"] += part.text
        if kind == "reasoning":
            return begun + self._event("response.reasoning_text.delta", **self._place(), delta=part.text)
        return begun + self._event("response.output_text.delta", **self._place(), delta=part.text, logprobs=[])

    def _opened(self, kind: str, part: CallPart | None = None) -> bytes:
        """Ends the previous item and begins a new one."""
        ended = self._close("completed")
        item: dict[str, Any] = {"type": kind, "status": "in_progress"}
        content: list[dict[str, Any]] = []
        if part is not None:
            item |= {"id": "fc_" + secrets.token_hex(12), "call_id": part.call.id}
            item |= {"name": part.call.name, "arguments": ""}
        elif kind == "reasoning":
            item |= {"id": "rs_" + secrets.token_hex(12), "summary": []}
            content = [{"type": "reasoning_text", "text": ""}]
        else:
            item |= {"id": "msg_" + secrets.token_hex(12), "role": "assistant"}
            content = [{"type": "output_text", "text": "", "annotations": [], "logprobs": []}]
        shown = item | ({} if part is not None else {"content": []})
        self._items.append(item | ({} if part is not None else {"content": content}))
        self._is_open = True
        begun = self._event("response.output_item.added", output_index=len(self._items) - 1, item=shown)
        if part is None:
            begun += self._event("response.content_part.added", **self._place(), part=dict(content[0]))
        return ended + begun

    def _close(self, status: str) -> bytes:
        """Ends the open item, if any."""
        if not self._is_open:
            return b""
        self._is_open = False
        item = self._items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            at = {"item_id": item["id"], "output_index": len(self._items) - 1}
            said = {"name": item["name"], "arguments": item["arguments"]}
            done = self._event("response.function_call_arguments.done", **at, **said)
        else:
            part = item["content"][0]
            is_text = item["type"] == "message"
            kind = "output_text" if is_text else "reasoning_text"
            more: dict[str, Any] = {"logprobs": []} if is_text else {}
            done = self._event(f"response.{kind}.done", **self._place(), text=part["text"], **more)
            done += self._event("response.content_part.done", **self._place(), part=part)
        return done + self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1, "content_index": 0}

    def _event(self, kind: str, **values: Any) -> bytes:
        number, self._n_events = self._n_events, self._n_events + 1
        return event({"type": kind, "sequence_number": number, **values}, kind)


def _schema_format(format: dict[str, Any]) -> dict[str, Any]:
    schema = format.get("schema") or {}
    described = {"type": "json_schema", "name": str(format.get("name") or "schema"), "schema": schema}
    return described | {name: format[name] for name in ("description", "strict") if format.get(name) is not None}


_FORMATS: dict[Any, Any] = {"json_schema": _schema_format, "json_object": lambda _: {"type": "json_object"}}


def _status(answer: Answer) -> str:
    return "incomplete" if answer.finish_reason == "length" else "completed"
