"""Measures several sequences at once, like llama-batched-bench: PL sequences, PP prompt and TG answer tokens each.

    t_pp, s_pp    seconds to read the PL prompts, without a shared prefix; prompt tokens per second
    t_tg, s_tg    seconds for TG decode steps with a row per sequence, greedy sampling and ids on the host included;
                  tokens per second over all sequences
    t, s          both together

A decode step must read the weights once, and every sequence's keys and values. The bandwidth share divides these bytes
per step time by a streaming read measured on the same device in the same run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from llmcl.errors import counted
from llmcl.models.batch import Batch, make_batch
from llmcl.models.sequence import SequenceState
from llmcl.ops.sample import SamplingParams
from llmcl.tools.benchmark import decode_bytes, measured_bandwidth
from llmcl.tools.rows import markdown_table

if TYPE_CHECKING:
    from llmcl.engine.llm import LLM

PAGE_TOKENS = 64
GREEDY = SamplingParams(seed=0)


@dataclass(frozen=True)
class ThroughputPlan:
    """The plan: every combination of prompt length, answer length and number of sequences; each reports the
    median run."""

    n_prompt: tuple[int, ...] = (512,)
    n_gen: tuple[int, ...] = (64,)
    n_parallel: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    repetitions: int = 3

    def context_tokens(self) -> int:
        """Context needed per sequence, in tokens."""
        return max(self.n_prompt) + max(self.n_gen) + 1


@dataclass(frozen=True)
class ThroughputRow:
    """One test; pp, tg, pl, n_kv, t_pp, s_pp, t_tg, s_tg, t and s as in llama-batched-bench."""

    model: str
    device: str
    dtype: str
    kv_dtype: str
    pp: int
    tg: int
    pl: int
    n_kv: int
    t_pp: float
    s_pp: float
    t_tg: float
    s_tg: float
    t: float
    s: float
    ms_per_step: float
    bandwidth_share: float | None


def run(llm: LLM, plan: ThroughputPlan, note: Callable[[str], None] = lambda text: None) -> list[ThroughputRow]:
    """Runs every test in `plan` with a separate batch; `note` is told what is being measured."""
    note("measuring the device's read bandwidth")
    bandwidth = measured_bandwidth(llm, note)
    most = max(plan.n_parallel)
    note(f"preparing {counted(most, 'sequence')} of {plan.context_tokens()} tokens")
    batch = make_batch(llm.model, most, plan.context_tokens(), PAGE_TOKENS)
    rows = []
    for pp in plan.n_prompt:
        for tg in plan.n_gen:
            for pl in plan.n_parallel:
                note(f"{counted(pl, 'sequence')} of {pp} + {tg} tokens")
                run_once(llm, batch, pp, min(tg, 4), pl)  # a warm-up
                runs = [run_once(llm, batch, pp, tg, pl) for _ in range(plan.repetitions)]
                t_pp, t_tg = (median(times) for times in zip(*runs, strict=True))
                nbytes = decode_bytes(llm.weight_bytes_per_token, pl * llm.kv_bytes_per_position, pp, tg)
                rows.append(
                    ThroughputRow(
                        llm.model_name,
                        llm.place,
                        llm.dtype,
                        llm.kv_dtype,
                        pp,
                        tg,
                        pl,
                        n_kv=pl * (pp + tg),
                        t_pp=t_pp,
                        s_pp=pl * pp / t_pp,
                        t_tg=t_tg,
                        s_tg=pl * tg / t_tg,
                        t=t_pp + t_tg,
                        s=pl * (pp + tg) / (t_pp + t_tg),
                        ms_per_step=1000 * t_tg / tg,
                        bandwidth_share=nbytes * tg / t_tg / bandwidth if bandwidth else None,
                    )
                )
    return rows


def run_once(llm: LLM, batch: Batch, pp: int, tg: int, pl: int) -> tuple[float, float]:
    """Returns seconds for the prompts, and for the decode steps."""
    prompts = np.random.default_rng(0).integers(0, llm.config.vocab_size, (pl, pp)).tolist()
    sequences = []

    def work() -> tuple[float, float]:
        start = time.perf_counter()
        for _ in prompts:
            sequences.append(batch.cache.sequence())
            batch.start(sequences[-1], GREEDY)
        first = batch.read(list(zip(sequences, prompts, strict=True)))()
        read = time.perf_counter()
        run_steps(batch, lambda: batch.decode(sequences), sequences, first, tg)
        return read - start, time.perf_counter() - read

    try:
        return llm.leases.call(work)
    finally:
        for sequence in sequences:
            batch.end(sequence)
            batch.cache.truncate(sequence, 0)


def run_steps(
    batch: Batch,
    step: Callable[[], Callable[[], list[int]]],
    sequences: Sequence[SequenceState],
    inputs: list[int],
    n: int,
) -> tuple[list[float], list[int]]:
    """Runs n steps; the device runs a step ahead of the host if it can. Returns the times at which ids arrived, and the
    last ids. step: begins a step and returns the function that waits for its ids. inputs: the ids of the step before.
    """
    waiting: Callable[[], list[int]] | None = None
    ends: list[float] = []
    for _ in range(n):
        ahead = step()
        if waiting is not None:
            inputs = waiting()
            ends.append(time.perf_counter())
        for sequence, token in zip(sequences, inputs, strict=True):
            sequence.token_ids.append(token)
        waiting = ahead
        if not batch.runs_ahead:
            ahead()
    if waiting is not None:
        inputs = waiting()
        ends.append(time.perf_counter())
    return ends, inputs


def markdown(rows: Sequence[ThroughputRow]) -> str:
    """llama-batched-bench's columns, then ms per step and the share of measured bandwidth."""
    header = ["model", "device", "dtype", "PP", "TG", "PL", "N_KV", "T_PP s", "S_PP t/s", "T_TG s", "S_TG t/s"]
    header += ["T s", "S t/s", "ms/step", "of bandwidth"]
    table = [
        [
            row.model,
            row.device,
            row.dtype,
            *(str(n) for n in (row.pp, row.tg, row.pl, row.n_kv)),
            *(f"{x:.3f}" if i % 2 == 0 else f"{x:.1f}" for i, x in enumerate(_times(row))),
            f"{row.ms_per_step:.3f}",
            "" if row.bandwidth_share is None else f"{row.bandwidth_share:.1%}",
        ]
        for row in rows
    ]
    return markdown_table(header, table, left=3)


