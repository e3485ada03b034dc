"""What an engine counts over its life: steps and their rows, waiting, prompts and what of them was cached."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

ROWS = 1, 2, 4, 8, 16, 32, 64, 128, 256, 512
CACHED = 0, 64, 256, 1024, 4096, 16384, 65536
ACCEPTED = 0, 1, 2, 3, 4, 6, 8, 12, 16, 32
QUEUE_S = 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60


@dataclass
class Histogram:
    """Numbers by size. bounds: ascending, of each bin the largest number in it. counts: of each bin, one more at the
    end for what is larger than all bounds.
    """

    bounds: tuple[float, ...]
    counts: list[int] = field(init=False)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


@dataclass(frozen=True)
class StepTotals:
    """Of one moment: steps so far, their rows, the keys that they attended to (of a prompt's chunk once), seconds."""

    steps: int = 0
    rows: int = 0
    keys: int = 0
    seconds: float = 0.0

    def since(self, before: StepTotals) -> StepTotals:
        return StepTotals(
            self.steps - before.steps,
            self.rows - before.rows,
            self.keys - before.keys,
            self.seconds - before.seconds,
        )


@dataclass
class EngineMetrics:
    """Totals since the engine was opened. Its thread writes them; who reads gets whole numbers, not one moment's.

    steps: of the model. step_rows: rows of each. step_keys: keys that they attended to, of a prompt's chunk once.
    step_s: their seconds. step_sequences: sum over steps of the sequences that each extended. prompt_tokens: that
    steps read, those read again after a preemption included. prompt_s: sum over requests of the time from their
    beginning to the first token. cached: of each prompt the tokens that no step had to read. drafted_tokens: of drafts
    that steps verified. accepted: of each draft the tokens that were right. queue_s: of each request, from its
    submission to its beginning. preemptions: how often a request gave its pages to others.
    """

    steps: int = 0
    step_rows: Histogram = field(default_factory=lambda: Histogram(ROWS))
    step_keys: int = 0
    step_s: float = 0.0
    step_sequences: int = 0
    prompt_tokens: int = 0
    prompt_s: float = 0.0
    cached: Histogram = field(default_factory=lambda: Histogram(CACHED))
    drafted_tokens: int = 0
    accepted: Histogram = field(default_factory=lambda: Histogram(ACCEPTED))
    queue_s: Histogram = field(default_factory=lambda: Histogram(QUEUE_S))
    preemptions: int = 0

    @property
    def cached_tokens(self) -> int:
        """Of all prompts."""
        return int(self.cached.sum)

    def note_draft(self, n_drafted: int, n_accepted: int) -> None:
        """A step has verified a draft."""
        self.drafted_tokens += n_drafted
        self.accepted.observe(n_accepted)

    def totals(self) -> StepTotals:
        """Of this moment, to the thread that writes."""
        return StepTotals(self.steps, int(self.step_rows.sum), self.step_keys, self.step_s)
