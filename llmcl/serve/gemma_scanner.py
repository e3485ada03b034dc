"""Reads one tool call in Gemma 4's format while the model writes it: `call:name{key:value,...}`."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass

from llmcl.serve.call_scanner import Scanner, StateScanner
from llmcl.serve.tools import Schemas
from llmcl.tokenizer.answer_parts import n_begun

QUOTE = '<|"|>'
_CALL = re.compile(r"(?:call:\s*)?([\w.:/\-]{1,128})\s*\{")
_BEGUN = re.compile(r"(?:call:\s*)?(?:[\w.:/\-]{1,128}\s*)?")
_JSON_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_CLOSING = {"{": "}", "[": "]"}
_WORDS = {"True": "true", "False": "false", "None": "null"}  # Python's spelling


@dataclass(frozen=True)
class GemmaForm:
    """`call:name{...}`: an object with unquoted keys, and texts without escapes between two QUOTEs."""

    front: str = ""
    marks: tuple[str, ...] = (QUOTE,)

    def begins(self, text: str) -> bool | None:
        return None if _BEGUN.fullmatch(text) else _CALL.match(text) is not None

    def scanner(self, schemas: Schemas) -> Scanner:
        return GemmaScanner()


@dataclass
class _Container:
    """An open object or array. place: what comes next in an object: "key", ":", "value" or ","."""

    bracket: str
    place: str
    is_empty: bool = True


class GemmaScanner(StateScanner):
    """Converts the arguments to JSON while they arrive. The result is valid JSON whatever the model writes: a key
    without a value gets null, and a word that is not a JSON value becomes a string.
    """

    def __init__(self) -> None:
        super().__init__(self._read_name)
        self._open: list[_Container] = []

    def _read_name(self) -> bool:
        if match := _CALL.match(self._held):
            self.name = match[1]
            self._held = self._held[match.end() - 1 :]
            self._read = self._read_item
            return True
        return False if _BEGUN.fullmatch(self._held) else self._gives_up()

    def _read_item(self) -> bool:
        """Reads from the front of a key, a value or a separator."""
        held = self._held = self._held.lstrip()
        if not held or (len(held) < len(QUOTE) and QUOTE.startswith(held)):
            return False
        if held.startswith(QUOTE):
            self._begin_item()
            self.arguments += '"'
            self._held, self._read = held[len(QUOTE) :], self._read_text
        elif held[0] in "{[":
            if self._open:
                self._begin_item(is_key=False)
            self.arguments += held[0]
            self._open.append(_Container(held[0], "key" if held[0] == "{" else "value"))
            self._held = held[1:]
        elif held[0] in "}],":
            self._end_item()
            if held[0] == ",":
                self._open[-1].place = "key" if self._open[-1].bracket == "{" else "value"
            else:
                self.arguments += _CLOSING[self._open.pop().bracket]
                self.done = not self._open
            self._held = held[1:]
        elif held[0] == ":":
            if self._open[-1].place == ":":
                self._open[-1].place = "value"
                self.arguments += ": "
            self._held = held[1:]
        else:
            return self._read_word()
        return True

    def _read_text(self) -> bool:
        text, quote, rest = self._held.partition(QUOTE)
        if not quote:
            n_sure = len(text) - n_begun(text, (QUOTE,))
            text, rest = text[:n_sure], text[n_sure:]
        self.arguments += _quoted(text)[1:-1]
        self._held = rest
        if quote:
            self.arguments += '"'
            self._read = self._read_item
        return bool(quote)

    def _read_word(self) -> bool:
        """Reads a key, a value without quotes, or a JSON string."""
        is_key = self._open[-1].bracket == "{" and self._open[-1].place != "value"
        if self._held[0] == '"':
            if (match := _JSON_STRING.match(self._held)) is None:
                return False
            word, n = match[0], match.end()
        else:
            ends = [at for sign in (":" if is_key else "", ",", "}", "]") if sign and (at := self._held.find(sign)) > 0]
            if not ends:
                return False
            n = min(ends)
            word = self._held[:n].strip()
        self._begin_item()
        self.arguments += _as_json(word, is_key=is_key)
        self._held = self._held[n:]
        return True

    def _begin_item(self, *, is_key: bool = True) -> None:
        """Writes the separator before an item. is_key: the item may be a key; otherwise it gets an empty key."""
        container = self._open[-1]
        if container.place in (":", ","):  # a separator is missing
            self._end_item()
            container.place = "key" if container.bracket == "{" else "value"
        if container.bracket == "[" or container.place == "key":
            self.arguments += "" if container.is_empty else ", "
            container.is_empty = False
        if container.place == "key" and not is_key:
            self.arguments += '"": '
            container.place = "value"
        container.place = ":" if container.place == "key" else ","

    def _end_item(self) -> None:
        """Ends an item. A key without a value gets null."""
        container = self._open[-1]
        if container.bracket == "{" and container.place in (":", "value"):
            self.arguments += "null" if container.place == "value" else ": null"
        container.place = ","


def _as_json(word: str, *, is_key: bool) -> str:
    word = _WORDS.get(word, word)
    with suppress(ValueError, RecursionError):
        value = json.loads(word, strict=False, parse_constant=_refuse)
        if isinstance(value, str):
            return _quoted(value)
        if not is_key:
            return word
    return _quoted(word)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
