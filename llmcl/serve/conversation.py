"""Converts a request's messages for chat templates: [{"role": ..., "content": text}]."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Literal

from llmcl.errors import UsageError, shown
from llmcl.serve.compaction import read_compaction, users_merged
from llmcl.serve.errors import RequestError, unsupported
from llmcl.serve.fields import Fields, wrong
from llmcl.serve.image_parts import (
    ANTHROPIC_IMAGES,
    OPENAI_IMAGES,
    Content,
    read_image,
    results_as_text,
    with_ollama_images,
)
from llmcl.tokenizer.answer_parts import Call

OPENAI_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
BILLING = "x-anthropic-billing-header:"  # changes with every request and would spoil the prefix cache
Ending = Literal["answer", "nothing", "within"]
"""A prompt ends with the opening of an answer, behind the last message, or within it, so that the answer goes on."""
_WITH_IMAGES = ("user", "tool", "function")  # roles whose messages may have images
_THOUGHTS = ("thinking", "redacted_thinking")  # part types from earlier answers


def openai_messages(fields: Fields) -> list[dict[str, Any]]:
    """Reads the field `messages` of /v1/chat/completions. Raises RequestError that names the faulty place."""
    messages = results_as_text([_openai_message(message) for message in fields.objects("messages")])
    if not messages:
        raise RequestError(400, "messages: expected at least one message", "messages", "missing_required_parameter")
    return messages


def read_ending(fields: Fields, messages: list[dict[str, Any]]) -> Ending:
    """Reads `continue_final_message` and `add_generation_prompt`, with vLLM's meaning."""
    goes_on = fields.flag("continue_final_message")
    opens = fields.flag("add_generation_prompt", not goes_on)
    if not goes_on:
        return "answer" if opens else "nothing"
    name = "continue_final_message"
    if opens:
        raise RequestError(400, f"{name}: contradicts add_generation_prompt; leave one of them out", name)
    check_goes_on(messages, name)
    return "within"


def check_goes_on(messages: list[dict[str, Any]], param: str) -> None:
    """Raises RequestError, blaming the field `param`, unless an answer can continue the last message."""
    if messages[-1]["role"] != "assistant":
        raise wrong(param, messages[-1]["role"], "a last message of the assistant's")
    if messages[-1].get("tool_calls"):
        raise unsupported(param, "an answer cannot go on from calls of tools")


def system_merged(messages: list[dict[str, Any]], *, all_of_them: bool = False) -> list[dict[str, Any]]:
    """Merges the system messages at the front into one, since many templates accept no second. all_of_them: merges
    later system messages, too.
    """
    n = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    rest = [message for message in messages[n:] if not (all_of_them and message["role"] == "system")]
    system = [*messages[:n], *(later for later in messages[n:] if all_of_them and later["role"] == "system")]
    if len(system) < 2 and len(system) == n:
        return messages
    return [{**system[0], "content": "\n\n".join(message["content"] for message in system)}, *rest]


def _openai_message(message: Fields) -> dict[str, Any]:
    role = message.one_of("role", *OPENAI_ROLES)
    if role is None:
        raise wrong(message.name("role"), None, f"one of {', '.join(OPENAI_ROLES)}")
    calls = [_tool_call(call) for call in message.objects("tool_calls")]
    images = OPENAI_IMAGES if role in _WITH_IMAGES else ()
    content = read_content(message, "content", ("text", "refusal", "input_text", "output_text"), images)
    if content is None and role != "assistant":
        raise wrong(message.name("content"), None, "a string or a list of parts")
    read: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": content or ""}
    if calls:
        read["tool_calls"] = calls
    for name in ("tool_call_id", "name"):
        if (value := message.text(name)) is not None:
            read[name] = value
    return read | _thoughts(message.text("reasoning_content"))


