"""How models mark the thoughts before an answer: a row for each way, chosen by the text of the chat template."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ThoughtMarks:
    """A thought stands between `begin` and `end`. markers: texts in these that may be special tokens."""

    begin: str
    end: str
    markers: tuple[str, ...]


THINK = ThoughtMarks("<think>", "</think>", ("<think>", "</think>"))
WAYS = (ThoughtMarks("<|channel>thought", "<channel|>", ("<|channel>", "<channel|>")), THINK)


def thought_marks(template: str | None) -> ThoughtMarks:
    """The first way whose begin the template has; else <think>, which models write that are not told to."""
    return next((marks for marks in WAYS if marks.begin in (template or "")), THINK)
