"""How model families write tool calls: one row per family, chosen by the chat template's text."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llmcl.serve.call_scanner import CallForm, KeyForm, ObjectForm
from llmcl.serve.gemma_scanner import GemmaForm
from llmcl.serve.named_scanner import NamedForm
from llmcl.serve.python_scanner import PythonForm
from llmcl.serve.tag_scanner import Tags
from llmcl.serve.tools import Tool, ToolUse

_APPENDED = re.compile(r"\[['\"]arguments['\"]\]\s*[+~]")
_NO_CONTENT = re.compile(r"message(\.content|\[['\"]content['\"]\])\s+is\s+(not\s+)?none")
_OBJECT = ObjectForm()
_NAME_OF, _ARGUMENTS_OF = '"name": <name of the function>', '"arguments": <its arguments as an object>'


@dataclass(frozen=True)
class ToolFamily:
    """A format for calls: `opening`, the call in its `form`, `closing`."""

    name: str
    sign: str  # text that identifies the family in a chat template
    opening: str  # text before a call; "": the call is the whole answer
    closing: str
    name_key: str = "name"  # field with the tool name
    arguments: str = "arguments"  # field with the arguments
    is_list: bool = False  # calls form a JSON array after one opening
    is_named: bool = False  # each call is a name, an optional id, and arguments
    is_lines: bool = False  # calls follow one another after one opening
    other_openings: tuple[str, ...] = ()  # further openings that models of the family write
    id_length: int = 0  # letters in an id; 0: any
    form: CallForm = _OBJECT
    also: str = ""  # second identifying text
    between: str = "\n"  # separator between calls outside an array
    # shown to the model if the template does not explain calls
    example: str = f"<tool_call>\n{{{_NAME_OF}, {_ARGUMENTS_OF}}}\n</tool_call>"

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be special tokens, which decode to nothing in an answer."""
        texts = (self.opening, *self.other_openings, self.closing, *self.form.marks)
        return tuple(text.strip() for text in texts if text.strip())

    def new_id(self) -> str:
        if self.id_length:
            return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(self.id_length))
        return "call_" + secrets.token_hex(12)


# Qwen's coder models and all Qwen since 3.5; some omit the opening.
_FUNCTION = Tags(("<function=", ">"), ("<parameter=", ">"), ("\n", "\n</parameter>"), "</function>")
_ARGUMENTS = Tags(("", "\n"), ("<arg_key>", "</arg_key>"), ("\n<arg_value>", "</arg_value>"), "</tool_call>")

# DeepSeek-V3 and R1; since V3.1 without kind and fence.
_OF_ALL, _END_OF_ALL = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_OF_ONE = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_FENCED, _PLAIN = NamedForm(*_OF_ONE, "function", "\n```json\n", "\n```"), NamedForm(*_OF_ONE)


def _deepseek(name: str, form: NamedForm, *, also: str = "", between: str) -> ToolFamily:
    call = "<its arguments as a JSON object>".join(form.around("<name of the function>"))
    return ToolFamily(
        name,
        form.separator,
        _OF_ALL,
        _END_OF_ALL,
        is_lines=True,
        other_openings=(form.front,),
        form=form,
        also=also,
        between=between,
        example=f"{_OF_ALL}{call}{_END_OF_ALL}",
    )


# Kimi K2. The template shows the whole id to the model.
_NUMBERED = NamedForm("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>", is_numbered=True)
# Seed-OSS; MiniMax M2; DeepSeek V3.2, which marks each value as text or JSON.
_SEED = Tags(("<function=", ">"), ("<parameter=", ">"), ("", "</parameter>"), "</function>")
_INVOKE = Tags(('<invoke name="', '">'), ('<parameter name="', '">'), ("", "</parameter>"), "</invoke>")
_DSML = "｜DSML｜"
_DSML_INVOKE = Tags(
    (f'<{_DSML}invoke name="', '">'),
    (f'<{_DSML}parameter name="', '">'),
    ("", f"</{_DSML}parameter>"),
    f"</{_DSML}invoke>",
    kind='" string="',
    special=(_DSML,),
)
CALL_ID, ARGS = "[CALL_ID]", "[ARGS]"  # Mistral's models since 2025
_NAMED_OBJECT = ObjectForm(marks=(CALL_ID, ARGS))

