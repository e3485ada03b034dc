"""Reads one tool call whose name precedes a JSON object with the arguments, as in DeepSeek's format."""

from __future__ import annotations

import re
from dataclasses import dataclass

from llmcl.serve.call_scanner import CallScanner, Scanner, StateScanner
from llmcl.serve.tools import Schemas

_NAME = re.compile(r"[\w.:/\-]{1,128}")
_NUMBERED = re.compile(r"(?:functions\.)?(?P<name>[^:]+):\d+")
_MOST = 300  # most characters before the arguments, marks included


@dataclass(frozen=True)
class NamedForm:
    """Format: front, kind, separator, name, `before`, arguments, `behind`, end.

    Calls without a kind have the name in place of the kind: front, name, separator, `before`, arguments, `behind`, end.
    The scanner accepts both orders.
    """

    front: str
    separator: str
    end: str
    kind: str = ""
    before: str = ""  # text between the name and the arguments
    behind: str = ""  # text between the arguments and the end
    is_numbered: bool = False  # the name is an id such as `functions.weather:0`

    @property
    def marks(self) -> tuple[str, ...]:
        return self.front, self.separator, self.end

    def begins(self, text: str) -> bool | None:
        if len(text) < len(self.front) and self.front.startswith(text):
            return None
        return text.startswith(self.front)

    def scanner(self, schemas: Schemas) -> Scanner:
        return NamedScanner(self)

    def around(self, name: str) -> tuple[str, str]:
        """Returns the text around a call's arguments. A numbered call needs a number between name and separator."""
        head = f"{self.kind}{self.separator}{name}" if self.kind else f"{name}{self.separator}"
        return f"{self.front}{head}{self.before}", f"{self.behind}{self.end}"


class NamedScanner(StateScanner):
    """Passes the arguments on as written."""

    def __init__(self, form: NamedForm):
        super().__init__(self._read_name)
        self._form = form
        self._object = CallScanner()

    def _read_name(self) -> bool:
        """Reads up to the arguments, or to the end of a call without arguments."""
        positions = [at for mark in ("{", self._form.end) if (at := self._held.find(mark)) >= 0]
        if not positions:
            return self._gives_up() if len(self._held) > _MOST else False
        first, separator, second = self._held[len(self._form.front) : min(positions)].partition(self._form.separator)
        words = second.split() or [""]
        name = first.strip() if words[0][:1] in ("", "`") else words[0]
        if not separator or not _NAME.fullmatch(name):
            return self._gives_up()
        if self._form.is_numbered and (numbered := _NUMBERED.fullmatch(name)):
            self.id, name = name, numbered["name"]
        self.name, self._object = name, CallScanner(name)
        self._held = self._held[min(positions) :]
        self._read = self._read_end if self._held.startswith(self._form.end) else self._read_arguments
        return True

    def _read_arguments(self) -> bool:
        self._held = self._held[self._object.push(self._held) :]
        self.arguments = self._object.arguments
        self._read = self._read_end if self._object.done else self._read
        return self._object.done

    def _read_end(self) -> bool:
        """Reads up to the end mark and ignores the text before it."""
        _, end, rest = self._held.partition(self._form.end)
        if end:
            self.done, self._held = True, rest
        return False
