"""Tools that a model may call: reading them from requests, showing them to templates, and constraining calls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from llmcl.errors import shown
from llmcl.serve.errors import RequestError
from llmcl.serve.fields import Fields, wrong

Schemas = Mapping[str, Mapping[str, Any]]
"""JSON schemas of the arguments of tools, by the names of these."""

MAX_TOOLS = 512
_MAX_TRIES = 64  # commas tried from the end of cut arguments; the last comma outside a string ends complete arguments
NO_PARAMETERS = {"type": "object", "properties": {}}


@dataclass(frozen=True)
class Tool:
    """A tool."""

    name: str
    description: str
    parameters: dict[str, Any]  # JSON schema of the arguments
    strict: bool  # arguments always match the schema
    place: str  # place in the request

    def for_template(self) -> dict[str, Any]:
        """Returns the tool in the format of chat templates."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request and the rules for calling them. Empty if none were sent or none may be used."""

    tools: tuple[Tool, ...] = ()
    must: bool = False  # at least one call is required
    several: bool = True  # more than one call is allowed

    @property
    def schemas(self) -> Schemas:
        return {tool.name: tool.parameters for tool in self.tools}

    @property
    def is_constrained(self) -> bool:
        """Whether calls have to match a grammar."""
        return bool(self.tools) and (self.must or any(tool.strict for tool in self.tools))


NO_TOOLS = ToolUse()


def openai_tools(fields: Fields) -> ToolUse:
    """Reads tools from /v1/chat/completions, with a nested function object, and from /v1/responses.

    Skips tools of unknown type: clients send tools meant for servers that run them.
    """
    tools = []
    for entry in fields.objects("tools"):
        if (entry.text("type") or "function") == "function":
            tools.append(_tool(entry if entry.given("function") is None else entry.object("function"), "parameters"))
    several = fields.flag("parallel_tool_calls", True)
    choice = fields.given("tool_choice")
    if isinstance(choice, dict):
        chosen = fields.object("tool_choice")
        kind = chosen.text("type") or "function"
        if kind == "allowed_tools":
            allowed = chosen if chosen.given("allowed_tools") is None else chosen.object("allowed_tools")
            names = {
                _name(one if one.given("function") is None else one.object("function"))
                for one in allowed.objects("tools")
            }
            tools = [tool for tool in tools if tool.name in names]
            return _use(tools, allowed.one_of("mode", "auto", "required") or "auto", several)
        if kind != "function":
            raise wrong("tool_choice.type", kind, "function or allowed_tools")
        name = _name(chosen if chosen.given("function") is None else chosen.object("function"))
        return _use(_only(tools, name), "required", False)
    return _use(tools, fields.one_of("tool_choice", "none", "auto", "required") or "auto", several)


def anthropic_tools(fields: Fields) -> ToolUse:
    """Reads tools from /v1/messages. Skips tools that Anthropic's servers run, recognised by a special type."""
    tools = []
    for entry in fields.objects("tools"):
        if (entry.text("type") or "custom") == "custom":
            tools.append(_tool(entry, "input_schema"))
    choice = fields.object("tool_choice")
    kind = choice.one_of("type", "auto", "any", "tool", "none") or "auto"
    several = not choice.flag("disable_parallel_tool_use")
    if kind == "tool":
        return _use(_only(tools, _name(choice)), "required", False)
    return _use(tools, {"any": "required"}.get(kind, kind), several)


def _tool(given: Fields, parameters: str) -> Tool:
    schema = NO_PARAMETERS if given.given(parameters) is None else given.object(parameters).values
    return Tool(_name(given), given.text("description") or "", schema, given.flag("strict"), given.name(parameters))


def _name(given: Fields) -> str:
    given.required("name", "the name of a tool")
    name = given.text("name") or ""
    if not name or len(name) > 128 or not all(c.isalnum() or c in "_-.:/" for c in name):
        raise wrong(given.name("name"), name, "a name of letters, digits, _ and -")
    return name


def _only(tools: list[Tool], name: str) -> list[Tool]:
    matches = [tool for tool in tools if tool.name == name]
    if not matches:
        raise RequestError(400, f"tool_choice: there is no tool {shown(name)} in tools", "tool_choice", "invalid_value")
    return matches[:1]


def _use(tools: list[Tool], choice: str, several: bool) -> ToolUse:
    if len(tools) > MAX_TOOLS:
        raise RequestError(400, f"tools: got {len(tools)}, expected at most {MAX_TOOLS}", "tools", "invalid_value")
    if len({tool.name for tool in tools}) < len(tools):
        raise RequestError(400, "tools: two have the same name; expected another for each", "tools", "invalid_value")
    if choice == "none":
        return ToolUse()
    if choice == "required" and not tools:
        raise RequestError(
            400, "tool_choice: a call is required, but there are no tools", "tool_choice", "invalid_value"
        )
    return ToolUse(tuple(tools), choice == "required", several)


def as_object(arguments: str, *, is_complete: bool = True) -> dict[str, Any]:
    """Parses a call's arguments. Arguments that are not an object (a model's mistake) are shown as written. A cut call
    keeps only the complete arguments.
    """
    tries = [arguments or "{}"]
    if not is_complete:
        tries += [f"{arguments[:at]}}}" for at in reversed(range(len(arguments))) if arguments[at] == ","][:_MAX_TRIES]
    for text in tries:
        with suppress(ValueError, RecursionError):
            if isinstance(value := json.loads(text), dict):
                return value
    return {"arguments": arguments} if is_complete else {}
