"""Statistics of a generation: time to first token, time between tokens, bytes moved, with the field's usual
definitions.

Let t_1 ... t_N be the times when token ids reach the host, on the host's clock, sampling included:

- TTFT, time to first token: t_1 minus the start of the request.
- queue time: until an engine begins with the request, a part of TTFT.
- TBT, time between tokens (also called inter-token latency): t_i - t_(i-1) for i >= 2. A stall is a TBT above
  twice the median. If several tokens reach the host together, TBT is the time from one arrival to the next.
- TPOT, time per output token: (t_N - t_1) / (N - 1), the mean TBT if each token arrives alone.
- decode rate: 1 / TPOT. (N tokens divided by N - 1 gaps would flatter.)
- prefill rate: prompt tokens computed, divided by the time from the start of their computation to t_1.

Tokens arrive together from a step with speculative decoding, and from a launch that computes several steps on a CPU
shared with other programs. The first token of an arrival gets the whole time as TBT, the others get 0.

A value that does not exist (TBT of a single token) is None, never NaN.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from llmcl.errors import counted

if TYPE_CHECKING:
    from llmcl.models.sequence import StepCount

Row = tuple[str, str | None, str]  # report row: label, value (None: left out), meaning
_PERCENTILES = {"p50": 0.50, "p90": 0.90, "p95": 0.95, "p99": 0.99}


def between_arrivals(tbt_ms: Iterable[float]) -> list[float]:
    """Returns the times without zeros. A token that arrived together with the previous token has time 0."""
    return [value for value in tbt_ms if value > 0]


def percentile(ordered: Sequence[float], fraction: float) -> float:
    """Returns the value below which `fraction` (0..1) of `ordered` (ascending, not empty) lies, interpolated."""
    position = fraction * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def summarize(times_ms: Iterable[float]) -> dict[str, float | None]:
    """Returns mean, std (of the population), min, p50, p90, p95, p99, max in ms, and the number of stalls.

    Without any time, stalls is 0 and everything else is None.
    """
    times = sorted(times_ms)
    if not times:
        return dict.fromkeys(("mean", "std", "min", *_PERCENTILES, "max"), None) | {"stalls": 0}
    mean = math.fsum(times) / len(times)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in times) / len(times))
    percentiles = {name: percentile(times, fraction) for name, fraction in _PERCENTILES.items()}
    stalls = sum(value > 2 * percentiles["p50"] for value in times)
    return {"mean": mean, "std": std, "min": times[0], **percentiles, "max": times[-1], "stalls": stalls}


@dataclass
class GenerationStats:
    """Statistics of one generation. Times in milliseconds, sizes in bytes; None if a value does not exist.

    The `_per_token` values count decode steps only, not the prefill.
    """

    prompt_tokens: int
    cached_tokens: int  # prompt tokens found in the KV cache
    generated_tokens: int
    load_ms: float | None
    compile_ms: float | None  # compile time since the device was opened, for kernels missing in the cache
    ttft_ms: float | None
    prefill_tokens_per_s: float | None
    tbt_ms: dict[str, float | None]  # time between two arrivals
    tpot_ms: float | None
    decode_tokens_per_s: float | None
    device_to_host_bytes_per_token: float | None
    host_to_device_bytes_per_token: float | None
    kernel_launches_per_token: float | None
    rows_per_step: float | None  # speculative decoding only: rows computed per step
    tokens_per_step: float | None  # speculative decoding only
    drafted_tokens: int | None  # speculative decoding only
    accepted_tokens: int | None  # speculative decoding only
    peak_device_bytes: int | None
    queue_ms: float | None
    arrivals: int  # how often tokens reached the host, one or several together
    stage_shares: list[float] | None  # several devices only: each one's share of the time after the first token

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as plain JSON values."""
        return asdict(self)

    def report(self, device: str | None = None, model: str | None = None, width: int | None = None) -> str:
        """Returns the report for people: each quantity with unit and meaning. Missing values are left out.

        width: columns. A meaning that does not fit is left out, too.
        """
        to_host = _with_unit(self.device_to_host_bytes_per_token, 1, "bytes to the host")
        to_device = _with_unit(self.host_to_device_bytes_per_token, 1, "to the device")
        rows: list[Row] = [
            ("model", model, ""),
            ("device", device, ""),
            ("load", _with_unit(self.load_ms, 0, "ms"), "until the model was ready on the device"),
            ("compile", _with_unit(self.compile_ms or None, 0, "ms"), "for kernels that were not in the cache"),
            ("prompt", f"{counted(self.prompt_tokens, 'token')}{self._cached()}", ""),
            ("prefill", _with_unit(self.prefill_tokens_per_s, 1, "tokens/s"), "reading the prompt"),
            ("TTFT", _with_unit(self.ttft_ms, 1, "ms"), "time to first token, from the request on"),
            ("queue", _with_unit(self.queue_ms, 1, "ms"), "of it until the engine began with the request"),
            ("answer", counted(self.generated_tokens, "token"), ""),
            ("decode", _with_unit(self.decode_tokens_per_s, 1, "tokens/s"), "writing the answer: 1 / TPOT"),
            ("TPOT", _with_unit(self.tpot_ms, 2, "ms"), "time per output token after the first"),
            *_tbt_rows(self.tbt_ms, self.generated_tokens, self.arrivals, drafted=self.tokens_per_step is not None),
            ("drafts", self._drafts(), "accepted ones included"),
            ("traffic", to_host and to_device and f"{to_host}, {to_device}", "per generated token"),
            ("launches", _with_unit(self.kernel_launches_per_token, 1, "kernels"), "per generated token"),
            ("stages", self._stages(), "of the time after the first token, by device"),
            ("memory", _with_unit(_mebi(self.peak_device_bytes), 1, "MiB"), "the most held on the device"),
        ]
        return _lines(rows, width)

    def _cached(self) -> str:
        return f", {self.cached_tokens} of them cached" if self.cached_tokens else ""

    def _stages(self) -> str | None:
        return " + ".join(f"{share:.0%}" for share in self.stage_shares or ()) or None

    def _drafts(self) -> str | None:
        if self.rows_per_step is None or self.tokens_per_step is None:
            return None
        accepted = f", {self.accepted_tokens} of {self.drafted_tokens} accepted"
        return f"{self.tokens_per_step:.2f} tokens a step of {self.rows_per_step:.2f} rows{accepted}"


