"""Measures an engine under load: requests arrive at random, like those from independent clients.

    arrivals   a Poisson process: the times between requests are exponential with mean 1 / rate
    lengths    prompt and answer lengths: log-normal around a median, clipped at a quarter and four times the median
    TTFT       from the time a request was due until its first token
    queue      the part of TTFT before the engine began the request
    TBT        time between tokens, over all answers; with `streams`, over the streams alone, which run all the time
    rows/step  total rows per step: decode tokens and prompt tokens
    busy       share of the time with a step under way
    roofline   bytes the steps had to read (weights once per step, plus keys and values) per step time, as a share
               of a streaming read measured in the same run

A run stops sending after `requests` requests or `seconds` seconds. After `seconds`, incomplete requests are cancelled
and counted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from llmcl.engine.stats import between_arrivals, percentile
from llmcl.errors import counted
from llmcl.tools.benchmark import measured_bandwidth
from llmcl.tools.rows import markdown_table
from llmcl.tools.throughput import draw_curves

if TYPE_CHECKING:
    from llmcl.engine.engine import Engine
    from llmcl.engine.engine_metrics import StepTotals
    from llmcl.engine.llm import LLM

SPREAD = 0.5  # standard deviation of the lengths' logarithm
LEAST, MOST = 0.25, 4.0  # clipping limits for a length, relative to the median
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Plan:
    """A benchmark plan: each combination of rate, lengths and engine size is a run."""

    rates: tuple[float, ...]  # requests per second
    n_prompt: tuple[int, ...] = (512,)  # median prompt length in tokens
    n_gen: tuple[int, ...] = (64,)  # median answer length in tokens
    n_parallel: tuple[int, ...] = (8,)  # most sequences per step
    requests: int = 64
    seconds: float = 60.0
    seed: int = 0
    streams: int = 0  # additional answers that run all the time, restarted at their end
    options: dict[str, Any] = field(default_factory=dict)  # options for `LLM.engine`

    def context_tokens(self) -> int:
        """Context needed per sequence, in tokens."""
        return int(MOST * (max(self.n_prompt) + max(self.n_gen))) + 1


@dataclass(frozen=True)
class Arrival:
    """A request: due due_s seconds after the run's start, with a prompt and an answer length."""

    due_s: float
    prompt: list[int]
    n_gen: int


@dataclass
class Answered:
    """The outcome of a request, with times in ms."""

    n_prompt: int
    first_token_ms: float | None = None  # TTFT; None without a token in time
    queue_ms: float | None = None
    tbt_ms: list[float] = field(default_factory=list)
    n_tokens: int = 0
    complete: bool = False


@dataclass(frozen=True)
class Row:
    """The results of one run. Times are by percentile; None without samples."""

    model: str
    device: str
    dtype: str
    kv_dtype: str
    rate: float
    pp: int  # median prompt length
    tg: int  # median answer length
    pl: int  # most sequences per step
    streams: int
    seed: int
    requests: int
    complete: int
    preempted: int
    seconds: float
    prompt_ts: float  # prompt tokens per second, first arrival to last token
    answer_ts: float  # answer tokens per second, first arrival to last token
    ttft_ms: dict[str, float | None]
    queue_ms: dict[str, float | None]
    tbt_ms: dict[str, float | None]
    tbt_ratio: float | None  # p99 over p50
    rows_per_step: float
    ms_per_step: float
    busy: float
    bandwidth_share: float | None


def draw(rate: float, n_prompt: int, n_gen: int, plan: Plan, vocab_size: int) -> Iterator[Arrival]:
    """Generates the requests for a run, deterministic per seed; the first is due at once."""
    rng = np.random.default_rng(plan.seed)
    due_s = 0.0
    for _ in range(plan.requests):
        lengths = (_length(median, rng) for median in (n_prompt, n_gen))
        yield Arrival(due_s, rng.integers(0, vocab_size, next(lengths)).tolist(), next(lengths))
        due_s += rng.exponential(1 / rate)
        if due_s >= plan.seconds:
            return