def ollama_messages(fields: Fields) -> list[dict[str, Any]]:
    """Reads the field `messages` of /api/chat; the list may be empty. Calls and results often have no ids: they are
    paired in order, by names if there are any.
    """
    messages, open_calls = [], list[dict[str, Any]]()
    for number, message in enumerate(fields.objects("messages")):
        read = _openai_message(message.with_defaults({"content": ""})) | _thoughts(message.text("thinking"))
        if message.items("images"):
            if read["role"] not in _WITH_IMAGES:
                raise unsupported(message.name("images"), "images are taken in messages of the user and of tools")
            read["content"] = with_ollama_images(read["content"], message)
        name = message.text("tool_name")
        if calls := read.get("tool_calls"):
            for n, call in enumerate(calls):
                call["id"] = call["id"] or f"{number:05}{n:04}"  # nine characters, which Mistral's templates need
            open_calls = [*calls]
        elif read["role"] == "tool":
            called = next((call for call in open_calls if name in (None, call["function"]["name"])), None)
            if called is not None and "tool_call_id" not in read:
                read["tool_call_id"] = called["id"]
                name = called["function"]["name"]
            open_calls = [call for call in open_calls if call["id"] != read.get("tool_call_id")]
        messages.append(read | ({} if name is None else {"name": name}))
    return results_as_text(messages)


def _thoughts(text: str | None) -> dict[str, str]:
    """Returns the model's thoughts before a message. Many templates show thoughts until the next user message."""
    return {"reasoning_content": text} if text else {}


def template_variables(fields: Fields) -> dict[str, Any]:
    """Reads `chat_template_kwargs`: extra template variables, as in vLLM, SGLang and llama-server."""
    from llmcl.tokenizer import chat_template  # imported late: the server listens before the tokenizer is loaded

    name = "chat_template_kwargs"
    variables = fields.object(name).values
    try:
        chat_template.check_variables(variables)
    except UsageError as error:
        raise RequestError(400, f"{name}: {error}", name, "invalid_value") from None
    return variables


def thinking(thinks: bool | None, effort: str | None = None) -> dict[str, Any]:
    """Returns the template variables for thinking, under the names that chat templates use. None: the model's default.

    effort: for example low; none turns thinking off.
    """
    if effort == "none":
        thinks, effort = False, None
    variables: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    return variables if thinks is None else variables | {"enable_thinking": thinks, "thinking": thinks}


BUDGETS = (  # names in llama-server, vLLM and others
    "thinking_budget_tokens",
    "reasoning_budget",
    "reasoning_budget_tokens",
    "thinking_token_budget",
    "thinking_budget",
)


def thought_budget(fields: Fields, *names: str) -> int | None:
    """Returns how many tokens the model may think; None for no limit, which some clients write as -1."""
    for name in names or BUDGETS:
        if (n := fields.whole(name, None, -1)) is not None:
            return None if n == -1 else n
    return None


def answered(text: str, thoughts: str = "", calls: Sequence[Call] = ()) -> dict[str, Any]:
    """Converts an answer to an assistant message."""
    read: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        said = [{"id": call.id, "function": {"name": call.name, "arguments": call.arguments}} for call in calls]
        read["tool_calls"] = [_tool_call(Fields(call)) for call in said]
    return read | _thoughts(thoughts)


def responses_messages(fields: Fields) -> list[dict[str, Any]]:
    """Reads /v1/responses' `instructions` and `input`: a text, or a list with messages, calls and results."""
    messages: list[dict[str, Any]] = []
    if instructions := fields.text("instructions"):
        messages.append({"role": "system", "content": instructions})
    if isinstance(said := fields.given("input"), str):
        return [*messages, {"role": "user", "content": said}]
    thoughts = ""  # thoughts that precede the next message or call
    compacted = False
    for item in fields.objects("input"):
        kind = item.text("type") or "message"
        if kind == "reasoning":
            thoughts += joined_text(item, "content", ("reasoning_text", "text")) or ""
            continue
        if kind == "message":
            messages.append(_openai_message(item))
        elif kind == "function_call":
            call = {"id": item.given("call_id"), "function": {"name": item.given("name")}}
            call["function"]["arguments"] = item.given("arguments")
            # Text and calls from one answer are separate items here, but a single message for a template.
            if thoughts or not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(_tool_call(Fields(call, item.place)))
        elif kind == "compaction":
            messages.append(read_compaction(item))
            compacted = True
        elif kind == "function_call_output":
            output = read_content(item, "output", ("input_text", "output_text", "text"), OPENAI_IMAGES) or ""
            messages.append({"role": "tool", "content": output, "tool_call_id": item.text("call_id") or ""})
        else:
            raise unsupported(item.name("type"), f"items of type {shown(kind)} are not supported")
        if messages[-1]["role"] == "assistant":
            messages[-1] |= _thoughts(thoughts)
        thoughts = ""
    if not messages:
        raise RequestError(400, "input: expected a text or at least one item", "input", "missing_required_parameter")
    messages = results_as_text(messages)
    return users_merged(messages) if compacted else messages


