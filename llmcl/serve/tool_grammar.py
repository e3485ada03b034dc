"""The Lark grammar of an answer that calls tools as they must be called, in the form of its model's family."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from llmcl.serve.tag_scanner import Tags, is_text
from llmcl.serve.tool_families import ToolFamily
from llmcl.serve.tools import Tool, ToolUse
from llmcl.tokenizer.channel_reader import CHANNEL, CONSTRAIN, END, MARKS, MESSAGE, START
from llmcl.tokenizer.special_markers import special_markers

if TYPE_CHECKING:
    from llmcl.tokenizer import Tokenizer

_TEXT = "TEXT: /(.|\\n)*/"
# In what a model writes of a tool, spaces and line breaks are as in structured output, and end.
X_GUIDANCE = {"whitespace_pattern": r" |\n[ \t]{0,20}"}


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
        rules += _call_rules(family, tool, i, lark)
    if use.tools:
        rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(use.tools))))
        rules.append(f"calls: {lark.calls(use.several)}")
    ways = []
    if use.tools and (use.must or schema is not None):
        ways.append(f"{lark.marker(family.opening)} calls".strip())
    if schema is not None and not use.must:
        ways.append("answer")
        rules.append(_answer_rule(schema))
    if not ways or family.tags is not None:
        rules.append(_TEXT)
    if not ways:
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
            listed = '"[" call (", " call)* "]"' if several else '"[" call "]"'
            return f"{listed} {self.marker(family.closing)}".strip()
        if family.is_lines and several:
            return f'call ("\\n" call)* {self.marker(family.closing)}'
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


def channel_grammar(use: ToolUse, tokenizer: Tokenizer, *, schema: Any = None) -> str:
    """As `grammar_of`, of an answer in channels (channel_reader.py). A thought may come first."""
    ids = {text: i for i, text in special_markers(MARKS, tokenizer).items()}
    channel, message, end, start, constrain = (
        f"<[{ids[mark]}]>" if mark in ids else _quoted(mark) for mark in (CHANNEL, MESSAGE, END, START, CONSTRAIN)
    )
    more = f'TEXT {end} {start} "assistant"'
    rules = [_TEXT, f'thought: {channel} "analysis" {message} {more}']
    for i, tool in enumerate(use.tools):
        head = _quoted(f"commentary to=functions.{tool.name} ")
        rules += [f'call_{i}: {channel} {head} {constrain} "json" {message} args_{i}', _arguments_rule(tool, i)]
    ways = [f"call_{i}" for i in range(len(use.tools))]
    if not use.must:
        ways.append(f'{channel} "final" {message} ' + ("TEXT" if schema is None else "answer"))
        if schema is not None:
            rules.append(_answer_rule(schema))
        elif use.tools:
            ways.append(f'{channel} "commentary" {message} {more} call')
            rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(use.tools))))
    return "\n".join(["%llguidance {}", f"start: thought? ({' | '.join(ways)})", *rules, ""])


def _call_rules(family: ToolFamily, tool: Tool, i: int, lark: _Lark) -> list[str]:
    """The rule `call_i` and those that it needs."""
    if family.tags is not None:
        return _tagged(family.tags, tool, i, lark)
    if family.is_python:
        return _python(tool, i)
    head = f'{{"name": {json.dumps(tool.name)}, "{family.arguments}": '
    return [f'call_{i}: {_quoted(head)} args_{i} "}}"', _arguments_rule(tool, i)]


def _python(tool: Tool, i: int) -> list[str]:
    """As `_tagged`. Values are written as JSON, which such models can read. Behind rule `none_i_n` no argument has come
    yet, behind `some_i_n` one has.
    """
    arguments = _arguments_of(tool)
    rules = [f"call_{i}: {_quoted(tool.name + '(')} none_{i}_0 {_quoted(')')}"]
    for n, (key, schema, is_required) in enumerate(arguments):
        rules.append(_json_rule(f"value_{i}_{n}", schema, tool))
        for before, front in ("none", ""), ("some", ", "):
            taken = f"{_quoted(f'{front}{key}=')} value_{i}_{n} some_{i}_{n + 1}"
            rules.append(f"{before}_{i}_{n}: {taken}" + ("" if is_required else f" | {before}_{i}_{n + 1}"))
    return [*rules, *(f'{before}_{i}_{len(arguments)}: ""' for before in ("none", "some"))]


def _arguments_of(tool: Tool) -> list[tuple[str, Any, bool]]:
    """Of each argument its name, a schema that stands for itself, and whether it is required."""
    properties, required = tool.parameters.get("properties"), tool.parameters.get("required")
    more: dict[str, Any] = {name: tool.parameters[name] for name in ("$defs", "definitions") if name in tool.parameters}
    return [
        (key, {**schema, **more} if isinstance(schema, dict) else {}, isinstance(required, list) and key in required)
        for key, schema in (properties.items() if isinstance(properties, dict) else ())
    ]


def _tagged(tags: Tags, tool: Tool, i: int, lark: _Lark) -> list[str]:
    """Keys come in the order of the schema; those that are not required may be left out."""
    parts, rules = [_quoted(f"{tags.name[0]}{tool.name}{tags.name[1].strip()}\n")], []
    for n, (key, schema, is_required) in enumerate(_arguments_of(tool)):
        rule, front, behind = f"{i}_{n}", f"{tags.key[0]}{key}{tags.key[1]}{tags.value[0]}", f"{tags.value[1]}\n"
        if is_text(schema):
            choices = schema.get("enum", [schema["const"]] if "const" in schema else [])
            if choices:
                rules.append(f"value_{rule}: ({' | '.join(map(_quoted, choices))}) {_quoted(behind)}")
            else:
                rules.append(f"value_{rule}[lazy]: TEXT {_quoted(behind)}")
        else:
            rules += [
                f"value_{rule}: json_{rule} {_quoted(behind)}",
                _json_rule(f"json_{rule}", schema, tool),
            ]
        rules.append(f"arg_{rule}: {_quoted(front)} value_{rule}")
        parts.append(f"arg_{rule}" + ("" if is_required else "?"))
    return [f"call_{i}: {' '.join(parts)} {lark.marker(tags.end)}", *rules]


def _answer_rule(schema: Mapping[str, Any]) -> str:
    return f"answer: %json {json.dumps({**schema, 'x-guidance': X_GUIDANCE})}"


def _arguments_rule(tool: Tool, i: int) -> str:
    return _json_rule(f"args_{i}", tool.parameters, tool)


def _json_rule(name: str, schema: Mapping[str, Any], tool: Tool) -> str:
    """What llguidance does not support of a schema counts for nothing, unless the tool is strict."""
    return f"{name}: %json {json.dumps({**schema, 'x-guidance': {**X_GUIDANCE, 'lenient': not tool.strict}})}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
