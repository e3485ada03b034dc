"""Reading one call of a tool whose name stands in front of a JSON object with its arguments, as DeepSeek's write it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from llmcl.serve.call_scanner import CallScanner, Scanner, StateScanner
from llmcl.serve.tools import Schemas

_NAME = re.compile(r"[\w.:/\-]{1,128}")
_NUMBERED = re.compile(r"(?:functions\.)?(?P<name>[^:]+):\d+")
_MOST = 300  # characters before the arguments, marks included


@dataclass(frozen=True)
class NamedForm:
    """front, kind, separator, the name, `before`, the arguments, behind, end. kind, before and behind: texts between.

    Calls without a kind have the name in its place: front, the name, separator, before, the arguments, behind, end.
    Both are read, whichever of them it is. is_numbered: the name is an id such as `functions.weather:0`.
    """

    front: str
    separator: str
    end: str
    kind: str = ""
    before: str = ""
    behind: str = ""
    is_numbered: bool = False

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
        """What stands before and behind the arguments of a call. A number is to be put between name and separator."""
        head = f"{self.kind}{self.separator}{name}" if self.kind else f"{name}{self.separator}"
        return f"{self.front}{head}{self.before}", f"{self.behind}{self.end}"


class NamedScanner(StateScanner):
    """Gives the arguments as they are written."""

    def __init__(self, form: NamedForm):
        super().__init__(self._read_name)
        self._form = form
        self._object = CallScanner()

    def _read_name(self) -> bool:
        """Up to the arguments, or to the end of a call that has none."""
        found = [at for mark in ("{", self._form.end) if (at := self._held.find(mark)) >= 0]
        if not found:
            return self._gives_up() if len(self._held) > _MOST else False
        first, separator, second = self._held[len(self._form.front) : min(found)].partition(self._form.separator)
        words = second.split() or [""]
        name = first.strip() if words[0][:1] in ("", "`") else words[0]
        if not separator or not _NAME.fullmatch(name):
            return self._gives_up()
        if self._form.is_numbered and (numbered := _NUMBERED.fullmatch(name)):
            self.id, name = name, numbered["name"]
        self.name, self._object = name, CallScanner(name)
        self._held = self._held[min(found) :]
        self._read = self._read_end if self._held.startswith(self._form.end) else self._read_arguments
        return True

    def _read_arguments(self) -> bool:
        self._held = self._held[self._object.push(self._held) :]
        self.arguments = self._object.arguments
        self._read = self._read_end if self._object.done else self._read
        return self._object.done

    def _read_end(self) -> bool:
        """What stands before the end counts for nothing."""
        _, end, rest = self._held.partition(self._form.end)
        if end:
            self.done, self._held = True, rest
        return False
