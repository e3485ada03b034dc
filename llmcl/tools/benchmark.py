"""Measures prefill, decode and generation like llama-bench, and formats the results.

    pp512          512 random tokens prefilled into an empty context: no tokenisation, no sampling
    tg128          128 single-token decodes from an empty context: no sampling
    tg128 @ d4096  the same after 4096 tokens of context; their prefill is not timed
    gen256         256 tokens of real generation, sampling included, end-of-text ignored

Each test runs once as a warm-up and then `repetitions` times. `avg_ts` and `stddev_ts` are mean and standard deviation
(n - 1) of tokens per second. For gen they come from TPOT = (t_N - t_1) / (N - 1), which excludes prefill. A decode step
must read the weights, and keys and values for every attended position. The bandwidth share divides these bytes per step
time by a streaming read measured on the same device in the same run.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from llmcl.engine.stats import between_arrivals, summarize
from llmcl.errors import ContextLengthError, OutOfDeviceMemoryError, UsageError
from llmcl.models.stack import why_separate
from llmcl.tools.rows import markdown_table

if TYPE_CHECKING:
    from llmcl.engine.llm import LLM

PLOT_SUFFIXES = (".png", ".svg", ".pdf")
PROMPT = "Explain to a curious child why the sky is blue, then why sunsets are red."
PROMPT_ROOM_TOKENS = 128  # PROMPT in any chat template


@dataclass(frozen=True)
class BenchmarkPlan:
    """The lengths to measure: prompts, decodes at each depth, and real generation."""

    n_prompt: tuple[int, ...] = (512,)
    n_gen: tuple[int, ...] = (128,)
    depths: tuple[int, ...] = (0,)
    generate_tokens: int = 256
    temperature: float = 0.8
    repetitions: int = 5

    def context_tokens(self) -> int:
        """Context needed by the longest test, in tokens."""
        generation = PROMPT_ROOM_TOKENS + self.generate_tokens if self.generate_tokens else 0
        decodes = [depth + n for depth in self.depths for n in self.n_gen]
        return max([*self.n_prompt, *decodes, generation])


@dataclass(frozen=True)
class BenchmarkRow:
    """The result of one test, with llama-bench's JSON names where they exist."""

    model: str
    size: int  # weight bytes read per token
    n_params: int
    backend: str
    device: str
    dtype: str
    kv_dtype: str
    test: str
    n_prompt: int
    n_gen: int
    n_depth: int
    avg_ts: float
    stddev_ts: float
    samples_ts: tuple[float, ...]
    ms_per_token: float
    bytes_per_token: float | None = None
    gb_per_s: float | None = None
    device_gb_per_s: float | None = None
    bandwidth_share: float | None = None
    ttft_ms: float | None = None
    tbt_ms: dict[str, float | None] | None = None


@dataclass(frozen=True)
class Result:
    """All rows, and per generation the times between tokens in ms, for the plot."""

    rows: list[BenchmarkRow]
    generations_tbt_ms: list[list[float]]


def check_context(plan: BenchmarkPlan, max_context: int, origin: str) -> None:
    """Raises ContextLengthError if a test in `plan` does not fit into `max_context` tokens."""
    needed = plan.context_tokens()
    if needed > max_context:
        raise ContextLengthError(
            f"the longest test needs a context of {needed} tokens, but {origin} is {max_context}; "
            "use smaller -p, -n, -d or --generate, or a larger -c/--ctx-size"
        )


def run(llm: LLM, plan: BenchmarkPlan, note: Callable[[str], None] = lambda text: None) -> Result:
    """Runs every test in `plan`; `note` is told what is being measured."""
    check_context(plan, llm.max_context, f"the context of {llm.model_name}")
    note("measuring the device's read bandwidth")
    bandwidth = measured_bandwidth(llm, note)
    if (why := why_separate(llm.model.layers, llm.model.decode_ops)) is not None:
        note(f"decode is not one kernel: {why}")
    rows = []
    for n in plan.n_prompt:
        note(f"pp{n}")
        rows.append(_prefill_row(llm, plan, n))
    for depth in plan.depths:
        for n in plan.n_gen:
            note(_decode_test(n, depth))
            rows.append(_decode_row(llm, plan, n, depth, bandwidth))
    generations: list[list[float]] = []
    if plan.generate_tokens:
        note(f"gen{plan.generate_tokens}")
        row, generations = _generation_row(llm, plan, bandwidth)
        rows.append(row)
    return Result(rows, generations)