def report_so_far(tbt_ms: Sequence[float], n_tokens: int, width: int | None = None) -> str:
    """Returns the available part of the report for an answer stopped after n_tokens."""
    rows: list[Row] = [("stopped", f"after {counted(n_tokens, 'token')}", "")]
    times = between_arrivals(tbt_ms)
    return _lines(rows + _tbt_rows(summarize(times), n_tokens, 1 + len(times)), width)


def _tbt_rows(tbt: dict[str, float | None], n_tokens: int, n_arrivals: int, *, drafted: bool = False) -> list[Row]:
    """Returns the rows on arrivals and TBT. drafted: steps differ in length, so no time counts as a stall."""
    together = n_arrivals < n_tokens
    what, each = (
        ("arrivals", f"{n_arrivals}, {n_tokens / max(1, n_arrivals):.2f} tokens each") if together else ("tokens", None)
    )
    rows: list[Row] = [
        ("arrivals", each, "tokens that reach the host together are one"),
        ("TBT", _in_ms(tbt, "mean", "std", "min", "max"), f"time between two {what}"),
        ("", _in_ms(tbt, *_PERCENTILES), "half are below p50, 90% below p90"),
        ("stalls", f"{tbt['stalls']} of {n_arrivals - 1}", f"times between {what} above 2 x p50"),
    ]
    return rows[:-1] if drafted or n_arrivals <= 1 else rows


def _lines(rows: list[Row], width: int | None) -> str:
    given = [(label, value, meaning) for label, value, meaning in rows if value]
    lines = [f"{label:<9} {value:<48} {meaning}".rstrip() for label, value, meaning in given]
    if width is not None and max(map(len, lines)) > width:
        narrow = [(f"{label:<9} {value:<16}", meaning) for label, value, meaning in given]
        fits = [meaning if len(line) + 1 + len(meaning) <= width else "" for line, meaning in narrow]
        lines = [f"{line} {meaning}".rstrip() for (line, _), meaning in zip(narrow, fits, strict=True)]
    return "\n".join(lines)


def _with_unit(value: float | None, digits: int, unit: str) -> str | None:
    return None if value is None else f"{value:.{digits}f} {unit}"


def _in_ms(tbt: dict[str, float | None], *names: str) -> str | None:
    return None if tbt["mean"] is None else "  ".join(f"{name} {tbt[name]:.2f}" for name in names) + " ms"


def _mebi(size_bytes: int | None) -> float | None:
    return None if size_bytes is None else size_bytes / 2**20


