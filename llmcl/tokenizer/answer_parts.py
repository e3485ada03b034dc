"""What an answer consists of: thoughts, text and calls of tools."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Call:
    """arguments: JSON, as the model wrote it, or what it wrote in another form as JSON."""

    id: str
    name: str
    arguments: str = ""


@dataclass(frozen=True)
class Said:
    """A piece of the answer's text."""

    text: str


@dataclass(frozen=True)
class Thought:
    """A piece of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True)
class CallPart:
    """A piece of call number `index`: with is_first its begin, then pieces of its arguments, with is_last its end."""

    index: int
    call: Call
    delta: str = ""
    is_first: bool = False
    is_last: bool = False


Part = Said | Thought | CallPart


@dataclass(kw_only=True)
class AnswerParts(ABC):
    """The parts of one answer so far. `take` gives what is new since it was called last; the rest is what there was in
    all.
    """

    text: str = ""
    thoughts: str = ""
    calls: list[Call] = field(default_factory=list)
    _parts: list[Part] = field(default_factory=list, init=False, repr=False)

    @property
    @abstractmethod
    def is_thinking(self) -> bool:
        """Whether what comes next goes on with a thought."""

    @abstractmethod
    def push(self, text: str, token_id: int) -> None:
        """The answer goes on with this token and its text."""

    @abstractmethod
    def finish(self, *, is_cut: bool = False) -> None:
        """The answer is complete, and what was held back is text. is_cut: it would have gone on, so what is surely the
        opening of a call is none.
        """

    def take(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts

    def _say(self, text: str) -> None:
        if text:
            self.text += text
            self._parts.append(Said(text))

    def _think(self, text: str) -> None:
        if text:
            self.thoughts += text
            self._parts.append(Thought(text))

    def _call(self, delta: str, *, new: Call | None = None, is_last: bool = False) -> None:
        """More of the arguments of the last call, or the begin of a new one."""
        if new is not None:
            self.calls.append(new)
        call = self.calls[-1]
        call.arguments += delta
        if delta or is_last or new is not None:
            self._parts.append(CallPart(len(self.calls) - 1, call, delta, new is not None, is_last))


def n_begun(text: str, marks: Sequence[str], *, spaces: bool = False) -> int:
    """Characters at the end of a text that may begin one of the marks; spaces: and the white space before it."""
    found = 0
    for mark in marks:
        for n in range(min(len(mark) - 1, len(text)), found, -1):
            if mark.startswith(text[-n:]):
                found = n
                break
    if spaces:
        front = text[: len(text) - found]
        found += len(front) - len(front.rstrip())
    return found
