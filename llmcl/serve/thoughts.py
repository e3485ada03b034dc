"""How models mark thoughts before an answer: one row per format, chosen by the chat template's text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmcl.tokenizer.channel_reader import has_channels


@dataclass(frozen=True)
class ThoughtMarks:
    """A thought stands between `begin` and `end`."""

    begin: str
    end: str
    markers: tuple[str, ...]  # texts in begin and end that may be special tokens
    strays: bool = False  # the model also writes a stray end mark, which is dropped

    @property
    def closing(self) -> str:
        """Text that ends a thought on the model's behalf, in the model's own format."""
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
    """Returns the first format whose begin mark is in the template. Default: <think>, which models write unprompted."""
    return next((marks for marks in WAYS if marks.begin in (template or "")), THINK)


def thinks(template: str | None) -> bool:
    """Returns whether the model was trained to think before it answers, judging by the chat template."""
    return has_channels(template) or any(marks.begin in (template or "") for marks in WAYS)


@dataclass(frozen=True)
class ThoughtBudget:
    """After n_tokens of thoughts the server ends them: it appends `text` (tokens `ids`) and the model continues.

    options: options of `LLM.stream` for the rest, replacing the constraint of the first part.
    """

    n_tokens: int
    text: str
    ids: list[int]
    options: Mapping[str, Any]
