"""Builds the Lark grammar of an answer with constrained tool calls, in the model family's format."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from llmcl.serve.call_scanner import KeyForm
from llmcl.serve.gemma_scanner import QUOTE, GemmaForm
from llmcl.serve.named_scanner import NamedForm
from llmcl.serve.python_scanner import PythonForm
from llmcl.serve.tag_scanner import Tags, is_text
from llmcl.serve.tool_families import ARGS, CALL_ID, ToolFamily
from llmcl.serve.tools import Tool, ToolUse
from llmcl.tokenizer.channel_reader import CHANNEL, CONSTRAIN, END, MARKS, MESSAGE, START
from llmcl.tokenizer.special_markers import special_markers

if TYPE_CHECKING:
    from llmcl.tokenizer import Tokenizer

_TEXT = "TEXT: /(.|\\n)*/"
_NOTES = {"title", "description", "default", "$defs", "definitions"}
_OF_OBJECT = {"type", "properties", "required", "additionalProperties"}
_MAX_DEPTH = 8  # nesting in Gemma's format
_PLAIN_KEY = re.compile(r'[^\s:,{}\[\]"<][^:,{}\[\]]*')
# White space inside a call is limited, like in structured output.
X_GUIDANCE = {"whitespace_pattern": r" |\n[ \t]{0,20}"}


def grammar_of(
    family: ToolFamily,
    use: ToolUse,
    tokenizer: Tokenizer,
    *,
    schema: Any = None,
    thought_end: str | None = None,
) -> str:
    """Returns a Lark grammar for answers with constrained tool calls.

    With use.must the answer consists of calls. Otherwise the answer is JSON that matches `schema`; without a schema it
    is any text, and calls may follow. thought_end: the end of a thought, which comes first.
    """
    lark = _Lark(family, tokenizer, thought_end)
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
    if not ways or isinstance(family.form, (Tags, GemmaForm)):
        rules.append(_TEXT)
    if not ways:
        if lark.opening_is_text:
            ways = ["TEXT", "opening calls"]
            rules.append(f"opening[lazy]: TEXT {lark.marker(family.opening)}")
        elif family.opening:
            ways = ["TEXT", f"TEXT {lark.after_text(family.opening)} calls"]
        else:
            ways = ["OTHER", "calls"]
            rules.append("OTHER: /\\s*([^{\\s](.|\\n)*)?/")
    start = " | ".join(ways)
    if thought_end is not None:
        start = f"thought ({start})"
        rules.append(f"thought: {lark.until(thought_end)}")
    return "\n".join(["%llguidance {}", f"start: {start}", *rules, *lark.more_rules, ""])


class _Lark:
    """Writes a family's marks in a Lark grammar: as text, or as a special token by id."""

    def __init__(self, family: ToolFamily, tokenizer: Tokenizer, thought_end: str | None):
        self._family = family
        marks = (*family.markers, *([] if thought_end is None else [thought_end]))
        self._ids = {text: i for i, text in special_markers(marks, tokenizer).items()}
        self.more_rules: list[str] = []

    @property
    def opening_is_text(self) -> bool:
        return bool(self._family.opening) and not any(mark in self._family.opening for mark in self._ids)

    def is_special(self, mark: str) -> bool:
        return mark in self._ids

    def marker(self, text: str) -> str:
        """Converts a text that may contain marks."""
        parts = re.split(f"({'|'.join(map(re.escape, self._ids))})", text) if self._ids else [text]
        return " ".join(f"<[{self._ids[part]}]>" if part in self._ids else _quoted(part) for part in parts if part)

    def after_text(self, text: str) -> str:
        """Converts a text with a special token after arbitrary text, which absorbs the characters before."""
        at = min(text.find(mark) for mark in self._ids if mark in text)
        return self.marker(text[at:])

    def calls(self, several: bool) -> str:
        """Returns the rule body for one or several calls, after the first opening."""
        family = self._family
        if family.is_list and not family.is_named:
            listed = '"[" call (", " call)* "]"' if several else '"[" call "]"'
            return f"{listed} {self.marker(family.closing)}".strip()
        if family.is_lines and several and family.between and family.closing.startswith(family.between):
            # The grammar never reads the same text in two ways: the separator is also the front of the closing mark, so
            # the closing mark is split.
            rest = family.closing.removeprefix(family.between)
            return f"(call {self.marker(family.between)})+ {self.marker(rest)}"
        if family.is_lines and several:
            return f"call ({_joined(self.marker(family.between), 'call')})* {self.marker(family.closing)}"
        one = f"call {self.marker(family.closing)}".strip()
        if several and family.opening:
            return f"{one} ({_joined(self.marker(family.between + family.opening), one)})*"
        return one

    def until(self, thought_end: str) -> str:
        if self.is_special(thought_end):
            self.more_rules.append("THOUGHT: /(.|\\n)*/")
            return f"THOUGHT {self.marker(thought_end)} /\\n{{0,2}}/"
        self.more_rules += ["THOUGHT: /(.|\\n)*/", f"thought_end[lazy]: THOUGHT {_quoted(thought_end)}"]
        return "thought_end /\\n{0,2}/"