def _length(median: int, rng: np.random.Generator) -> int:
    return max(1, round(median * float(np.clip(rng.lognormal(0.0, SPREAD), LEAST, MOST))))


def run(llm: LLM, plan: Plan, note: Callable[[str], None] = lambda text: None) -> list[Row]:
    """Runs `plan`, each run with a new engine; `note` is told what is being measured."""
    note("measuring the device's read bandwidth")
    bandwidth = measured_bandwidth(llm, note)
    rows = []
    for pl in plan.n_parallel:
        for pp in plan.n_prompt:
            for tg in plan.n_gen:
                for rate in plan.rates:
                    note(f"{rate:g} requests a second of {pp} + {tg} tokens, {counted(pl, 'sequence')} a step")
                    rows.append(_run_once(llm, plan, rate, pp, tg, pl, bandwidth))
    return rows


def _run_once(llm: LLM, plan: Plan, rate: float, pp: int, tg: int, pl: int, bandwidth: float | None) -> Row:
    arrivals = list(draw(rate, pp, tg, plan, llm.config.vocab_size))
    # A new engine: its prefix cache holds none of the prompts.
    with llm.engine(max_sequences=pl, **plan.options) as engine:
        engine.generate([[1, 2, 3]], max_tokens=2, ignore_eos=True)  # a warm-up
        under_way = _Run(engine, plan, arrivals, llm.config.vocab_size)
        answers, streams, done, seconds = asyncio.run(under_way.measure())
        n_preempted = engine.n_preempted
    timed = streams or answers
    tbt = _percentiles(between_arrivals(ms for answer in timed for ms in answer.tbt_ms))
    read = done.steps * llm.weight_bytes_per_token + done.keys * llm.kv_bytes_per_position
    return Row(
        llm.model_name,
        llm.device.name,
        llm.dtype,
        llm.kv_dtype,
        rate,
        pp,
        tg,
        pl,
        plan.streams,
        plan.seed,
        requests=len(answers),
        complete=sum(answer.complete for answer in answers),
        preempted=n_preempted,
        seconds=seconds,
        prompt_ts=sum(answer.n_prompt for answer in answers if answer.n_tokens) / seconds,
        answer_ts=sum(answer.n_tokens for answer in (*answers, *streams)) / seconds,
        ttft_ms=_percentiles([answer.first_token_ms for answer in answers]),
        queue_ms=_percentiles([answer.queue_ms for answer in answers]),
        tbt_ms=tbt,
        tbt_ratio=tbt["p99"] / tbt["p50"] if tbt["p50"] and tbt["p99"] is not None else None,
        rows_per_step=done.rows / max(1, done.steps),
        ms_per_step=1000 * done.seconds / max(1, done.steps),
        busy=done.seconds / seconds,
        bandwidth_share=read / done.seconds / bandwidth if bandwidth and done.seconds else None,
    )


def _percentiles(times: Sequence[float | None]) -> dict[str, float | None]:
    ordered = sorted(time for time in times if time is not None)
    return {f"p{n}": percentile(ordered, n / 100) if ordered else None for n in PERCENTILES}


