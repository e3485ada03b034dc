"""Reads one tool call that marks name and arguments with tags, while a model writes it."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from llmcl.serve.call_scanner import Scanner, StateScanner
from llmcl.serve.python_scanner import MAX_LITERAL
from llmcl.serve.tools import Schemas
from llmcl.tokenizer.answer_parts import n_begun

_NAME = re.compile(r"[\w.:/\-]{1,128}")
_FORMS = ("pattern", "format", "minLength", "maxLength")
_WORDS = {"True": "true", "False": "false", "None": "null"}  # Python's spelling


@dataclass(frozen=True)
class Tags:
    """Tags around the name, each key and each value, and the tag at the end of a call.

    A value is the plain text between two tags, without escapes.
    """

    name: tuple[str, str]
    key: tuple[str, str]
    value: tuple[str, str]
    end: str
    kind: str = ""  # between a key and "true" (the value is text) or "false" (JSON); "" without such a mark
    special: tuple[str, ...] = ()  # texts inside tags that may be special tokens

    @property
    def front(self) -> str:
        return self.name[0]

    @property
    def marks(self) -> tuple[str, ...]:
        return self.end, *self.special

    def begins(self, text: str) -> bool | None:
        if len(text) < len(self.front) and self.front.startswith(text):
            return None
        return text.startswith(self.front)

    def scanner(self, schemas: Schemas) -> Scanner:
        return TagScanner(self, schemas)


class TagScanner(StateScanner):
    """Converts the arguments to JSON while they arrive. schemas: tell which values are text and which are JSON."""

    def __init__(self, tags: Tags, schemas: Schemas):
        super().__init__(self._read_name)
        self._tags = tags
        self._schemas = schemas
        self._properties: Mapping[str, Any] = {}
        self._key = ""
        self._in_text = False  # whether a text value has begun
        self._is_said_to_be_text: bool | None = None

    def _read_name(self) -> bool:
        front, behind = self._tags.name
        ends = [at for mark in (behind, self._tags.key[0], self._tags.end) if (at := self._held.find(mark)) >= 0]
        if not ends:
            return self._gives_up() if len(self._held) > len(front) + 200 else False
        name = self._held[len(front) : min(ends)].strip()
        if not _NAME.fullmatch(name):
            return self._gives_up()
        self._held = self._held[min(ends) :].removeprefix(behind)
        self.name, self.arguments = name, "{"
        properties = self._schemas.get(name, {}).get("properties")
        self._properties = properties if isinstance(properties, Mapping) else {}
        self._read = self._read_between
        return True

    def _read_between(self) -> bool:
        """Reads up to a key or the end and ignores other text."""
        positions = [(at, mark) for mark in (self._tags.key[0], self._tags.end) if (at := self._held.find(mark)) >= 0]
        if not positions:
            return False
        at, mark = min(positions)
        self._held = self._held[at + len(mark) :]
        if mark == self._tags.end:
            self.arguments += "}"
            self.done = True
        else:
            self._read = self._read_key
        return not self.done

    def _read_key(self) -> bool:
        key, mark, rest = self._held.partition(self._tags.key[1])
        if mark:
            if self._tags.kind:
                key, _, word = key.partition(self._tags.kind)
                self._is_said_to_be_text = {"true": True, "false": False}.get(word.strip())
            self._key, self._held, self._read = key.strip(), rest, self._read_front
            self.arguments += (", " if len(self.arguments) > 1 else "") + _quoted(self._key) + ": "
        return bool(mark)

    def _read_front(self) -> bool:
        """Reads between a key and a value: a tag, or a line break that may be missing."""
        tag = self._tags.value[0].strip()
        held, front = (self._held.lstrip(), tag) if tag else (self._held, self._tags.value[0])
        if len(held) < len(front) and front.startswith(held):
            return False
        self._held = held.removeprefix(front)
        said = self._is_said_to_be_text
        self._in_text = is_text(self._schema) if said is None else said
        self.arguments += '"' if self._in_text else ""
        self._read = self._read_value
        return True

    def _read_value(self) -> bool:
        behind = self._tags.value[1]
        tag = behind.strip()
        value, mark, rest = self._held.partition(tag)
        if mark:
            value = value.removesuffix(behind.removesuffix(tag))  # a line break in front of the tag
            self.arguments += _escaped(value) + '"' if self._in_text else self._as_json(value)
            self._held, self._read = rest, self._read_between
            return True
        if self._in_text:
            n_sure = len(self._held) - n_begun(self._held, (behind, tag))
            self.arguments += _escaped(self._held[:n_sure])
            self._held = self._held[n_sure:]
        return False

    @property
    def _schema(self) -> Any:
        return self._properties.get(self._key)

    def _as_json(self, text: str) -> str:
        """Converts a value that need not be text: JSON stays as written, anything else becomes a string."""
        word = text.strip()
        word = _WORDS.get(word, word)
        only_strings = isinstance(self._schema, Mapping) and self._schema.get("type") == "string"
        with suppress(ValueError, RecursionError):
            value = json.loads(word, parse_constant=_refuse)
            if isinstance(value, str) or not only_strings:
                return word
        if not only_strings and word[:1] in ("[", "{"):
            return _unescaped(word) or _quoted(text)
        return _quoted(text)


def _unescaped(word: str) -> str | None:
    """Repairs an array or object in Python syntax, or with quotes escaped like inside a string. None if neither."""
    with suppress(ValueError, RecursionError):
        inner = json.loads(f'"{word}"', strict=False)
        json.loads(inner, parse_constant=_refuse)
        return str(inner)
    with suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        if len(word) <= MAX_LITERAL:
            return json.dumps(ast.literal_eval(word), ensure_ascii=False, allow_nan=False)
    return None


def is_text(schema: Any) -> bool:
    """Returns whether a value is written as plain text: only strings are allowed, and no pattern or format applies. A
    value without a schema is text, too.
    """
    if not isinstance(schema, Mapping):
        return schema is not True  # true allows anything
    choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(choices, list) and choices:
        return all(isinstance(choice, str) for choice in choices)
    return schema.get("type") == "string" and not any(name in schema for name in _FORMS)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    return _quoted(text)[1:-1]
