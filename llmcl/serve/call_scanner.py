"""Reading one call of a tool, a JSON object, while a model writes it."""

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
    """Reads one call.

    id: of the call, as the model wrote it; "" for none. name: of the tool, None until it is known. raw: all text of the
    call so far. done: it is complete. arguments: JSON so far, "" before it begins.
    """

    id: str
    name: str | None
    raw: str
    done: bool

    @property
    def arguments(self) -> str: ...
    @property
    def is_call(self) -> bool:
        """Whether name and arguments have begun; of a complete call the arguments may be missing."""
        ...

    def push(self, text: str) -> int:
        """The call goes on with this text, of which so many characters belong to it."""
        ...


class CallForm(Protocol):
    """How one call is written, without what opens and closes it in its family."""

    @property
    def front(self) -> str:
        """What it always begins with; "" for nothing of the kind."""
        ...

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts in it that may be special tokens."""
        ...

    def begins(self, text: str) -> bool | None:
        """Whether a call begins with this text; None: its first characters do not say it."""
        ...

    def scanner(self, schemas: Schemas) -> Scanner: ...


class StateScanner:
    """A scanner whose states read from the front of what is held. It is done without a name where the text turns out to
    be no call.
    """

    def __init__(self, read: Callable[[], bool]):
        """read: the first state. Each says whether the next one, `_read`, may go on at once."""
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
    """A scanner that takes one character after the other."""

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
        """Takes raw[at], and sets `done` if the call ends with it."""


@dataclass(frozen=True)
class ObjectForm:
    """A JSON object with the name and the arguments."""

    front: str = ""
    marks: tuple[str, ...] = ()

    def begins(self, text: str) -> bool | None:
        return text.startswith("{") if text else None

    def scanner(self, schemas: Schemas) -> Scanner:
        return CallScanner()


@dataclass(frozen=True)
class KeyForm(ObjectForm):
    """A JSON object with the name as its one key, and the arguments as that key's value."""

    def scanner(self, schemas: Schemas) -> Scanner:
        return CallScanner(by_key=True)


class CallScanner(CharacterScanner):
    """Finds the name and the arguments in the text of an object; both exactly as they were written.

    name: known in advance where the object is the arguments alone. by_key: the first key is the name.
    """

    def __init__(self, name: str | None = None, *, by_key: bool = False):
        super().__init__(name)
        self._by_key = by_key
        self._is_arguments = name is not None
        self._depth = 0
        self._in_string = self._escaped = False
        self._key: str | None = None
        self._start = 0  # of the key or value
        self._span: tuple[int, int | None] | None = None  # of the arguments
        self._other: str | None = None  # arguments that are no object

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
        """Whether the value of the key that was read last is the arguments."""
        return self._key in _ARGUMENTS or (self._by_key and self._key == self.name)

    def _end_of_value(self, at: int) -> None:
        value, key, self._key = self.raw[self._start : at].strip(), self._key, None
        if self._is_arguments or self._by_key:
            return
        if key in _NAMES and self.name is None:
            self.name = _string(value) or None
        elif key in _ARGUMENTS and self._span is None:
            self._other = _string(value) or value  # some models write JSON in a string


def _string(text: str) -> str | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str) else None