def _tool_call(call: Fields) -> dict[str, Any]:
    """Converts a call for templates: arguments become an object if they parse as JSON."""
    function = call.object("function")
    arguments = function.given("arguments") or {}
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):  # a model's invalid JSON goes to the template unchanged
            arguments = json.loads(arguments)
    elif not isinstance(arguments, dict):
        raise wrong(function.name("arguments"), arguments, "a string of JSON, or an object")
    return {
        "id": call.text("id") or "",
        "type": "function",
        "function": {"name": function.text("name") or "", "arguments": arguments},
    }


def joined_text(
    fields: Fields,
    field: str,
    kinds: tuple[str, ...],
    *,
    leave_out: str | None = None,
    read_elsewhere: tuple[str, ...] = (),
) -> str | None:
    """Reads a field that takes text alone. See `read_content`."""
    content = read_content(fields, field, kinds, leave_out=leave_out, read_elsewhere=read_elsewhere)
    assert not isinstance(content, list)
    return content


def read_content(
    fields: Fields,
    field: str,
    kinds: tuple[str, ...],
    images: tuple[str, ...] = (),
    *,
    leave_out: str | None = None,
    read_elsewhere: tuple[str, ...] = (),
) -> Content | None:
    """Returns a text field, or the texts of a list of parts joined by line breaks. With images: the list of parts.

    kinds, images: part types that hold a text or an image. leave_out: drops parts beginning with this text.
    read_elsewhere: part types that the caller reads.
    """
    value = fields.given(field)
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wrong(fields.name(field), value, "a string or a list of parts")
    parts: list[list[str] | dict[str, Any]] = []  # neighbouring texts are one list
    for part in fields.objects(field):
        kind = part.text("type") or "text"
        if kind in _THOUGHTS or kind in read_elsewhere:
            continue
        if kind in images:
            parts.append(read_image(part))
            continue
        if kind not in kinds:
            taken = "text and images are" if images else "only text is"
            raise unsupported(part.name("type"), f"parts of type {shown(kind)} are not supported here, {taken}")
        text = part.text("refusal" if kind == "refusal" else "text")
        if text is None:
            raise wrong(part.name("text"), None, "a string")
        if leave_out is None or not text.startswith(leave_out):
            if not parts or isinstance(parts[-1], dict):
                parts.append([])
            parts[-1].append(text)  # type: ignore[union-attr]  # the branch above
    read = [part if isinstance(part, dict) else {"type": "text", "text": "\n".join(part)} for part in parts]
    if all(part["type"] == "text" for part in read):
        return read[0]["text"] if read else ""
    return read


def anthropic_messages(fields: Fields) -> list[dict[str, Any]]:
    """Reads `system` and `messages` of /v1/messages, without the billing header that changes with every request."""
    messages = []
    if system := joined_text(fields, "system", ("text",), leave_out=BILLING):
        messages.append({"role": "system", "content": system})
    said = [read for message in fields.objects("messages") for read in _anthropic_message(message)]
    if not said:
        raise RequestError(400, "messages: expected at least one message", "messages")
    return messages + results_as_text(said)


def _anthropic_message(message: Fields) -> list[dict[str, Any]]:
    """Converts a message. Each tool result becomes a separate message, before the user's text."""
    role = message.one_of("role", "user", "assistant", "system")
    if role is None:
        raise wrong(message.name("role"), None, "user or assistant")
    if message.given("content") is None:
        raise wrong(message.name("content"), None, "a string or a list of blocks")
    calls, results, thoughts = [], [], ""
    if isinstance(message.given("content"), list):
        for block in message.objects("content"):
            if block.given("type") == "thinking":
                thoughts += block.text("thinking") or ""
            elif block.given("type") == "tool_use":
                function = {"name": block.text("name") or "", "arguments": block.object("input").values}
                calls.append({"id": block.text("id") or "", "type": "function", "function": function})
            elif block.given("type") == "tool_result":
                output = read_content(block, "content", ("text",), ANTHROPIC_IMAGES) or ""
                results.append({"role": "tool", "content": output, "tool_call_id": block.text("tool_use_id") or ""})
    images = ANTHROPIC_IMAGES if role == "user" else ()
    content = read_content(message, "content", ("text",), images, read_elsewhere=("tool_use", "tool_result"))
    read = {"role": role, "content": content or ""} | ({"tool_calls": calls} if calls else {}) | _thoughts(thoughts)
    return [*results, read] if content or calls or not results else results
