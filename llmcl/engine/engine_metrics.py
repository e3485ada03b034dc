"""What an engine counts over its life: steps and their rows, waiting, prompts and what of them was cached."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

ROWS = 1, 2, 4, 8, 16, 32, 64, 128, 256, 512
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


@dataclass
class EngineMetrics:
    """Totals since the engine was opened. Its thread writes them; who reads gets whole numbers, not one moment's.

    steps: of the model. step_rows: rows of each. step_sequences: sum over steps of the sequences that each extended.
    prompt_tokens: that steps read, those read again after a preemption included. prompt_s: sum over requests of the
    time from their beginning to the first token. cached_tokens: of prompts, that no step had to read. queue_s: of each
    request, from its submission to its beginning. preemptions: how often a request gave its pages to others.
    """

    steps: int = 0
    step_rows: Histogram = field(default_factory=lambda: Histogram(ROWS))
    step_sequences: int = 0
    prompt_tokens: int = 0
    prompt_s: float = 0.0
    cached_tokens: int = 0
    queue_s: Histogram = field(default_factory=lambda: Histogram(QUEUE_S))
    preemptions: int = 0
