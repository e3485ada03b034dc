"""Tunes attention's tile constants: verifies each choice against the twin, times it, and stores the winner.

Prefill: the eight combinations A to H of BLOCK_M, BLOCK_N and DV_TILE, then one constant at a time from the best.
Decode: the number of splits and BLOCK_N, one at a time from the default.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from llmcl.errors import KernelBuildError, UsageError
from llmcl.kernels import table
from llmcl.kernels.common.attention import AttentionDecode, AttentionShape, TileRequest
from llmcl.kernels.common.dtype import QUANTIZED
from llmcl.ops.attention import decode_key, prefill_implementation, prefill_key, prefill_tiles
from llmcl.ops.attention_sizes import max_splits
from llmcl.runtime.device import Device, KernelMemory, Launch
from llmcl.tools.trials import ROUNDED_ACTIVATIONS, AttentionProblem, Trial, decode_trial, prefill_trial, tolerance

COMBINATIONS: dict[str, tuple[int, int, int]] = {  # BLOCK_M, BLOCK_N, DV_TILE
    "A": (32, 32, 32),
    "B": (32, 32, 64),
    "C": (32, 64, 32),
    "D": (32, 64, 64),
    "E": (64, 32, 32),
    "F": (64, 64, 64),
    "G": (32, 32, 128),  # the output is not cut; the baseline for comparison
    "H": (32, 16, 16),
}
BASELINE = "G"
DEFAULT = "default"  # the label for constants without tuning
COLD_BYTES = 128 << 20  # weights evict a layer's keys and values between uses, so timings must read them from memory


@dataclass(frozen=True)
class Measurement:
    """The measurement of one choice of constants."""

    kernel: str
    label: str
    constants: Mapping[str, int]
    ms: float | None = None  # fastest of several runs; None if not timed
    refused: str | None = None  # reason for not timing
    memory: KernelMemory | None = None
    error: float | None = None  # largest difference from the twin over the largest magnitude; None if not run


@dataclass(frozen=True)
class Tuning:
    """All measurements of one kernel."""

    kernel: str
    variant: str
    key: str  # the kernel's name in the device's cache
    rows: list[Measurement]
    winner: Measurement | None  # None if no choice was correct
    title: str = ""  # the measured problem, if the kernel's name doesn't tell

    @property
    def baseline_ms(self) -> float | None:
        """Returns the time of combination G in prefill, or of the default in decode."""
        label = BASELINE if self.kernel == "attention_prefill" else DEFAULT
        return next((row.ms for row in self.rows if row.label == label), None)


def combination(name: str) -> dict[str, int]:
    """Returns the constants of a combination A to H. Raises UsageError for an unknown name."""
    if name not in COMBINATIONS:
        raise UsageError(f"combination {name!r} is not known; expected one of {', '.join(COMBINATIONS)}")
    block_m, block_n, dv_tile = COMBINATIONS[name]
    return {"BLOCK_M": block_m, "BLOCK_N": block_n, "DV_TILE": dv_tile}


Note = Callable[[Measurement], None]


def tune_prefill(
    device: Device,
    shape: AttentionShape,
    n_tokens: int,
    *,
    variant: str | None = None,
    combinations: Iterable[str] = COMBINATIONS,
    search: bool = True,
    note: Note = lambda row: None,
) -> Tuning:
    """Times prefill of n_tokens after 37 cached tokens with each choice of tiles."""
    chosen = prefill_implementation(device, shape, variant)
    met = chosen.operand_dtype(device, shape)
    rounds = met != shape.kv_dtype or met in QUANTIZED
    allowed = ROUNDED_ACTIVATIONS if rounds else tolerance(chosen, shape.kv_dtype)
    heads = shape.n_q_heads, shape.n_kv_heads, shape.head_dim
    problem = AttentionProblem.random(*heads, shape.kv_dtype, n_tokens, position=37, exact=shape.exact_queries)
    trial = prefill_trial(device, problem)

    def measure(label: str, constants: Mapping[str, int]) -> Measurement:
        constants = {**constants, "DV_TILE": min(constants["DV_TILE"], shape.head_dim)}
        request = TileRequest.of(constants)
        # Without a requested variant, tiles missing in the device's own variant are timed in the portable variant.
        row = measure_choice(
            trial, "attention_prefill", label, constants, {"variant": variant, "request": request}, allowed
        )
        note(row)
        return row

    default = prefill_tiles(device, shape.head_dim, met, variant=chosen.name, tuned=False)
    start = {"BLOCK_M": default.block_m, "BLOCK_N": default.block_n, "DV_TILE": default.dv_tile}
    rows = [measure(name, combination(name)) for name in combinations]
    rows.append(measure(DEFAULT, start))
    if search:
        columns = [d for d in range(16, min(shape.head_dim, 256) + 1, 16) if shape.head_dim % d == 0]
        values = {"BLOCK_M": chosen.block_m_choices, "DV_TILE": columns, "BLOCK_N": (16, 32, 64)}
        search_each(rows, values, measure)
    repeat_fastest(rows, measure)
    trial.release()
    key = prefill_key(chosen.name, shape.head_dim, met)
    return Tuning("attention_prefill", chosen.name, key, rows, best_of(rows))


def tune_decode(
    device: Device, shape: AttentionShape, n_keys: int, *, variant: str | None = None, note: Note = lambda row: None
) -> Tuning:
    """Times one token's attention to n_keys keys with various splits and blocks."""
    chosen = table.pick(AttentionDecode, device, shape.kv_dtype, shape.head_dim, variant)
    allowed = ROUNDED_ACTIVATIONS if shape.kv_dtype in QUANTIZED else tolerance(chosen, shape.kv_dtype)
    problem = AttentionProblem.random(
        shape.n_q_heads, shape.n_kv_heads, shape.head_dim, shape.kv_dtype, 1, position=n_keys - 1
    )
    cache_bytes = 2 * shape.n_kv_heads * n_keys * shape.row_bytes
    trial = decode_trial(device, problem, copies=max(1, min(64, COLD_BYTES // cache_bytes)))

    def measure(label: str, constants: Mapping[str, int]) -> Measurement:
        options = {"n_splits": constants["N_SPLITS"], "block_n": constants.get("BLOCK_N")}
        row = measure_choice(trial, "attention_decode", label, constants, {"variant": chosen.name, **options}, allowed)
        note(row)
        return row

    splits = chosen.default_splits(device, shape.n_kv_heads)
    most = min(max_splits(device), -(-n_keys // 16))
    default = {"N_SPLITS": splits}
    values: dict[str, Sequence[int]] = {"N_SPLITS": _powers(most)}
    if chosen.block_n_choices:
        default["BLOCK_N"] = chosen.default_block_n(device)
        values["BLOCK_N"] = chosen.block_n_choices
    rows = [measure(DEFAULT, default)]
    search_each(rows, values, measure)
    repeat_fastest(rows, measure)
    trial.release()
    key = decode_key(chosen.name, shape.n_kv_heads, shape.head_dim, shape.kv_dtype)
    return Tuning("attention_decode", chosen.name, key, rows, best_of(rows))


def _powers(limit: int) -> Sequence[int]:
    return [1 << i for i in range(limit.bit_length()) if 1 << i <= limit]


def search_each(
    rows: list[Measurement],
    values: Mapping[str, Sequence[int]],
    measure: Callable[[str, Mapping[str, int]], Measurement],
) -> None:
    """Varies one constant at a time from the best choice so far. Times no choice twice."""
    tried = [dict(row.constants) for row in rows]
    for name, choices in values.items():
        best = best_of(rows)
        if best is None:
            return
        for value in choices:
            constants = {**best.constants, name: value}
            if constants not in tried:
                tried.append(constants)
                rows.append(measure(f"{name} {value}", constants))


def repeat_fastest(rows: list[Measurement], measure: Callable[[str, Mapping[str, int]], Measurement]) -> None:
    """Times the three fastest and the default again, so that a quiet moment on the machine decides no winner."""
    timed = sorted((row for row in rows if row.ms is not None), key=lambda row: row.ms or 0.0)
    for row in dict.fromkeys((*map(rows.index, timed[:3]), *(i for i, row in enumerate(rows) if row.label == DEFAULT))):
        first = rows[row]
        again = measure(first.label, first.constants)
        if first.ms is not None and again.ms is not None:
            # The mean of two minima: neither moment alone decides.
            rows[row] = replace(first, ms=(first.ms + again.ms) / 2)


def best_of(rows: Sequence[Measurement]) -> Measurement | None:
    timed = [row for row in rows if row.ms is not None]
    return min(timed, key=lambda row: row.ms or 0.0) if timed else None


def measure_choice(
    trial: Trial, kernel: str, label: str, constants: Mapping[str, int], options: Mapping[str, object], allowed: float
) -> Measurement:
    constants = dict(constants)
    try:
        launches = trial.bind(**options)
    except (UsageError, KernelBuildError) as error:
        return Measurement(kernel, label, constants, refused=str(error).splitlines()[0])
    error_found = trial.error(launches)
    ms, refused = None, None
    if error_found < allowed:
        ms = 1e3 * _seconds(trial, launches)
    else:
        refused = f"wrong: error {error_found:.1e} of the largest value"
    memory = next(launch for launch in launches if launch.name == kernel).memory()
    return Measurement(kernel, label, constants, ms, refused, memory, error_found)


def _seconds(trial: Trial, launches: Sequence[Launch]) -> float:
    """Returns the fastest of 5 runs of about 20 ms: other load on the machine only ever adds time."""

    def run(times: int) -> float:
        trial.device.finish()
        start = time.perf_counter()
        for _ in range(times):
            trial.run(launches)
        trial.device.finish()
        return (time.perf_counter() - start) / times / trial.copies

    times = max(1, min(200, int(0.02 / trial.copies / max(run(1), 1e-6))))
    return min(run(times) for _ in range(5))
