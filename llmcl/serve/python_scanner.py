"""Reads one tool call in Python syntax while a model writes it."""

from __future__ import annotations

import ast
import json
import re
from contextlib import suppress
from dataclasses import dataclass

from llmcl.serve.call_scanner import CharacterScanner, Scanner
from llmcl.serve.tools import Schemas

_CALL, _BEGUN = re.compile(r"[\w.\-]+\s*\("), re.compile(r"([\w.\-]+\s*)?")
_NAME = re.compile(r"[\w.\-]{1,128}")
MAX_LITERAL = 1 << 16  # longest value in characters passed to Python's parser


@dataclass(frozen=True)
class PythonForm:
    """`name(key=value, ...)`."""

    front: str = ""
    marks: tuple[str, ...] = ()

    def begins(self, text: str) -> bool | None:
        return None if _BEGUN.fullmatch(text) else _CALL.match(text) is not None

    def scanner(self, schemas: Schemas) -> Scanner:
        return PythonScanner()


class PythonScanner(CharacterScanner):
    """Reads `name(key=value, ...)`. Each argument becomes JSON once complete; arguments without a key are ignored.

    When the text turns out to be no call, `done` is set while `name` is None.
    """

    def __init__(self) -> None:
        super().__init__()
        self.arguments = ""
        self._key = ""
        self._start = 0  # start of the current key or value
        self._in_value = False
        self._depth = 0
        self._quote = ""
        self._escaped = False

    @property
    def is_call(self) -> bool:
        return self.name is not None

    def _character(self, at: int, c: str) -> None:
        if self._quote:
            if self._escaped:
                self._escaped = False
            elif c == "\\":
                self._escaped = True
            elif c == self._quote:
                self._quote = ""
        elif self.name is None:
            if c == "(":
                name = self.raw[:at].strip()
                self.done = not _NAME.fullmatch(name)
                if not self.done:
                    self.name, self.arguments, self._start = name, "{", at + 1
        elif c in "\"'":
            self._quote = c
        elif c in "([{":
            self._depth += 1
        elif c in ")]}" and self._depth:
            self._depth -= 1
        elif self._depth == 0 and c == "=" and not self._in_value:
            self._key, self._in_value, self._start = self.raw[self._start : at].strip(), True, at + 1
        elif self._depth == 0 and c in ",)":
            if self._in_value:
                self.arguments += ", " if len(self.arguments) > 1 else ""
                self.arguments += f"{json.dumps(self._key, ensure_ascii=False)}: {_as_json(self.raw[self._start : at])}"
            self._in_value, self._start = False, at + 1
            if c == ")":
                self.arguments += "}"
                self.done = True


def _as_json(text: str) -> str:
    """Converts a value to JSON. Some models write JSON already; a value that is neither becomes a string."""
    text = text.strip()
    for read in (json.loads, ast.literal_eval):
        with suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            if len(text) <= MAX_LITERAL:
                return json.dumps(read(text), ensure_ascii=False, allow_nan=False)
    return json.dumps(text, ensure_ascii=False)