def channel_grammar(use: ToolUse, tokenizer: Tokenizer, *, schema: Any = None) -> str:
    """Like `grammar_of`, for an answer in channels (channel_reader.py). A thought may come first."""
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
    """Returns the rule `call_i` with all sub-rules."""
    form = family.form
    if isinstance(form, Tags):
        return _tagged(form, tool, i, lark)
    if isinstance(form, PythonForm):
        return _python(tool, i)
    if isinstance(form, GemmaForm):
        members = _gemma_members(f"{i}", _members_of(tool.parameters, tool.parameters), tool, lark, 0)
        return [f"call_{i}: {_quoted(f'call:{tool.name}{{')} none_{i}_0 {_quoted('}')}", *members]
    if isinstance(form, NamedForm):
        if form.is_numbered:
            before = f"{lark.marker(f'{form.front}functions.{tool.name}:')} /[0-9]+/ {lark.marker(form.separator)}"
            return [f"call_{i}: {before} args_{i} {lark.marker(form.end)}", _arguments_rule(tool, i)]
        before, behind = map(lark.marker, form.around(tool.name))
        return [f"call_{i}: {before} args_{i} {behind}", _arguments_rule(tool, i)]
    if family.is_named:
        call_id = f"{lark.marker(CALL_ID)} /[a-zA-Z0-9]{{9}}/ " if family.also == CALL_ID else ""
        return [f"call_{i}: {_quoted(tool.name)} {call_id}{lark.marker(ARGS)} args_{i}", _arguments_rule(tool, i)]
    if isinstance(form, KeyForm):
        head = f"{{{json.dumps(tool.name)}: "
    else:
        head = f'{{"{family.name_key}": {json.dumps(tool.name)}, "{family.arguments}": '
    return [f'call_{i}: {_quoted(head)} args_{i} "}}"', _arguments_rule(tool, i)]


Member = tuple[str, Any, bool]
"""Of a member of an object its name, a schema that stands for itself, and whether it is required."""


def _members_of(schema: Mapping[str, Any], whole: Mapping[str, Any]) -> list[Member]:
    """Lists an object's members. whole: the schema that holds the definitions."""
    properties, required = schema.get("properties"), schema.get("required")
    return [
        (key, _alone(of_key, whole), isinstance(required, list) and key in required)
        for key, of_key in (properties.items() if isinstance(properties, dict) else ())
    ]


def _alone(schema: Any, whole: Mapping[str, Any]) -> dict[str, Any]:
    more = {name: whole[name] for name in ("$defs", "definitions") if name in whole}
    return {**schema, **more} if isinstance(schema, dict) else {}


def _chain(
    name: str, members: list[Member], front: Callable[[str, bool], str], value: Callable[[str, Any], list[str]]
) -> list[str]:
    """Returns rules for members in order; optional members may be left out. The first rule is `none_NAME_0`. Rule
    `none_NAME_n` applies if no member has come before member n, `some_NAME_n` if at least one has.

    front: returns the text before a value, from the key and whether a member came before. value: returns a value's
    rules, from the name for the first rule.
    """
    rules = []
    for n, (key, schema, is_required) in enumerate(members):
        rules += value(f"value_{name}_{n}", schema)
        for before in "none", "some":
            taken = f"{front(key, before == 'some')} value_{name}_{n} some_{name}_{n + 1}"
            rules.append(f"{before}_{name}_{n}: {taken}" + ("" if is_required else f" | {before}_{name}_{n + 1}"))
    return [*rules, *(f'{before}_{name}_{len(members)}: ""' for before in ("none", "some"))]


def _python(tool: Tool, i: int) -> list[str]:
    """Returns rules for a call in Python syntax. Values are written as JSON, which such models can read."""
    members = _chain(
        f"{i}",
        _members_of(tool.parameters, tool.parameters),
        lambda key, is_next: _quoted(f"{', ' if is_next else ''}{key}="),
        lambda name, schema: [_json_rule(name, schema, tool)],
    )
    return [f"call_{i}: {_quoted(tool.name + '(')} none_{i}_0 {_quoted(')')}", *members]