HERMES = ToolFamily("hermes", "<tool_call>", "<tool_call>\n", "\n</tool_call>")
_MISTRAL = ToolFamily("mistral", "[TOOL_CALLS]", "[TOOL_CALLS]", "", is_list=True, id_length=9, form=_NAMED_OBJECT)
_NAMED_MISTRAL = replace(_MISTRAL, is_named=True, between="")
FAMILIES = (
    replace(_NAMED_MISTRAL, name="mistral 3.2", also=CALL_ID),
    replace(_NAMED_MISTRAL, name="mistral 3", also=ARGS),
    _MISTRAL,
    ToolFamily("seed-oss", "<seed:tool_call>", "<seed:tool_call>\n", "\n</seed:tool_call>", form=_SEED),
    ToolFamily(
        "minimax m2",
        "<minimax:tool_call>",
        "<minimax:tool_call>\n",
        "\n</minimax:tool_call>",
        is_lines=True,
        form=_INVOKE,
    ),
    ToolFamily(
        "deepseek v3.2",
        _DSML,
        f"<{_DSML}function_calls>\n",
        f"\n</{_DSML}function_calls>",
        is_lines=True,
        form=_DSML_INVOKE,
    ),
    ToolFamily(
        "kimi k2",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        is_lines=True,
        other_openings=(_NUMBERED.front,),
        form=_NUMBERED,
        between="",
    ),
    ToolFamily(
        "cohere",
        "<|START_ACTION|>",
        "<|START_ACTION|>",
        "<|END_ACTION|>",
        name_key="tool_name",
        arguments="parameters",
        is_list=True,
    ),
    ToolFamily("apertus", "<|tools_prefix|>", "<|tools_prefix|>", "<|tools_suffix|>", is_list=True, form=KeyForm()),
    ToolFamily("nemotron", "<TOOLCALL>", "<TOOLCALL>", "</TOOLCALL>", is_list=True),
    ToolFamily("granite", "<|tool_call|>", "<|tool_call|>", "", is_list=True, other_openings=("<tool_call>",)),
    ToolFamily(
        "qwen", "<parameter=", "<tool_call>\n", "\n</tool_call>", other_openings=("<function=",), form=_FUNCTION
    ),
    ToolFamily("lfm2", "List of tools: ", "<|tool_call_start|>", "<|tool_call_end|>", is_list=True, form=PythonForm()),
    ToolFamily("olmo 3", "<function_calls>", "<function_calls>", "</function_calls>", is_lines=True, form=PythonForm()),
    ToolFamily("glm", "<arg_key>", "<tool_call>", "", form=_ARGUMENTS),
    ToolFamily("gemma 4", "<|tool_call>", "<|tool_call>", "<tool_call|>", form=GemmaForm(), between=""),
    _deepseek("deepseek v3", _FENCED, also="```json", between="\n"),
    _deepseek("deepseek v3.1", _PLAIN, between=""),
    HERMES,
    ToolFamily("llama 3", "<|python_tag|>", "", "", arguments="parameters", other_openings=("<|python_tag|>",)),
    ToolFamily("llama 3", '"parameters": dictionary of argument name', "", "", arguments="parameters"),
)


def family_of(template: str | None) -> ToolFamily:
    """Returns the first family whose sign is in the template. Default, also for templates without tools: Hermes."""
    text = template or ""
    return next((family for family in FAMILIES if family.sign in text and family.also in text), HERMES)


def knows_tools(template: str | None) -> bool:
    """Returns whether the template shows tools to the model."""
    return "tools" in (template or "")


def described(tools: Sequence[Tool], family: ToolFamily) -> str:
    """Describes the tools to a model whose template does not."""
    lines = "\n".join(json.dumps(tool.for_template(), ensure_ascii=False) for tool in tools)
    return (
        f"You may call functions. These are their signatures:\n<tools>\n{lines}\n</tools>\n"
        f"To call one, write\n{family.example}"
    )


def with_tools(messages: Sequence[Mapping[str, Any]], template: str | None, use: ToolUse) -> list[dict[str, Any]]:
    """Converts messages for the template. If the template shows no tools, puts them into the system message."""
    shown = [_as_expected(message, template or "") for message in messages]
    if not use.tools or knows_tools(template):
        return shown
    text = described(use.tools, family_of(template))
    if shown and shown[0]["role"] == "system":
        shown[0]["content"] = f"{shown[0]['content']}\n\n{text}"
    else:
        shown.insert(0, {"role": "system", "content": text})
    return shown


def _as_expected(message: Mapping[str, Any], template: str) -> dict[str, Any]:
    """Converts a message with calls for templates that append arguments to a text or expect null content."""
    shown = dict(message)
    if calls := shown.get("tool_calls"):
        if _APPENDED.search(template):
            shown["tool_calls"] = [{**call, "function": _as_texts(call["function"])} for call in calls]
        if not shown.get("content") and _NO_CONTENT.search(template):
            shown["content"] = None
        if not shown.get("content") and "message.thinking" in template and "reasoning_content" in shown:
            shown["thinking"] = shown["reasoning_content"]  # gpt-oss expects thoughts or content beside calls
    return shown


def _as_texts(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function["arguments"]
    return {
        **function,
        "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False),
    }
