"""The messages of a request, as a chat template takes them: [{"role": ..., "content": text}]."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Literal

from llmcl.errors import UsageError, shown
from llmcl.serve.errors import RequestError, unsupported
from llmcl.serve.fields import Fields, wrong
from llmcl.tokenizer.answer_parts import Call

OPENAI_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
BILLING = "x-anthropic-billing-header:"  # changes with every request, and with it all that follows in the prefix cache
Ending = Literal["answer", "nothing", "within"]
"""A prompt ends with the opening of an answer, behind the last message, or within it, so that the answer goes on."""
_THOUGHTS = ("thinking", "redacted_thinking")  # of earlier answers


def openai_messages(fields: Fields) -> list[dict[str, Any]]:
    """The field `messages` of /v1/chat/completions. Raises RequestError that names the place of what is wrong."""
    messages = [_openai_message(message) for message in fields.objects("messages")]
    if not messages:
        raise RequestError(400, "messages: expected at least one message", "messages", "missing_required_parameter")
    return messages


def read_ending(fields: Fields, messages: list[dict[str, Any]]) -> Ending:
    """The fields `continue_final_message` and `add_generation_prompt`, as vLLM has them."""
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
    """Raises RequestError, which blames the field `param`, where no answer can go on from the last message."""
    if messages[-1]["role"] != "assistant":
        raise wrong(param, messages[-1]["role"], "a last message of the assistant's")
    if messages[-1].get("tool_calls"):
        raise unsupported(param, "an answer cannot go on from calls of tools")


def system_merged(messages: list[dict[str, Any]], *, all_of_them: bool = False) -> list[dict[str, Any]]:
    """The system messages at the front as one, since many templates take no second. all_of_them: later ones, too."""
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
    content = joined_text(message, "content", ("text", "refusal", "input_text", "output_text"))
    if content is None and role != "assistant":
        raise wrong(message.name("content"), None, "a string or a list of parts")
    read: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": content or ""}
    if calls:
        read["tool_calls"] = calls
    for name in ("tool_call_id", "name"):
        if (value := message.text(name)) is not None:
            read[name] = value
    return read | _thoughts(message.text("reasoning_content"))


def _thoughts(text: str | None) -> dict[str, str]:
    """What the model thought before a message: many templates show it to the model until the user speaks again."""
    return {"reasoning_content": text} if text else {}


def template_variables(fields: Fields) -> dict[str, Any]:
    """The field `chat_template_kwargs`: what the chat template is to see beside the conversation, as vLLM, SGLang and
    llama-server take it.
    """
    from llmcl.tokenizer import chat_template  # the server listens before the tokenizer is imported

    name = "chat_template_kwargs"
    variables = fields.object(name).values
    try:
        chat_template.check_variables(variables)
    except UsageError as error:
        raise RequestError(400, f"{name}: {error}", name, "invalid_value") from None
    return variables


def thinking(thinks: bool | None, effort: str | None = None) -> dict[str, Any]:
    """Whether a model is to think and how much, by the names that chat templates have for it; None: as it does.

    effort: such as low; none: it is not to think.
    """
    if effort == "none":
        thinks, effort = False, None
    made: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    return made if thinks is None else made | {"enable_thinking": thinks, "thinking": thinks}


BUDGETS = (  # of llama-server, vLLM and others
    "thinking_budget_tokens",
    "reasoning_budget",
    "reasoning_budget_tokens",
    "thinking_token_budget",
    "thinking_budget",
)


def thought_budget(fields: Fields, *names: str) -> int | None:
    """How many tokens the model may think; None: as many as it likes, for which some write -1."""
    for name in names or BUDGETS:
        if (n := fields.whole(name, None, -1)) is not None:
            return None if n == -1 else n
    return None


def answered(text: str, thoughts: str = "", calls: Sequence[Call] = ()) -> dict[str, Any]:
    """An answer as a message of the conversation."""
    read: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        said = [{"id": call.id, "function": {"name": call.name, "arguments": call.arguments}} for call in calls]
        read["tool_calls"] = [_tool_call(Fields(call)) for call in said]
    return read | _thoughts(thoughts)


def responses_messages(fields: Fields) -> list[dict[str, Any]]:
    """The fields `instructions` and `input` of /v1/responses: a text, or items of which messages and calls count."""
    messages: list[dict[str, Any]] = []
    if instructions := fields.text("instructions"):
        messages.append({"role": "system", "content": instructions})
    if isinstance(said := fields.given("input"), str):
        return [*messages, {"role": "user", "content": said}]
    thoughts = ""  # before the message or call that comes next
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
            # What a model says and calls at once are several items, and one message to a template.
            if thoughts or not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(_tool_call(Fields(call, item.place)))
        elif kind == "function_call_output":
            output = joined_text(item, "output", ("input_text", "output_text", "text")) or ""
            messages.append({"role": "tool", "content": output, "tool_call_id": item.text("call_id") or ""})
        else:
            raise unsupported(item.name("type"), f"items of type {shown(kind)} are not supported")
        if messages[-1]["role"] == "assistant":
            messages[-1] |= _thoughts(thoughts)
        thoughts = ""
    if not messages:
        raise RequestError(400, "input: expected a text or at least one item", "input", "missing_required_parameter")
    return messages


def _tool_call(call: Fields) -> dict[str, Any]:
    """A call as templates expect it: its arguments as an object, where they are one."""
    function = call.object("function")
    arguments = function.given("arguments") or {}
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):  # the model's own mistake: the template shows it as it was written
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
    """A text, or a list of parts whose texts are joined by line breaks. kinds: the types of parts that are text.

    leave_out: a part that begins so has no place in the prompt. read_elsewhere: types of parts that the caller reads.
    """
    value = fields.given(field)
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wrong(fields.name(field), value, "a string or a list of parts")
    texts = []
    for part in fields.objects(field):
        kind = part.text("type") or "text"
        if kind in _THOUGHTS or kind in read_elsewhere:
            continue
        if kind not in kinds:
            raise unsupported(part.name("type"), f"parts of type {shown(kind)} are not supported, only text is")
        text = part.text("refusal" if kind == "refusal" else "text")
        if text is None:
            raise wrong(part.name("text"), None, "a string")
        if leave_out is None or not text.startswith(leave_out):
            texts.append(text)
    return "\n".join(texts)


def anthropic_messages(fields: Fields) -> list[dict[str, Any]]:
    """The fields `system` and `messages` of /v1/messages, without what changes with every request."""
    messages = []
    if system := joined_text(fields, "system", ("text",), leave_out=BILLING):
        messages.append({"role": "system", "content": system})
    said = [read for message in fields.objects("messages") for read in _anthropic_message(message)]
    if not said:
        raise RequestError(400, "messages: expected at least one message", "messages")
    return messages + said


def _anthropic_message(message: Fields) -> list[dict[str, Any]]:
    """A message, or several: each result of a tool is one of its own, before what the user says."""
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
                output = joined_text(block, "content", ("text",)) or ""
                results.append({"role": "tool", "content": output, "tool_call_id": block.text("tool_use_id") or ""})
    content = joined_text(message, "content", ("text",), read_elsewhere=("tool_use", "tool_result"))
    read = {"role": role, "content": content or ""} | ({"tool_calls": calls} if calls else {}) | _thoughts(thoughts)
    return [*results, read] if content or calls or not results else results
