"""How families of models write calls of tools: a row for each, chosen by the text of the chat template."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmcl.serve.tools import Tool, ToolUse

if TYPE_CHECKING:
    from llmcl.tokenizer import Tokenizer

# In what a model writes of a tool, spaces and line breaks are as in structured output, and end.
X_GUIDANCE = {"whitespace_pattern": r" |\n[ \t]{0,20}"}


@dataclass(frozen=True)
class ToolFamily:
    """A way to write calls: `opening`, a JSON object with `name` and the arguments for each, `closing`.

    sign: what a chat template of this family has in it. opening: what a call begins with; "" for one that is the whole
    answer. arguments: the field that has them. is_list: calls are a JSON array, with one opening for all.
    other_openings: what models of the family write as well. id_length: letters of an id; 0: any.
    """

    name: str
    sign: str
    opening: str
    closing: str
    arguments: str = "arguments"
    is_list: bool = False
    other_openings: tuple[str, ...] = ()
    id_length: int = 0

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be special tokens, which have no text of their own in an answer."""
        return tuple(text.strip() for text in (self.opening, *self.other_openings, self.closing) if text.strip())

    def new_id(self) -> str:
        if self.id_length:
            return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(self.id_length))
        return "call_" + secrets.token_hex(12)


HERMES = ToolFamily("hermes", "<tool_call>", "<tool_call>\n", "\n</tool_call>")
FAMILIES = (
    ToolFamily("mistral", "[TOOL_CALLS]", "[TOOL_CALLS]", "", is_list=True, id_length=9),
    ToolFamily("granite", "<|tool_call|>", "<|tool_call|>", "", is_list=True, other_openings=("<tool_call>",)),
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


def grammar_of(
    family: ToolFamily,
    use: ToolUse,
    tokenizer: Tokenizer,
    *,
    schema: Any = None,
    after_thought: bool = False,
) -> str:
    """A Lark grammar of answers that call tools as they must.

    With use.must an answer is calls alone. Otherwise it is JSON that matches `schema`, or without one any text, which
    calls may follow. after_thought: the end of a thought comes first.
    """
    lark = _Lark(family, tokenizer)
    rules = []
    for i, tool in enumerate(use.tools):
        rules += [f'call_{i}: {_quoted(_head(family, tool))} args_{i} "}}"', f"args_{i}: %json {_schema(tool)}"]
    if use.tools:
        rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(use.tools))))
        rules.append(f"calls: {lark.calls(use.several)}")
    ways = []
    if use.tools and (use.must or schema is not None):
        ways.append(f"{lark.marker(family.opening)} calls".strip())
    if schema is not None and not use.must:
        ways.append("answer")
        rules.append(f"answer: %json {json.dumps({**schema, 'x-guidance': X_GUIDANCE})}")
    if not ways:
        rules.append("TEXT: /(.|\\n)*/")
        if lark.opening_is_text:
            ways = ["TEXT", "opening calls"]
            rules.append(f"opening[lazy]: TEXT {lark.marker(family.opening)}")
        elif family.opening:
            ways = ["TEXT", f"TEXT {lark.marker(family.opening)} calls"]
        else:
            ways = ["OTHER", "calls"]
            rules.append("OTHER: /\\s*([^{\\s](.|\\n)*)?/")
    start = " | ".join(ways)
    if after_thought:
        start = f"thought ({start})"
        rules.append(f"thought: {lark.until_thought_ends()}")
    return "\n".join(["%llguidance {}", f"start: {start}", *rules, *lark.more_rules, ""])


class _Lark:
    """How the marks of a family are written in a Lark grammar: as text, or as a special token by its id."""

    def __init__(self, family: ToolFamily, tokenizer: Tokenizer):
        self._family = family
        marks = (*family.markers, "</think>")
        self._ids = {text: i for i, text in special_markers(marks, tokenizer).items()}
        self.more_rules: list[str] = []

    @property
    def opening_is_text(self) -> bool:
        return bool(self._family.opening) and self._family.opening.strip() not in self._ids

    def marker(self, text: str) -> str:
        """A text that has a mark in it, or is none."""
        mark = text.strip()
        if mark not in self._ids:
            return _quoted(text) if text else ""
        before, _, after = text.partition(mark)
        return " ".join(filter(None, (before and _quoted(before), f"<[{self._ids[mark]}]>", after and _quoted(after))))

    def calls(self, several: bool) -> str:
        """One call, or several, after the opening of the first."""
        family = self._family
        if family.is_list:
            return '"[" call (", " call)* "]"' if several else '"[" call "]"'
        one = f"call {self.marker(family.closing)}".strip()
        if several and family.opening:
            return f'{one} ("\\n" {self.marker(family.opening)} {one})*'
        return one

    def until_thought_ends(self) -> str:
        if "</think>" in self._ids:
            self.more_rules.append("THOUGHT: /(.|\\n)*/")
            return f"THOUGHT <[{self._ids['</think>']}]> /\\n{{0,2}}/"
        self.more_rules += ["THOUGHT: /(.|\\n)*/", 'thought_end[lazy]: THOUGHT "</think>"']
        return "thought_end /\\n{0,2}/"


def _head(family: ToolFamily, tool: Tool) -> str:
    return f'{{"name": {json.dumps(tool.name)}, "{family.arguments}": '


def _schema(tool: Tool) -> str:
    """The schema of the arguments. What llguidance does not support of it counts for nothing, unless it is strict."""
    return json.dumps({**tool.parameters, "x-guidance": {**X_GUIDANCE, "lenient": not tool.strict}})


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def special_markers(markers: Sequence[str], tokenizer: Tokenizer) -> dict[int, str]:
    """Of texts the ones that are special tokens, by their ids."""
    found = {}
    for text in markers:
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) == 1 and not tokenizer.token_bytes(ids[0]) and ids[0] not in tokenizer.eos_token_ids:
            found[ids[0]] = text
    return found