def measured_bandwidth(llm: LLM, note: Callable[[str], None]) -> float | None:
    """Returns a streaming read's bytes per second, or None if the model leaves no memory for the probe."""
    from llmcl.runtime import roofline

    try:
        return roofline.read_bandwidth(llm.device)
    except OutOfDeviceMemoryError as error:
        note(f"no read bandwidth, so no share of it: {error}")
        return None


def _decode_test(n: int, depth: int) -> str:
    return f"tg{n} @ d{depth}" if depth else f"tg{n}"


def _row(llm: LLM, test: str, samples_ts: Sequence[float], **figures: Any) -> BenchmarkRow:
    figures = {"n_prompt": 0, "n_gen": 0, "n_depth": 0} | figures
    return BenchmarkRow(
        model=llm.model_name,
        size=llm.weight_bytes_per_token,
        n_params=llm.config.n_parameters(),
        backend="OpenCL",
        device=llm.place,
        dtype=llm.dtype,
        kv_dtype=llm.kv_dtype,
        test=test,
        avg_ts=fmean(samples_ts),
        stddev_ts=stdev(samples_ts) if len(samples_ts) > 1 else 0.0,
        samples_ts=tuple(samples_ts),
        ms_per_token=1000 / fmean(samples_ts),
        **figures,
    )


def _prefill_row(llm: LLM, plan: BenchmarkPlan, n: int) -> BenchmarkRow:
    llm.bench_prefill(n)
    samples = [n / llm.bench_prefill(n) for _ in range(plan.repetitions)]
    return _row(llm, f"pp{n}", samples, n_prompt=n)


def _decode_row(llm: LLM, plan: BenchmarkPlan, n: int, depth: int, bandwidth: float | None) -> BenchmarkRow:
    llm.bench_decode(n, depth)
    runs_s = [llm.bench_decode(n, depth) for _ in range(plan.repetitions)]
    samples = [n / sum(steps) for steps in runs_s]
    return _row(
        llm,
        _decode_test(n, depth),
        samples,
        n_gen=n,
        n_depth=depth,
        tbt_ms=summarize([1000 * step for steps in runs_s for step in steps]),
        **_traffic(llm, fmean(samples), depth, n, bandwidth),
    )


def _generation_row(llm: LLM, plan: BenchmarkPlan, bandwidth: float | None) -> tuple[BenchmarkRow, list[list[float]]]:
    n = plan.generate_tokens

    def one_generation(seed: int) -> tuple[Any, list[float]]:
        options: dict[str, Any] = {"temperature": plan.temperature, "top_k": 40, "top_p": 0.95, "seed": seed}
        prompt: str | list[int] = PROMPT if llm.has_tokenizer else list(range(1, 33))
        pieces = list(llm.stream(prompt, max_tokens=n, ignore_eos=True, **options))
        return pieces[-1].stats, [piece.tbt_ms for piece in pieces if piece.tbt_ms is not None]

    one_generation(0)
    runs = [one_generation(seed) for seed in range(1, plan.repetitions + 1)]
    samples = [stats.decode_tokens_per_s for stats, _ in runs]
    n_prompt = runs[0][0].prompt_tokens
    row = _row(
        llm,
        f"gen{n}",
        samples,
        n_prompt=n_prompt,
        n_gen=n,
        ttft_ms=fmean(stats.ttft_ms for stats, _ in runs),
        tbt_ms=summarize(between_arrivals(ms for _, tbt in runs for ms in tbt)),
        **_traffic(llm, fmean(samples), n_prompt, n, bandwidth),
    )
    return row, [tbt for _, tbt in runs]


def _traffic(llm: LLM, tokens_per_s: float, depth: int, n: int, bandwidth: float | None) -> dict[str, float | None]:
    """Returns the read traffic of an average decode step (n steps after depth tokens), and its share of bandwidth."""
    bytes_per_token = decode_bytes(llm.weight_bytes_per_token, llm.kv_bytes_per_position, depth, n)
    rate = bytes_per_token * tokens_per_s
    return {
        "bytes_per_token": bytes_per_token,
        "gb_per_s": rate / 1e9,
        "device_gb_per_s": bandwidth / 1e9 if bandwidth else None,
        "bandwidth_share": rate / bandwidth if bandwidth else None,
    }