def _times(row: ThroughputRow) -> tuple[float, ...]:
    return row.t_pp, row.s_pp, row.t_tg, row.s_tg, row.t, row.s


def plot(rows: Sequence[ThroughputRow], path: str) -> None:
    """Draws tokens per second over all sequences against step time, which is each stream's time between tokens."""
    curves = {}
    for pp, tg in dict.fromkeys((row.pp, row.tg) for row in rows):
        curve_rows = sorted((row for row in rows if (row.pp, row.tg) == (pp, tg)), key=lambda row: row.pl)
        curves[f"{pp} + {tg} tokens"] = [(row.ms_per_step, row.s_tg, str(row.pl)) for row in curve_rows]
    first = rows[0]
    draw_curves(curves, f"{first.model} ({first.dtype}) on {first.device}, by number of sequences", path)


def draw_curves(curves: Mapping[str, Sequence[tuple[float, float, str]]], title: str, path: str) -> None:
    """Draws throughput over the time between tokens. curves: by name, points (ms, tokens/s, label)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, points in curves.items():
        axes.plot([ms for ms, _, _ in points], [rate for _, rate, _ in points], marker="o", label=name)
        for ms, rate, beside in points:
            axes.annotate(beside, (ms, rate), textcoords="offset points", xytext=(4, 5), fontsize="small")
    axes.set(xlabel="time between tokens of a stream (ms)", ylabel="tokens/s of all streams", xlim=(0, None))
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="small")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
