"""Measuring what a prompt brings the answers beside it: steps of PL sequences that decode, with a chunk of a prompt.

ms/step     median time of such a step, one after the other, greedy sampling and the ids on the host included
without     the same of a step without a chunk, in the same run
times       how often the second goes into the first: what a stream's TBT becomes
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from llmcl.errors import counted
from llmcl.models.batch import Batch, PromptChunk, make_batch
from llmcl.models.sequence import SequenceState
from llmcl.tools.rows import markdown_table
from llmcl.tools.throughput import GREEDY, PAGE_TOKENS

if TYPE_CHECKING:
    from llmcl.engine.llm import LLM

STEPS = 6  # of a turn, of which the first is a warm-up


@dataclass(frozen=True)
class Plan:
    """Every combination of lengths of the chunk and numbers of sequences that decode, after n_prompt tokens each."""

    chunks: tuple[int, ...]
    n_prompt: tuple[int, ...] = (512,)
    n_parallel: tuple[int, ...] = (32,)
    repetitions: int = 3

    def context_tokens(self) -> int:
        """Of a sequence."""
        steps = STEPS * (self.repetitions + 1) * (len(self.chunks) + 1)
        return max(max(self.n_prompt) + steps, STEPS * max(self.chunks)) + 1


@dataclass(frozen=True)
class Row:
    """Steps of pl rows that decode after pp tokens, with a chunk of so many tokens; times in milliseconds."""

    model: str
    device: str
    dtype: str
    kv_dtype: str
    pp: int
    pl: int
    chunk: int
    ms_per_step: float
    ms_without: float

    @property
    def times(self) -> float:
        return self.ms_per_step / self.ms_without


def run(llm: LLM, plan: Plan, note: Callable[[str], None] = lambda text: None) -> list[Row]:
    """Runs every test of `plan`; `note` is told what is being measured."""
    most = max(plan.n_parallel)
    note(f"preparing {most + 1} sequences of {plan.context_tokens()} tokens")
    batch = make_batch(llm.model, most + 1, plan.context_tokens(), PAGE_TOKENS, max_rows=most + max(plan.chunks))
    rows = []
    for pp in plan.n_prompt:
        for pl in plan.n_parallel:
            note(f"{counted(pl, 'sequence')} of {counted(pp, 'token')}")
            seconds = llm.leases.call(lambda pp=pp, pl=pl: _measure(batch, plan, pp, pl))  # type: ignore[misc]
            for chunk in plan.chunks:
                times = 1e3 * seconds[chunk], 1e3 * seconds[0]
                rows.append(Row(llm.model_name, llm.device.name, llm.dtype, llm.kv_dtype, pp, pl, chunk, *times))
    return rows


def _measure(batch: Batch, plan: Plan, pp: int, pl: int) -> dict[int, float]:
    """Median seconds of a step by the length of its chunk, 0 for none."""
    vocab = batch.model.config.vocab_size
    rng = np.random.default_rng(0)
    running = [batch.cache.sequence() for _ in range(pl)]
    other = batch.cache.sequence()
    try:
        for sequence in (*running, other):
            batch.start(sequence, GREEDY)
        inputs = batch.read([(sequence, rng.integers(0, vocab, pp).tolist()) for sequence in running])()
        seconds: dict[int, list[float]] = {chunk: [] for chunk in (0, *plan.chunks)}
        for turn in range(plan.repetitions + 1):  # the first is a warm-up
            for chunk, found in seconds.items():
                batch.cache.truncate(other, 0)
                prompt = rng.integers(0, vocab, chunk).tolist()
                times, inputs = _steps(batch, running, inputs, other, prompt)
                if turn:
                    found += times
        return {chunk: median(found) for chunk, found in seconds.items()}
    finally:
        for sequence in (*running, other):
            batch.end(sequence)
            batch.cache.truncate(sequence, 0)


def _steps(
    batch: Batch, running: Sequence[SequenceState], inputs: list[int], other: SequenceState, prompt: list[int]
) -> tuple[list[float], list[int]]:
    """Seconds of STEPS - 1 steps, the device one ahead of the host where it can be; and the last ids."""
    waiting: Callable[[], list[int]] | None = None
    ends: list[float] = []
    for _ in range(STEPS):
        ahead = batch.step(running, [PromptChunk(other, prompt, is_last=False)] if prompt else [])
        if waiting is not None:
            inputs = waiting()
            ends.append(time.perf_counter())
        for sequence, token in zip(running, inputs, strict=True):
            sequence.token_ids.append(token)
        waiting = ahead
        if not batch.runs_ahead:
            ahead()
    assert waiting is not None
    inputs = waiting()
    ends.append(time.perf_counter())
    return [float(step) for step in np.diff(ends)], inputs


def markdown(rows: Sequence[Row]) -> str:
    header = ["model", "device", "dtype", "PP", "PL", "chunk", "ms/step", "without", "times"]
    table = [
        [
            *(row.model, row.device, row.dtype, str(row.pp), str(row.pl), str(row.chunk)),
            *(f"{row.ms_per_step:.3f}", f"{row.ms_without:.3f}", f"{row.times:.2f}"),
        ]
        for row in rows
    ]
    return markdown_table(header, table, left=3)