def decode_bytes(weight_bytes: int, kv_bytes_per_position: int, depth: int, n: int) -> float:
    """Returns bytes read by an average decode step: step i in 1..n attends to depth + i positions."""
    return weight_bytes + kv_bytes_per_position * (depth + (n + 1) / 2)


# ---- writing results ----------------------------------------------------------------------------------


def markdown(rows: Sequence[BenchmarkRow]) -> str:
    """llama-bench's columns, then ms per token, GB/s and the share of measured bandwidth; then TBT."""
    header = ["model", "size", "params", "backend", "device", "dtype", "test"]
    header += ["t/s", "ms/token", "GB/s", "of bandwidth"]
    table = [
        [
            row.model,
            _binary_size(row.size),
            _count(row.n_params),
            row.backend,
            row.device,
            row.dtype if row.dtype == row.kv_dtype else f"{row.dtype}, KV {row.kv_dtype}",
            row.test,
            f"{row.avg_ts:.2f} ± {row.stddev_ts:.2f}",
            f"{row.ms_per_token:.3f}",
            "" if row.gb_per_s is None else f"{row.gb_per_s:.2f}",
            "" if row.bandwidth_share is None else f"{row.bandwidth_share:.1%}",
        ]
        for row in rows
    ]
    text = markdown_table(header, table, left=7)
    timed = [row for row in rows if row.tbt_ms]
    if timed:
        names = list(timed[0].tbt_ms or {})
        tbt_table = [[row.test] + [_figure(name, row.tbt_ms or {}) for name in names] for row in timed]
        text += "\nTime between tokens in ms (stalls: above twice the median, counted)\n\n"
        text += markdown_table(["test", *names], tbt_table, left=1)
    device_rate = next((row.device_gb_per_s for row in rows if row.device_gb_per_s), None)
    if device_rate:
        text += f"\nStreaming read of the device: {device_rate:.1f} GB/s\n"
    return text


def _figure(name: str, tbt: dict[str, float | None]) -> str:
    return str(tbt[name]) if name == "stalls" else f"{tbt[name]:.3f}"


def _binary_size(n_bytes: float) -> str:
    return f"{n_bytes / 2**30:.2f} GiB" if n_bytes >= 2**30 else f"{n_bytes / 2**20:.2f} MiB"


def _count(n: float) -> str:
    return f"{n / 1e9:.2f} B" if n >= 1e9 else f"{n / 1e6:.2f} M"


# ---- the plot -----------------------------------------------------------------------------------------


def check_plot(path: str) -> None:
    """Raises UsageError if the plot can't be drawn, before any measurement."""
    if Path(path).suffix.lower() not in PLOT_SUFFIXES:
        raise UsageError(
            f"--plot {path}: unknown kind of picture; expected a name ending in {', '.join(PLOT_SUFFIXES)}"
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib, which is not installed: pip install 'llmcl[plot]'")


def plot_tbt(result: Result, path: str) -> None:
    """Draws the time between tokens over the position in the answer, and a histogram."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    row = result.rows[-1]
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    over_position, histogram = figure.subplots(1, 2, width_ratios=(2, 1))
    for number, tbt_ms in enumerate(result.generations_tbt_ms, start=1):
        over_position.plot(range(2, len(tbt_ms) + 2), tbt_ms, linewidth=0.8, label=f"run {number}")
    highest = max(max(tbt_ms) for tbt_ms in result.generations_tbt_ms)
    over_position.set(xlabel="token of the answer", ylabel="time between tokens (ms)", ylim=(0, 1.1 * highest))
    over_position.legend(fontsize="small")
    histogram.hist([ms for tbt_ms in result.generations_tbt_ms for ms in tbt_ms], bins=60)
    histogram.set(xlabel="time between tokens (ms)", ylabel="tokens")
    histogram.yaxis.get_major_locator().set_params(integer=True)
    figure.suptitle(f"{row.model} ({row.dtype}) on {row.device}: {row.test}, {row.avg_ts:.1f} tokens/s")
    figure.savefig(path, dpi=120)
