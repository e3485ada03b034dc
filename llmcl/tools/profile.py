"""Profiles a model's prefill and decode kernel by kernel, against the device's ceilings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from llmcl.engine.generation import token_ids
from llmcl.errors import UsageError
from llmcl.models.stack import why_separate
from llmcl.ops.sample import SamplingParams
from llmcl.runtime.profiler import LaunchRecord, ProfilingDevice, steps
from llmcl.runtime.roofline import arithmetic_peak, read_bandwidth

if TYPE_CHECKING:
    from llmcl.engine.llm import LLM

WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class KernelRow:
    """All launches of a kernel in a phase. Rates are 0 if the kernel declares no cost."""

    name: str
    calls: int
    total_ms: float
    mean_us: float
    share: float  # share of the phase's kernel time
    gb_per_s: float
    gflop_per_s: float
    of_ceiling: float  # larger share: read bandwidth or arithmetic peak
    ceiling: str  # the ceiling that `of_ceiling` refers to


@dataclass(frozen=True)
class PhaseProfile:
    """The profile of one phase."""

    phase: str
    n_tokens: int  # tokens processed in the phase
    launches: int
    span_ms: float  # first start to last end
    kernel_ms: float
    idle_ms: float  # from a kernel's end to the next start
    between_steps_ms: float  # idle time between steps, while the host reads a token and enqueues
    median_gap_us: float
    queued_to_start_us: float  # median
    rows: list[KernelRow]


@dataclass(frozen=True)
class Profile:
    """A profile with the device's ceilings, both measured in this run."""

    records: list[LaunchRecord]
    phases: list[PhaseProfile]
    bandwidth: float  # bytes per second
    arithmetic_peak: float  # float32 operations per second
    why_separate: str | None = None  # see `stack.why_separate`


def profile(llm: LLM, n_prompt: int, n_gen: int) -> Profile:
    """Prefills n_prompt random tokens and decodes n_gen greedily, like generation, after a short warm-up.

    llm: loaded on a ProfilingDevice. Raises UsageError if n_prompt < 1 or n_gen < 0, and if another thread generates
    with the model.
    """
    device = llm.device
    if not isinstance(device, ProfilingDevice):
        raise UsageError(f"{llm.model_name} was loaded on an ordinary device; load it on a ProfilingDevice")
    if n_prompt < 1 or n_gen < 0:
        raise UsageError(f"{n_prompt} prompt tokens and {n_gen} decode steps; expected at least 1 and 0")
    return llm.leases.call(lambda: _profile(llm, device, n_prompt, n_gen))


def _profile(llm: LLM, device: ProfilingDevice, n_prompt: int, n_gen: int) -> Profile:
    bandwidth, peak = read_bandwidth(device), arithmetic_peak(device)
    prompt = [int(i) for i in np.random.default_rng(0).integers(0, llm.config.vocab_size, n_prompt)]
    model = llm.model

    def run(n: int, phase: str, next_phase: str) -> None:
        def on_decode() -> None:
            device.phase = next_phase

        llm.clear()
        device.phase = phase
        for _ in token_ids(model, llm.sequence, prompt, SamplingParams(), n + 1, on_decode=on_decode):
            pass
        device.finish()
        device.phase = ""

    run(min(n_gen, WARM_UP_TOKENS), "", "")
    device.pending.clear()
    device.position = lambda: model.step_position
    run(n_gen, "prefill", "decode")
    records = device.records()
    phases = [
        summarize([r for r in records if r.phase == name], n_tokens, bandwidth, peak)
        for name, n_tokens in (("prefill", n_prompt), ("decode", n_gen))
        if n_tokens
    ]
    return Profile(records, phases, bandwidth, peak, why_separate(model.layers, model.decode_ops))


def summarize(records: Sequence[LaunchRecord], n_tokens: int, bandwidth: float, arithmetic_peak: float) -> PhaseProfile:
    """Sums a phase's launches by kernel, longest first."""
    kernel_ns = sum(r.duration for r in records)
    gaps = [max(0, after.start - before.end) for before, after in pairwise(records)]
    within = [max(0, after.start - before.end) for step in steps(records) for before, after in pairwise(step)]
    names = list(dict.fromkeys(r.name for r in records))
    rows = [_row([r for r in records if r.name == name], kernel_ns, bandwidth, arithmetic_peak) for name in names]
    return PhaseProfile(
        phase=records[0].phase,
        n_tokens=n_tokens,
        launches=len(records),
        span_ms=(records[-1].end - records[0].start) / 1e6,
        kernel_ms=kernel_ns / 1e6,
        idle_ms=sum(gaps) / 1e6,
        between_steps_ms=(sum(gaps) - sum(within)) / 1e6,
        median_gap_us=median(within) / 1e3 if within else 0.0,
        queued_to_start_us=median(r.start - r.queued for r in records) / 1e3,
        rows=sorted(rows, key=lambda row: -row.total_ms),
    )


def _row(launches: Sequence[LaunchRecord], phase_ns: int, bandwidth: float, arithmetic_peak: float) -> KernelRow:
    total_s = max(1, sum(r.duration for r in launches)) / 1e9
    bytes_per_s = sum(r.cost.nbytes for r in launches if r.cost) / total_s
    flops_per_s = sum(r.cost.flops for r in launches if r.cost) / total_s
    shares = {"bandwidth": bytes_per_s / bandwidth, "arithmetic": flops_per_s / arithmetic_peak}
    ceiling = max(shares, key=lambda name: shares[name])
    return KernelRow(
        name=launches[0].name,
        calls=len(launches),
        total_ms=total_s * 1e3,
        mean_us=total_s * 1e6 / len(launches),
        share=total_s * 1e9 / max(1, phase_ns),
        gb_per_s=bytes_per_s / 1e9,
        gflop_per_s=flops_per_s / 1e9,
        of_ceiling=shares[ceiling],
        ceiling=ceiling,
    )
