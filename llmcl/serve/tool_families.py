"""How families of models write calls of tools: a row for each, chosen by the text of the chat template."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmcl.serve.tag_scanner import Tags
from llmcl.serve.tools import Tool, ToolUse


@dataclass(frozen=True)
class ToolFamily:
    """A way to write calls: `opening`, a JSON object with `name` and the arguments for each, `closing`.

    tags: between these in place of a JSON object. is_python: as a call in Python.

    sign: what a chat template of this family has in it. opening: what a call begins with; "" for one that is the whole
    answer. arguments: the field that has them. is_list: calls are a JSON array, with one opening for all. is_lines:
    they follow one another, each on a line, likewise. other_openings: what models of the family write as well.
    id_length: letters of an id; 0: any.
    """

    name: str
    sign: str
    opening: str
    closing: str
    arguments: str = "arguments"
    is_list: bool = False
    is_lines: bool = False
    other_openings: tuple[str, ...] = ()
    id_length: int = 0
    tags: Tags | None = None
    is_python: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be special tokens, which have no text of their own in an answer."""
        end = "" if self.tags is None else self.tags.end
        texts = (self.opening, *self.other_openings, self.closing, end)
        return tuple(text.strip() for text in texts if text.strip())

    def new_id(self) -> str:
        if self.id_length:
            return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(self.id_length))
        return "call_" + secrets.token_hex(12)


# Of Qwen's models for programs, and of all since Qwen 3.5; some of them leave out the opening.
_FUNCTION = Tags(("<function=", ">"), ("<parameter=", ">"), ("\n", "\n</parameter>"), "</function>")
_ARGUMENTS = Tags(("", "\n"), ("<arg_key>", "</arg_key>"), ("\n<arg_value>", "</arg_value>"), "</tool_call>")

HERMES = ToolFamily("hermes", "<tool_call>", "<tool_call>\n", "\n</tool_call>")
FAMILIES = (
    ToolFamily("mistral", "[TOOL_CALLS]", "[TOOL_CALLS]", "", is_list=True, id_length=9),
    ToolFamily("granite", "<|tool_call|>", "<|tool_call|>", "", is_list=True, other_openings=("<tool_call>",)),
    ToolFamily(
        "qwen", "<parameter=", "<tool_call>\n", "\n</tool_call>", other_openings=("<function=",), tags=_FUNCTION
    ),
    ToolFamily("lfm2", "List of tools: ", "<|tool_call_start|>", "<|tool_call_end|>", is_list=True, is_python=True),
    ToolFamily("olmo 3", "<function_calls>", "<function_calls>", "</function_calls>", is_lines=True, is_python=True),
    ToolFamily("glm", "<arg_key>", "<tool_call>", "", tags=_ARGUMENTS),
    HERMES,
    ToolFamily("llama 3", "<|python_tag|>", "", "", arguments="parameters", other_openings=("<|python_tag|>",)),
    ToolFamily("llama 3", '"parameters": dictionary of argument name', "", "", arguments="parameters"),
)


def family_of(template: str | None) -> ToolFamily:
    """The first family whose sign the template has; for templates that know no tools that of Hermes."""
    return next((family for family in FAMILIES if family.sign in (template or "")), HERMES)


def knows_tools(template: str | None) -> bool:
    """Whether the template shows tools to the model by itself."""
    return "tools" in (template or "")


def described(tools: Sequence[Tool]) -> str:
    """What a model is told of its tools whose template does not do it: calls are asked for in the form of Hermes."""
    lines = "\n".join(json.dumps(tool.for_template(), ensure_ascii=False) for tool in tools)
    call = '{"name": <name of the function>, "arguments": <its arguments as an object>}'
    return (
        f"You may call functions. These are their signatures:\n<tools>\n{lines}\n</tools>\nTo call one, write\n"
        f"<tool_call>\n{call}\n</tool_call>"
    )


def with_tools(messages: Sequence[Mapping[str, Any]], template: str | None, use: ToolUse) -> list[dict[str, Any]]:
    """The messages as the template is to see them: with the tools in the system message where it has none of its own,
    and with calls and results of earlier turns as text.
    """
    shown = [dict(message) for message in messages]
    if not use.tools or knows_tools(template):
        return shown
    text = described(use.tools)
    if shown and shown[0]["role"] == "system":
        shown[0]["content"] = f"{shown[0]['content']}\n\n{text}"
    else:
        shown.insert(0, {"role": "system", "content": text})
    return shown
