"""Reads one tool call, a JSON object, while a model writes it."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from llmcl.serve.tools import Schemas

_NAMES = ("name", "tool_name")
_ARGUMENTS = ("arguments", "parameters")


class Scanner(Protocol):
    """Reads one call."""

    id: str  # call id as the model wrote it; "" for none
    name: str | None  # tool name; None until known
    raw: str  # all text of the call so far
    done: bool  # whether the call is complete

    @property
    def arguments(self) -> str: ...
    @property
    def is_call(self) -> bool:
        """Whether name and arguments have begun. A complete call may lack arguments."""
        ...

    def push(self, text: str) -> int:
        """Takes more text. Returns how many characters belong to the call."""
        ...


class CallForm(Protocol):
    """The format of one call, without the family's opening and closing marks."""

    @property
    def front(self) -> str:
        """Text that every call begins with; "" for none."""
        ...

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts inside a call that may be special tokens."""
        ...

    def begins(self, text: str) -> bool | None:
        """Returns whether `text` begins a call; None: too few characters to tell."""
        ...

    def scanner(self, schemas: Schemas) -> Scanner: ...


class StateScanner:
    """A scanner built from states that read from the front of the held text. When the text turns out to be no call,
    `done` is set while `name` is None.
    """

    def __init__(self, read: Callable[[], bool]):
        """read: the first state. Each state returns whether the next state, `_read`, may run at once."""
        self.id = ""
        self.name: str | None = None
        self.raw = ""
        self.done = False
        self.arguments = ""
        self._held = ""
        self._read = read

    @property
    def is_call(self) -> bool:
        return self.name is not None

    def push(self, text: str) -> int:
        self._held += text
        while not self.done and self._read():
            pass
        n_left = len(self._held) if self.done else 0
        n_taken = len(text) - n_left
        self.raw += text[:n_taken]
        return n_taken

    def _gives_up(self) -> bool:
        self.done, self._held = True, ""
        return False


class CharacterScanner(ABC):
    """A scanner that takes one character after another."""

    def __init__(self, name: str | None = None):
        self.id = ""
        self.name = name
        self.raw = ""
        self.done = False

    def push(self, text: str) -> int:
        before, self.raw = len(self.raw), self.raw + text
        for at in range(before, len(self.raw)):
            self._character(at, self.raw[at])
            if self.done:
                self.raw = self.raw[: at + 1]
                return at + 1 - before
        return len(text)

    @abstractmethod
    def _character(self, at: int, c: str) -> None:
        """Takes raw[at] and sets `done` if the call ends there."""


@dataclass(frozen=True)
class ObjectForm:
    """A JSON object with a name and arguments."""

    front: str = ""
    marks: tuple[str, ...] = ()

    def begins(self, text: str) -> bool | None:
        return text.startswith("{") if text else None

    def scanner(self, schemas: Schemas) -> Scanner:
        return CallScanner()


@dataclass(frozen=True)
class KeyForm(ObjectForm):
    """A JSON object with the tool name as the only key and the arguments as the value."""

    def scanner(self, schemas: Schemas) -> Scanner:
        return CallScanner(by_key=True)


class CallScanner(CharacterScanner):
    """Finds name and arguments in the text of a JSON object. Both stay exactly as written.

    name: set when the object holds the arguments alone. by_key: the first key is the tool name.
    """

    def __init__(self, name: str | None = None, *, by_key: bool = False):
        super().__init__(name)
        self._by_key = by_key
        self._is_arguments = name is not None
        self._depth = 0
        self._in_string = self._escaped = False
        self._key: str | None = None
        self._start = 0  # start of the current key or value
        self._span: tuple[int, int | None] | None = None  # start and end of the arguments
        self._other: str | None = None  # arguments that are not an object

    @property
    def arguments(self) -> str:
        if self._is_arguments:
            return self.raw
        if self._span is not None:
            return self.raw[slice(*self._span)]
        return self._other or ""

    @property
    def is_call(self) -> bool:
        return self.name is not None and (bool(self.arguments) or self.done)

    def _character(self, at: int, c: str) -> None:
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif c == "\\":
                self._escaped = True
            elif c == '"':
                self._in_string = False
            return
        if c == '"':
            self._in_string = True
        elif c in "{[":
            self._depth += 1
            if self._depth == 1:
                self._start = at + 1
            elif self._depth == 2 and self._has_arguments and self._span is None and c == "{":
                self._span = at, None
        elif c in "}]":
            self._depth -= 1
            if self._depth == 1 and self._span is not None and self._span[1] is None:
                self._span = self._span[0], at + 1
            if self._depth == 0:
                self._end_of_value(at)
                self.done = True
        elif self._depth == 1 and c == ":" and self._key is None:
            self._key = _string(self.raw[self._start : at]) or ""
            self._start = at + 1
            if self._by_key and self.name is None:
                self.name = self._key or None
        elif self._depth == 1 and c == ",":
            self._end_of_value(at)
            self._start = at + 1

    @property
    def _has_arguments(self) -> bool:
        """Whether the value after the latest key is the arguments."""
        return self._key in _ARGUMENTS or (self._by_key and self._key == self.name)

    def _end_of_value(self, at: int) -> None:
        value, key, self._key = self.raw[self._start : at].strip(), self._key, None
        if self._is_arguments or self._by_key:
            return
        if key in _NAMES and self.name is None:
            self.name = _string(value) or None
        elif key in _ARGUMENTS and self._span is None:
            self._other = _string(value) or value  # some models write JSON inside a string


def _string(text: str) -> str | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str) else None
