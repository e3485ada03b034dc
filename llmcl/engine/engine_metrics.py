"""Counters over an engine's life: steps and rows, waiting times, prompts and cached tokens."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

ROWS = 1, 2, 4, 8, 16, 32, 64, 128, 256, 512
CACHED = 0, 64, 256, 1024, 4096, 16384, 65536
ACCEPTED = 0, 1, 2, 3, 4, 6, 8, 12, 16, 32
QUEUE_S = 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60


@dataclass
class Histogram:
    """Counts numbers by size. bounds: ascending upper bounds of the bins. counts: per bin, plus a last bin above all
    bounds.
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
    """Totals at one moment. keys: attended keys, counted once per prompt chunk."""

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
    """Totals since the engine was opened. The engine's thread writes them; other threads may see values from different
    moments.
    """

    steps: int = 0  # model steps
    step_rows: Histogram = field(default_factory=lambda: Histogram(ROWS))  # rows per step
    step_keys: int = 0  # attended keys, counted once per prompt chunk
    step_s: float = 0.0  # seconds in steps
    step_sequences: int = 0  # sum over steps: sequences extended
    prompt_tokens: int = 0  # prompt tokens read by steps, rereads after preemption included
    prompt_s: float = 0.0  # sum over requests: seconds from start to first token
    cached: Histogram = field(default_factory=lambda: Histogram(CACHED))  # per prompt: tokens that no step had to read
    drafted_tokens: int = 0  # draft tokens verified by steps
    accepted: Histogram = field(default_factory=lambda: Histogram(ACCEPTED))  # per draft: right tokens
    # per request: seconds from submission to start
    queue_s: Histogram = field(default_factory=lambda: Histogram(QUEUE_S))
    preemptions: int = 0  # how often a request gave its pages to others

    @property
    def cached_tokens(self) -> int:
        """Returns cached tokens over all prompts."""
        return int(self.cached.sum)

    def note_draft(self, n_drafted: int, n_accepted: int) -> None:
        """Records a verified draft."""
        self.drafted_tokens += n_drafted
        self.accepted.observe(n_accepted)

    def totals(self) -> StepTotals:
        """Returns the totals at this moment. Only for the thread that writes them."""
        return StepTotals(self.steps, int(self.step_rows.sum), self.step_keys, self.step_s)