class _Run:
    """Sends each request when due, and records token arrival times."""

    def __init__(self, engine: Engine, plan: Plan, arrivals: Sequence[Arrival], vocab_size: int):
        self._engine = engine
        self._plan = plan
        self._arrivals = arrivals
        self._answers = [Answered(len(arrival.prompt)) for arrival in arrivals]
        self._streams = [Answered(0) for _ in range(plan.streams)]
        self._vocab_size = vocab_size
        self._start_s = 0.0

    async def measure(self) -> tuple[list[Answered], list[Answered], StepTotals, float]:
        """Returns outcomes for requests and streams, the step totals, and the duration in seconds."""
        streams = [asyncio.create_task(self._stream(i, stream)) for i, stream in enumerate(self._streams)]
        while not all(stream.n_tokens for stream in self._streams):  # streams run before the first request is sent
            await asyncio.sleep(0.01)
            for task in streams:
                if task.done():
                    task.result()  # raises the task's exception
        for stream in self._streams:
            stream.tbt_ms.clear()
            stream.n_tokens = 0
        self._start_s, before = time.perf_counter(), self._engine.totals
        with suppress(TimeoutError, asyncio.TimeoutError):
            await asyncio.wait_for(self._send_all(), self._plan.seconds)
        seconds, done = time.perf_counter() - self._start_s, self._engine.totals.since(before)
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        return self._answers, self._streams, done, seconds

    async def _send_all(self) -> None:
        sent = zip(self._arrivals, self._answers, strict=True)
        await asyncio.gather(*(self._answer(arrival, answer) for arrival, answer in sent))

    async def _answer(self, arrival: Arrival, answer: Answered) -> None:
        await asyncio.sleep(self._start_s + arrival.due_s - time.perf_counter())
        async for piece in self._engine.submit(arrival.prompt, max_tokens=arrival.n_gen, ignore_eos=True):
            answer.n_tokens += 1
            if piece.tbt_ms is not None:
                answer.tbt_ms.append(piece.tbt_ms)
            else:
                answer.first_token_ms = 1000 * (time.perf_counter() - self._start_s - arrival.due_s)
            if piece.stats is not None:
                answer.queue_ms, answer.complete = piece.stats.queue_ms, True

    async def _stream(self, number: int, stream: Answered) -> None:
        rng = np.random.default_rng((self._plan.seed, number))
        n_prompt, most = min(self._plan.n_prompt), self._engine.max_context
        while True:
            prompt = rng.integers(0, self._vocab_size, min(n_prompt, most // 2)).tolist()
            async for piece in self._engine.submit(prompt, max_tokens=most, ignore_eos=True):
                stream.n_tokens += 1
                if piece.tbt_ms is not None:
                    stream.tbt_ms.append(piece.tbt_ms)


def markdown(rows: Sequence[Row]) -> str:
    """Formats a table: the load, the work done, times by percentile."""
    names = "/".join(f"p{n}" for n in PERCENTILES)
    header = ["model", "device", "dtype", "requests/s", "PP", "TG", "PL", "streams", "complete", "preempted"]
    header += ["PP t/s", "TG t/s", f"TTFT {names} ms", f"queue {names} ms", f"TBT {names} ms", "p99/p50"]
    header += ["rows/step", "ms/step", "busy", "of roofline"]
    table = [
        [
            row.model,
            row.device,
            row.dtype,
            f"{row.rate:g}",
            *(str(n) for n in (row.pp, row.tg, row.pl, row.streams)),
            f"{row.complete} of {row.requests}",
            str(row.preempted),
            f"{row.prompt_ts:.1f}",
            f"{row.answer_ts:.1f}",
            *(_in_ms(times) for times in (row.ttft_ms, row.queue_ms, row.tbt_ms)),
            "" if row.tbt_ratio is None else f"{row.tbt_ratio:.2f}",
            f"{row.rows_per_step:.1f}",
            f"{row.ms_per_step:.2f}",
            f"{row.busy:.0%}",
            "" if row.bandwidth_share is None else f"{row.bandwidth_share:.1%}",
        ]
        for row in rows
    ]
    return markdown_table(header, table, left=3)


def _in_ms(times: dict[str, float | None]) -> str:
    return "/".join("-" if ms is None else f"{ms:.1f}" for ms in times.values())


def plot(rows: Sequence[Row], path: str) -> None:
    """Draws answer tokens per second over median and p99 time between tokens, a point per rate."""
    curves = {}
    for pp, tg, pl in dict.fromkeys((row.pp, row.tg, row.pl) for row in rows):
        curve_rows = sorted((row for row in rows if (row.pp, row.tg, row.pl) == (pp, tg, pl)), key=lambda row: row.rate)
        for name in ("p50", "p99"):
            points = [(row.tbt_ms[name], row.answer_ts, f"{row.rate:g}") for row in curve_rows]
            label = f"{pp} + {tg} tokens, {counted(pl, 'sequence')}, {name}"
            curves[label] = [(ms, rate, beside) for ms, rate, beside in points if ms is not None]
    first = rows[0]
    draw_curves(curves, f"{first.model} ({first.dtype}) on {first.device}, by requests a second", path)
