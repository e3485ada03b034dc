"""The parts of an answer: thoughts, text and tool calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Call:
    """A tool call. arguments: JSON, either as the model wrote it or converted from another format."""

    id: str
    name: str
    arguments: str = ""


@dataclass(frozen=True)
class Said:
    """A piece of the answer's text."""

    text: str


@dataclass(frozen=True)
class Thought:
    """A piece of the model's thoughts before the answer."""

    text: str


@dataclass(frozen=True)
class CallPart:
    """A piece of call number `index`: the begin (is_first), part of the arguments, or the end (is_last)."""

    index: int
    call: Call
    delta: str = ""
    is_first: bool = False
    is_last: bool = False


Part = Said | Thought | CallPart


@dataclass(kw_only=True)
class AnswerParts(ABC):
    """Collects the parts of one answer. `take` returns the parts since the last call; the fields hold everything so
    far.
    """

    text: str = ""
    thoughts: str = ""
    calls: list[Call] = field(default_factory=list)
    _parts: list[Part] = field(default_factory=list, init=False, repr=False)

    @property
    @abstractmethod
    def is_thinking(self) -> bool:
        """Whether the next text continues a thought."""

    @abstractmethod
    def push(self, text: str, token_id: int) -> None:
        """Takes the answer's next token with its text."""

    @abstractmethod
    def finish(self, *, is_cut: bool = False) -> None:
        """Ends the answer; text held back becomes part of it. is_cut: the answer was cut off, so a certain opening of a
        call is not shown as text.
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
        """Adds to the arguments of the last call, or begins a new call."""
        if new is not None:
            self.calls.append(new)
        call = self.calls[-1]
        call.arguments += delta
        if delta or is_last or new is not None:
            self._parts.append(CallPart(len(self.calls) - 1, call, delta, new is not None, is_last))


def n_begun(text: str, marks: Sequence[str], *, spaces: bool = False) -> int:
    """Returns how many characters at the end of a text may begin a mark. spaces: includes white space before marks."""
    longest = 0
    for mark in marks:
        for n in range(min(len(mark) - 1, len(text)), longest, -1):
            if mark.startswith(text[-n:]):
                longest = n
                break
    if spaces:
        front = text[: len(text) - longest]
        longest += len(front) - len(front.rstrip())
    return longest