def _gemma_members(name: str, members: list[Member], tool: Tool, lark: _Lark, depth: int) -> list[str]:
    def front(key: str, is_next: bool) -> str:
        shown = key if _PLAIN_KEY.fullmatch(key) else f"{QUOTE}{key}{QUOTE}"
        return lark.marker(f"{',' if is_next else ''}{shown}:")

    return _chain(name, members, front, lambda name, schema: _gemma_value(name, schema, tool, lark, depth))


def _gemma_value(name: str, schema: Mapping[str, Any], tool: Tool, lark: _Lark, depth: int) -> list[str]:
    """Returns rules for a value: Gemma's format for texts, objects and arrays without further schema, or JSON."""
    quote, kind, names = lark.marker(QUOTE), schema.get("type"), set(schema) - _NOTES
    if is_text(schema):
        if choices := _choices(schema):
            return [f"{name}: {quote} ({' | '.join(map(_quoted, choices))}) {quote}"]
        if lark.is_special(QUOTE):
            return [f"{name}: {quote} TEXT {quote}"]
        return [f"{name}: {quote} {name}_text", f"{name}_text[lazy]: TEXT {quote}"]
    if depth < _MAX_DEPTH and kind == "object" and isinstance(schema.get("properties"), dict) and names <= _OF_OBJECT:
        members = _gemma_members(name, _members_of(schema, schema), tool, lark, depth + 1)
        return [f'{name}: "{{" none_{name}_0 "}}"', *members]
    if depth < _MAX_DEPTH and kind == "array" and isinstance(schema.get("items"), dict) and names <= {"type", "items"}:
        item = _gemma_value(f"{name}_i", _alone(schema["items"], schema), tool, lark, depth + 1)
        return [f'{name}: "[" ({name}_i ("," {name}_i)*)? "]"', *item]
    return [_json_rule(name, schema, tool)]


def _choices(schema: Mapping[str, Any]) -> list[str]:
    """Returns a text's allowed values; empty: any."""
    choices: list[str] = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return choices


def _tagged(tags: Tags, tool: Tool, i: int, lark: _Lark) -> list[str]:
    """Returns rules for a call with tags. Keys follow the schema's order; optional keys may be left out."""
    parts, rules = [lark.marker(f"{tags.name[0]}{tool.name}{tags.name[1].strip()}\n")], []
    has_special = any(map(lark.is_special, tags.special))
    for n, (key, schema, is_required) in enumerate(_members_of(tool.parameters, tool.parameters)):
        kind = f"{tags.kind}{json.dumps(is_text(schema))}" if tags.kind else ""
        rule, front = f"{i}_{n}", f"{tags.key[0]}{key}{kind}{tags.key[1]}{tags.value[0]}"
        behind, shown_behind = f"{tags.value[1]}\n", lark.marker(f"{tags.value[1]}\n")
        if is_text(schema):
            if choices := _choices(schema):
                rules.append(f"value_{rule}: ({' | '.join(map(_quoted, choices))}) {shown_behind}")
            elif has_special:
                rules.append(f"value_{rule}: TEXT {lark.after_text(behind)}")
            else:
                rules.append(f"value_{rule}[lazy]: TEXT {_quoted(behind)}")
        else:
            rules += [
                f"value_{rule}: json_{rule} {shown_behind}",
                _json_rule(f"json_{rule}", schema, tool),
            ]
        rules.append(f"arg_{rule}: {lark.marker(front)} value_{rule}")
        parts.append(f"arg_{rule}" + ("" if is_required else "?"))
    return [f"call_{i}: {' '.join(parts)} {lark.marker(tags.end)}", *rules]


def _answer_rule(schema: Mapping[str, Any]) -> str:
    from llmcl.grammar import without_unknown_formats

    return f"answer: %json {json.dumps({**without_unknown_formats(schema), 'x-guidance': X_GUIDANCE})}"


def _arguments_rule(tool: Tool, i: int) -> str:
    return _json_rule(f"args_{i}", tool.parameters, tool)


def _json_rule(name: str, schema: Mapping[str, Any], tool: Tool) -> str:
    """Returns a JSON rule. Schema keywords unknown to llguidance are ignored unless the tool is strict."""
    from llmcl.grammar import without_unknown_formats  # imported late: the server listens before the grammar is loaded

    options = {**X_GUIDANCE, "lenient": not tool.strict}
    return f"{name}: %json {json.dumps({**without_unknown_formats(schema), 'x-guidance': options})}"


def _joined(*parts: str) -> str:
    return " ".join(filter(None, parts))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
