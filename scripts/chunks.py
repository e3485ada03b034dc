"""Measures how a prompt slows down running answers: steps with PL decoding sequences and one prompt chunk.

ms/step     median step time with the chunk, with greedy sampling and ids copied to the host
without     median step time without a chunk, in the same run
times       ratio of ms/step to without: the slowdown in a stream's TBT
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from llmcl.errors import counted
from llmcl.models.batch import Batch, PromptChunk, make_batch
from llmcl.tools.rows import markdown_table
from llmcl.tools.throughput import GREEDY, PAGE_TOKENS, run_steps

if TYPE_CHECKING:
    from llmcl.engine.llm import LLM

STEPS = 6  # per turn; the first is a warm-up


@dataclass(frozen=True)
class Plan:
    """The plan: every combination of chunk length, prompt length and number of decoding sequences."""

    chunks: tuple[int, ...]  # chunk lengths in tokens
    n_prompt: tuple[int, ...] = (512,)  # tokens in a sequence before it decodes
    n_parallel: tuple[int, ...] = (32,)  # decoding sequences
    repetitions: int = 3

    def context_tokens(self) -> int:
        """Context needed per sequence, in tokens."""
        steps = STEPS * (self.repetitions + 1) * (len(self.chunks) + 1)
        return max(max(self.n_prompt) + steps, STEPS * max(self.chunks)) + 1


@dataclass(frozen=True)
class Row:
    """Steps with pl decoding rows after pp tokens, with a chunk of `chunk` tokens; times in milliseconds."""

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
    """Runs every test in `plan`; `note` is told what is being measured."""
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
    """Returns median seconds per step, keyed by chunk length (0 without a chunk)."""
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
            for chunk, step_seconds in seconds.items():
                batch.cache.truncate(other, 0)
                prompt = rng.integers(0, vocab, chunk).tolist()
                chunk_rows = [PromptChunk(other, prompt, is_last=False)] if prompt else []
                step = partial(batch.step, running, chunk_rows)
                ends, inputs = run_steps(batch, step, running, inputs, STEPS)
                if turn:
                    step_seconds += np.diff(ends).tolist()
        return {chunk: median(step_seconds) for chunk, step_seconds in seconds.items()}
    finally:
        for sequence in (*running, other):
            batch.end(sequence)
            batch.cache.truncate(sequence, 0)


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
