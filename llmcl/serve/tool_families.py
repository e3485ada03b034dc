"""How families of models write calls of tools: a row for each, chosen by the text of the chat template."""

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
    """A way to write calls: `opening`, a call in its form, `closing`.

    sign, also: what a chat template of this family has in it. opening: what a call begins with; "" for one that is the
    whole answer. name_key, arguments: the fields that have them. is_list: calls are a JSON array, with one opening for
    all. is_named: each call is its name, perhaps an id, and its arguments. is_lines: they follow one another, likewise.
    between: calls that are no array. other_openings: what models of the family write as well. id_length: letters of an
    id; 0: any. example: how a model is told to write calls whose template does not do it.
    """

    name: str
    sign: str
    opening: str
    closing: str
    name_key: str = "name"
    arguments: str = "arguments"
    is_list: bool = False
    is_named: bool = False
    is_lines: bool = False
    other_openings: tuple[str, ...] = ()
    id_length: int = 0
    form: CallForm = _OBJECT
    also: str = ""
    between: str = "\n"
    example: str = f"<tool_call>\n{{{_NAME_OF}, {_ARGUMENTS_OF}}}\n</tool_call>"

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be special tokens, which have no text of their own in an answer."""
        texts = (self.opening, *self.other_openings, self.closing, *self.form.marks)
        return tuple(text.strip() for text in texts if text.strip())

    def new_id(self) -> str:
        if self.id_length:
            return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(self.id_length))
        return "call_" + secrets.token_hex(12)


# Of Qwen's models for programs, and of all since Qwen 3.5; some of them leave out the opening.
_FUNCTION = Tags(("<function=", ">"), ("<parameter=", ">"), ("\n", "\n</parameter>"), "</function>")
_ARGUMENTS = Tags(("", "\n"), ("<arg_key>", "</arg_key>"), ("\n<arg_value>", "</arg_value>"), "</tool_call>")

# DeepSeek-V3 and R1; since V3.1 without the kind and the fence.
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
# Seed-OSS; MiniMax M2; DeepSeek V3.2, which says of each value whether it is text.
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
CALL_ID, ARGS = "[CALL_ID]", "[ARGS]"  # of Mistral's models since 2025
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
    """The first family whose sign the template has; for templates that know no tools that of Hermes."""
    text = template or ""
    return next((family for family in FAMILIES if family.sign in text and family.also in text), HERMES)


def knows_tools(template: str | None) -> bool:
    """Whether the template shows tools to the model by itself."""
    return "tools" in (template or "")


def described(tools: Sequence[Tool], family: ToolFamily) -> str:
    """What a model is told of its tools whose template does not do it."""
    lines = "\n".join(json.dumps(tool.for_template(), ensure_ascii=False) for tool in tools)
    return (
        f"You may call functions. These are their signatures:\n<tools>\n{lines}\n</tools>\n"
        f"To call one, write\n{family.example}"
    )


def with_tools(messages: Sequence[Mapping[str, Any]], template: str | None, use: ToolUse) -> list[dict[str, Any]]:
    """The messages as the template is to see them: tools that it does not show stand in the system message."""
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
    """A message with calls as the template takes it: some append the arguments to a text, or ask for no content."""
    shown = dict(message)
    if calls := shown.get("tool_calls"):
        if _APPENDED.search(template):
            shown["tool_calls"] = [{**call, "function": _as_texts(call["function"])} for call in calls]
        if not shown.get("content") and _NO_CONTENT.search(template):
            shown["content"] = None
        if not shown.get("content") and "message.thinking" in template and "reasoning_content" in shown:
            shown["thinking"] = shown["reasoning_content"]  # of gpt-oss, which takes thoughts or content beside calls
    return shown


def _as_texts(function: Mapping[str, Any]) -> dict[str, Any]:
    given = function["arguments"]
    return {**function, "arguments": given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)}