class Recorder:
    """Records the times of one generation and makes its GenerationStats.

    prompt_tokens: length of the whole prompt. prefilled_tokens: prompt tokens computed now, if the KV cache holds the
    rest; default all. start_ns: `time.perf_counter_ns()` at the start of the request; default now.
    """

    def __init__(self, prompt_tokens: int, *, prefilled_tokens: int | None = None, start_ns: int | None = None) -> None:
        self.prompt_tokens = prompt_tokens
        self.prefilled_tokens = prompt_tokens if prefilled_tokens is None else prefilled_tokens
        self._start_ns = time.perf_counter_ns() if start_ns is None else start_ns
        self._token_ns: list[int] = []
        self._arrival_ns: list[int] = []  # first token of each arrival
        self.begun_ns: int | None = None  # when an engine began with the request

    @property
    def n_tokens(self) -> int:
        return len(self._token_ns)

    def token(self, *, together: bool = False) -> float | None:
        """Records a token id that reached the host. Returns its TBT in milliseconds, or None for the first token.

        together: the token arrived with the previous token, so its TBT is 0.
        """
        now_ns = time.perf_counter_ns()
        self._token_ns.append(now_ns)
        if together and self._arrival_ns:
            return 0.0
        self._arrival_ns.append(now_ns)
        return (now_ns - self._arrival_ns[-2]) / 1e6 if len(self._arrival_ns) > 1 else None

    def finish(
        self,
        *,
        load_ms: float | None = None,
        compile_ms: float | None = None,
        decode_steps: int = 0,
        verified: StepCount | None = None,
        device_to_host_bytes: int | None = None,
        host_to_device_bytes: int | None = None,
        kernel_launches: int | None = None,
        peak_device_bytes: int | None = None,
        stage_seconds: Sequence[float] = (),
    ) -> GenerationStats:
        """Returns the statistics so far. Bytes and launches are totals over the steps after the prefill: `decode_steps`
        one-token steps plus steps that verified drafts. None: not known. stage_seconds: spent by each stage before the
        last in these steps.
        """
        times = self._token_ns
        tokens = decode_steps + (verified.tokens if verified else 0)
        steps = decode_steps + (verified.steps if verified else 0)
        tbt_ms = [(after - before) / 1e6 for before, after in pairwise(self._arrival_ns)]
        ttft_ns = times[0] - self._start_ns if times else None
        begun_ns = self._start_ns if self.begun_ns is None else self.begun_ns
        tpot_ms = (times[-1] - times[0]) / 1e6 / (len(times) - 1) if len(times) > 1 else None
        return GenerationStats(
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.prompt_tokens - self.prefilled_tokens,
            generated_tokens=len(times),
            load_ms=load_ms,
            compile_ms=compile_ms,
            ttft_ms=None if ttft_ns is None else ttft_ns / 1e6,
            prefill_tokens_per_s=_ratio(1e9 * self.prefilled_tokens, times[0] - begun_ns if times else None),
            tbt_ms=summarize(tbt_ms),
            tpot_ms=tpot_ms,
            decode_tokens_per_s=_ratio(1e3, tpot_ms),
            device_to_host_bytes_per_token=_ratio(device_to_host_bytes, tokens),
            host_to_device_bytes_per_token=_ratio(host_to_device_bytes, tokens),
            kernel_launches_per_token=_ratio(kernel_launches, tokens),
            rows_per_step=_ratio(decode_steps + verified.rows, steps) if verified else None,
            tokens_per_step=_ratio(tokens, steps) if verified else None,
            drafted_tokens=verified.rows - verified.steps if verified else None,
            accepted_tokens=verified.tokens - verified.steps if verified else None,
            peak_device_bytes=peak_device_bytes,
            queue_ms=None if self.begun_ns is None else (self.begun_ns - self._start_ns) / 1e6,
            arrivals=len(self._arrival_ns),
            stage_shares=_shares(stage_seconds, times[-1] - times[0] if times else 0),
        )


def _shares(seconds: Sequence[float], total_ns: int) -> list[float] | None:
    """Returns the share of each stage in the total; the last stage has the rest."""
    if not seconds or not total_ns:
        return None
    shares = [min(1.0, 1e9 * each / total_ns) for each in seconds]
    return [*shares, max(0.0, 1.0 - sum(shares))]


def _ratio(amount: float | None, divisor: float | None) -> float | None:
    return amount / divisor if divisor and amount is not None else None
