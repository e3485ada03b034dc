"""How models mark the thoughts before an answer: a row for each way, chosen by the text of the chat template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ThoughtMarks:
    """A thought stands between `begin` and `end`. markers: texts in these that may be special tokens. strays: models
    write an end also where no thought is open; it is no text.
    """

    begin: str
    end: str
    markers: tuple[str, ...]
    strays: bool = False

    @property
    def closing(self) -> str:
        """What ends a thought that the model does not end, as it would."""
        return f"\n{self.end}\n\n" if self.begin == "<think>" else self.end


def _marks(begin: str, end: str) -> ThoughtMarks:
    return ThoughtMarks(begin, end, (begin, end))


THINK = _marks("<think>", "</think>")
WAYS = (
    ThoughtMarks("<|channel>thought", "<channel|>", ("<|channel>", "<channel|>"), strays=True),  # Gemma 4
    _marks("[THINK]", "[/THINK]"),  # Magistral, Ministral 3
    _marks("<seed:think>", "</seed:think>"),  # Seed-OSS
    _marks("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A and R7B
    _marks("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
    THINK,
)


def thought_marks(template: str | None) -> ThoughtMarks:
    """The first way whose begin the template has; else <think>, which models write that are not told to."""
    return next((marks for marks in WAYS if marks.begin in (template or "")), THINK)


@dataclass(frozen=True)
class ThoughtBudget:
    """After n_tokens of thoughts the server ends them: it writes `text`, as tokens `ids`, and the model goes on.

    options: of `LLM.stream`, for what follows, in place of those of the same purpose.
    """

    n_tokens: int
    text: str
    ids: list[int]
    options: Mapping[str, Any]
