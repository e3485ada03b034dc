"""Checks which kernel variants are right on a device, by running each against its NumPy twin in another process.

`checks()` lists the checks. The parent starts `python -m llmcl.tools.doctor DEVICE NUMBERS`, which runs the numbered
checks and prints a JSON line after each. A driver's compiler may crash or hang the child. The parent then notes the
current check and starts another process for the rest.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from llmcl import reference
from llmcl.errors import LlmclError
from llmcl.kernels import table
from llmcl.kernels.common.attention import AttentionDecode, AttentionPrefill, AttentionShape, RopeAppend
from llmcl.kernels.common.latent import LatentAttentionKernel
from llmcl.kernels.common.linear import LinearDecode, LinearFewRows, LinearPrefill
from llmcl.kernels.common.persistent import ListedStep, PersistentStep
from llmcl.kernels.common.step_state import RING, StepState
from llmcl.kernels.common.weight import Weight, WeightPart
from llmcl.kernels.implementation import Implementation, OpKernel
from llmcl.ops.attention import prefill_dtype, rope_append
from llmcl.ops.embed import embed
from llmcl.ops.rms_norm import rms_norm
from llmcl.ops.sample import Sampler, SamplingParams
from llmcl.runtime import child_process
from llmcl.runtime.device import Device
from llmcl.runtime.platforms import DeviceEntry
from llmcl.tools.latent_checks import latent_append_error, latent_attention_error
from llmcl.tools.recurrent_checks import delta_net_error, mamba_error, short_conv_error
from llmcl.tools.trials import (
    ROUNDED_ACTIVATIONS,
    AttentionProblem,
    Trial,
    cache_bytes,
    decode_trial,
    linear_trial,
    prefill_trial,
    quantized_trial,
    relative_error,
    state_at,
    stored,
    tolerance,
)

DTYPES = ("float32", "float16", "bfloat16")
QUANTIZED_DTYPES = ("q8_0", "q4_0", "q4_k")
ROUNDED_TO_BFLOAT16 = 2.0**-7
KV_DTYPES = (*DTYPES, "q8_0")
TIMEOUT_S = 120.0  # per check, compilation included
SIZE = 64  # columns in a product, dimensions of a head

PASS, WRONG, REFUSED, CRASHED, UNUSED = "pass", "wrong", "refused", "crashed", "not used"


@dataclass(frozen=True)
class Check:
    """An implementation with one storage type, and the function that checks it."""

    kernel: str
    variant: Implementation
    dtype: str
    run: Callable[[Device], float]  # returns largest error over largest expected magnitude
    rows: Sequence[Implementation]  # all implementations, preferred first

    @property
    def variant_name(self) -> str:
        return self.variant.name

    @property
    def runs_anywhere(self) -> bool:
        """Whether every compiler accepts the kernel; only NVIDIA's accepts inline PTX."""
        return self.variant.runs_anywhere

    @property
    def key(self) -> str:
        """Returns the check's name in a device's cache."""
        return self.variant.key(self.dtype)

    def supports_device(self, device: Device) -> bool:
        """Whether the device could ever choose this variant."""
        return self.variant.supports_device(device) and self.variant.supports(self.dtype, SIZE)

    def in_use(self, device: Device) -> bool:
        """Whether the device uses this variant for the storage type, excluding variants known to be wrong."""
        usable = [v for v in self.rows if v.supports_device(device) and v.supports(self.dtype, SIZE)]
        left = [v for v in usable if v.key(self.dtype) not in device.cache.excluded]
        return self.variant in (left or usable[-1:])[:1]


@dataclass(frozen=True)
class Outcome:
    """The result of a check."""

    check: Check
    status: str
    error: float | None  # None unless the check completed
    detail: str
    in_use: bool

    @property
    def failed(self) -> bool:
        return self.status not in (PASS, UNUSED)


# ---- the checks ---------------------------------------------------------------------------------------


def checks() -> list[Check]:
    """Returns a check for every kernel in the layer stack, with every variant and storage type."""
    few_rows, few = table.implementations(LinearFewRows), 64
    kinds: list[tuple[str, Sequence[Implementation], Callable[..., float], Sequence[str]]] = [
        ("linear_decode", table.implementations(LinearDecode), _linear_decode, DTYPES),
        ("linear_prefill", table.implementations(LinearPrefill), _linear_prefill, DTYPES),
        ("linear_decode", table.implementations(LinearDecode), partial(_quantized, n=1), QUANTIZED_DTYPES),
        ("linear_prefill", table.implementations(LinearPrefill), partial(_quantized, n=33), QUANTIZED_DTYPES),
        ("linear_few_rows", few_rows, partial(_linear_prefill, max_rows=few), DTYPES),
        ("linear_few_rows", few_rows, partial(_quantized, n=33, max_rows=few), QUANTIZED_DTYPES),
        ("attention_decode", table.implementations(AttentionDecode), _attention_decode, KV_DTYPES),
        ("attention_prefill", table.implementations(AttentionPrefill), _attention_prefill, KV_DTYPES),
        ("rope_append", table.implementations(RopeAppend), _rope_append, KV_DTYPES),
        ("latent_attention", table.implementations(LatentAttentionKernel), latent_attention_error, KV_DTYPES),
    ]
    all_checks = [
        Check(kernel, row, dtype, partial(run, variant=row.name, dtype=dtype), rows)
        for kernel, rows, run, dtypes in kinds
        for row in rows
        for dtype in dtypes
        if row.supports(dtype, SIZE)
    ]
    ops: list[tuple[str, str, Callable[[Device], float]]] = [
        *(("embed", dtype, partial(_embed, dtype=dtype)) for dtype in DTYPES),
        ("rms_norm", "float32", _rms_norm),
        ("sample", "float32", _sample),
        ("short_conv", "float32", short_conv_error),
        ("delta_rule", "float32", delta_net_error),
        ("mamba_inputs", "float32", mamba_error),
        ("latent_append", "float32", latent_append_error),
    ]
    for op, dtype, run_op in ops:
        rows = table.op_kernels(op)
        all_checks += [Check(op, row, dtype, partial(_with_kernel, rows, row, run_op), rows) for row in rows]
    steps = table.implementations(PersistentStep)
    all_checks += [_check_of_steps(row, steps) for row in steps]
    return all_checks


def _check_of_steps(row: PersistentStep, rows: Sequence[PersistentStep]) -> Check:
    if not row.few_rows:
        return Check("persistent_step", row, "float32", partial(_persistent_step, row=row), rows)
    return Check("persistent_step", row, "bfloat16", partial(_few_rows_chain, row=row), rows)


def _with_kernel(rows: Sequence[OpKernel], row: OpKernel, run: Callable[[Device], float], device: Device) -> float:
    """Runs a check of an op with one of its kernels, and leaves out the others for as long."""
    known = device.cache.excluded
    device.cache.excluded = known | {other.key(""): "another kernel is checked" for other in rows if other is not row}
    try:
        return run(device)
    finally:
        device.cache.excluded = known


def _worst(trials: Iterable[Trial], **choices: object) -> float:
    errors = []
    for trial in trials:
        errors.append(trial.error(trial.bind(**choices)))
        trial.release()
    return max(errors)


def _if_rounding_explains(rounded: float, allowed: float, error: Callable[[], float]) -> float:
    """Returns `error()`, measured with exact operands, or infinity if the error with rounded operands exceeds
    `allowed`."""
    return error() if rounded < allowed else float("inf")


def _linear_decode(device: Device, *, variant: str, dtype: str) -> float:
    cases = [("swiglu", True), ("add", False)]
    trials = (linear_trial(device, 160, SIZE * 5, dtype, 1, epilogue=epilogue, norm=norm) for epilogue, norm in cases)
    return _worst(trials, variant=variant)


def _linear_prefill(device: Device, *, dtype: str, **choices: object) -> float:
    """Allows rounded activations: a CPU may round them for bfloat16 weights."""

    def error(exact: bool) -> float:
        trials = (
            linear_trial(device, 160, SIZE * 5, dtype, 33, epilogue=epilogue, exact=exact)
            for epilogue in ("swiglu", "add")
        )
        return _worst(trials, **choices)

    return _if_rounding_explains(error(exact=False), ROUNDED_TO_BFLOAT16, lambda: error(exact=True))


def _quantized(device: Device, *, n: int, dtype: str, **choices: object) -> float:
    def error(exact: bool) -> float:
        return _worst([quantized_trial(device, 96, 512, dtype, n, exact=exact)], **choices)

    return _if_rounding_explains(error(exact=False), ROUNDED_ACTIVATIONS, lambda: error(exact=True))


def _attention_decode(device: Device, *, variant: str, dtype: str) -> float:
    def error(problem: AttentionProblem) -> float:
        return max(_worst([decode_trial(device, problem)], variant=variant, n_splits=n) for n in (1, 3))

    problem = AttentionProblem.random(6, 2, SIZE, dtype, 1, position=130)
    return _attention_error(problem, error, rounds=dtype in QUANTIZED_DTYPES)


def _persistent_step(device: Device, *, row: PersistentStep) -> float:
    problem = AttentionProblem.random(6, 2, SIZE, "float32", 1, position=130)
    trial = decode_trial(device, problem)
    listed = ListedStep(trial.bind(variant=row.name, n_splits=3), trial.step, len(problem.keys))
    persistent = row.bind(device, listed)
    error = trial.error(persistent.parts)
    trial.release()
    return error


def _few_rows_chain(device: Device, *, row: PersistentStep) -> float:
    """Chains a few-rows product with itself."""
    n, most = 9, 16

    def error(exact: bool) -> float:
        trial = linear_trial(device, 160, SIZE * 5, "bfloat16", n, epilogue="store", exact=exact)
        launches = trial.bind(variant=row.name, max_rows=most)
        listed = ListedStep([*launches, launches[-1]], trial.step, n, most)
        assert row.unsupported_reason(device, listed) is None
        largest_error = trial.error(row.bind(device, listed).parts)
        trial.release()
        return largest_error

    return _if_rounding_explains(error(exact=False), ROUNDED_TO_BFLOAT16, lambda: error(exact=True))


def _attention_prefill(device: Device, *, variant: str, dtype: str) -> float:
    problem = AttentionProblem.random(6, 2, SIZE, dtype, 70, position=37)
    return _attention_error(
        problem,
        lambda case: _worst([prefill_trial(device, case)], variant=variant),
        rounds=dtype in QUANTIZED_DTYPES or prefill_dtype(device, problem.shape, variant) != dtype,
    )


def _attention_error(problem: AttentionProblem, error: Callable[[AttentionProblem], float], *, rounds: bool) -> float:
    """Returns a problem's error. If the kernel rounds queries and rounding explains the error, returns the error with
    exact queries."""
    if not rounds:
        return error(problem)
    exact = replace(problem, shape=replace(problem.shape, exact_queries=True))
    return _if_rounding_explains(error(problem), ROUNDED_ACTIVATIONS, lambda: error(exact))


def _embed(device: Device, *, dtype: str) -> float:
    rng = np.random.default_rng(0)
    vocab, hidden, n, position = 67, 48, 5, 9
    values = rng.standard_normal((vocab, hidden)).astype(np.float32)
    tokens = rng.integers(0, vocab, n)
    table = device.upload(reference.to_tiles(stored(values, dtype)), "trial embedding")
    weight = Weight("trial embedding", vocab, hidden, (WeightPart(table, 0, -(-vocab // 16), dtype),))
    step = StepState(device, n)
    step.write_tokens(tokens, position)
    inv_freq = (10000.0 ** -(np.arange(16) / 16)).astype(np.float32)
    x, rope = device.alloc(4 * n * hidden, "trial rows"), device.alloc(4 * n * 32, "trial rotations")
    seen = device.upload(np.full(vocab, -1, np.int32), "trial positions")
    for launch in embed(
        device,
        weight,
        step,
        device.upload(np.stack([inv_freq, np.ones(16, np.float32)]), "trial frequencies"),
        x,
        rope,
        seen,
    ):
        launch.enqueue(n)
    rows = device.read(x, np.float32, (n, hidden))
    rotation = np.concatenate(reference.rope_table(position + np.arange(n), inv_freq), axis=1)
    return max(
        relative_error(rows, reference.embed(reference.round_to(values, dtype), tokens)),
        relative_error(device.read(rope, np.float32, (n, 32)), rotation),
    )


def _rope_append(device: Device, *, variant: str, dtype: str) -> float:
    rng = np.random.default_rng(0)
    shape, n, position = AttentionShape(4, 2, SIZE, 64, dtype), 19, 14
    qkv = reference.round_to(rng.standard_normal((n, 8, SIZE)), dtype)
    half = SIZE // 2
    rope = np.zeros((n, SIZE), np.float32)
    rope[:, half:] = 1.0  # a right angle, exact in every dtype
    n_bytes = 2 * 64 * shape.row_bytes
    k, v = device.zeros(n_bytes, "trial keys"), device.zeros(n_bytes, "trial values")
    step = state_at(device, position, n)
    queries = device.upload(qkv, "trial queries")
    rotation = device.upload(rope, "trial rotation")
    for launch in rope_append(device, shape, queries, rotation, step, k, v, variant=variant):
        launch.enqueue(n)
    rotated = reference.rope(qkv[:, :6], rope[:, :half], rope[:, half:])
    keys, values = np.zeros((2, 2, 64, SIZE), np.float32)
    keys[:, position : position + n] = rotated[:, 4:].swapaxes(0, 1)
    values[:, position : position + n] = qkv[:, 6:].swapaxes(0, 1)
    tiles, bits = cache_bytes(keys, values, dtype)
    cache_contents = device.read(k, tiles.dtype, tiles.shape), device.read(v, bits.dtype, bits.shape)
    if dtype in QUANTIZED_DTYPES:  # unwritten zeros have several encodings
        same = np.array_equal(reference.unpack_keys(cache_contents[0]), keys)
        same = same and np.array_equal(reference.unpack_values(cache_contents[1]), values)
    else:
        same = np.array_equal(cache_contents[0], tiles) and np.array_equal(cache_contents[1], bits)
    after = device.read(queries, np.float32, qkv.shape)
    return relative_error(after[:, :4], rotated[:, :4]) if same else float("inf")


def _rms_norm(device: Device) -> float:
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((7, 96)).astype(np.float32), rng.standard_normal(96).astype(np.float32)
    out = device.alloc(x.nbytes, "trial output")
    for launch in rms_norm(device, device.upload(x, "trial rows"), device.upload(weight, "trial norm"), out, 1e-5):
        launch.enqueue(7)
    return relative_error(device.read(out, np.float32, x.shape), reference.rms_norm(x, weight, 1e-5))


def _sample(device: Device) -> float:
    """Returns 0 if greedy sampling and sampling from the top 20 give the twin's tokens, else infinity."""
    rng = np.random.default_rng(0)
    vocab = 1031
    logits = rng.standard_normal(vocab).astype(np.float32) * 3
    buffer = device.upload(logits, "trial logits")
    for params in (SamplingParams(), SamplingParams(temperature=0.8, top_k=20, seed=7)):
        step = StepState(device, 1)
        sampler = Sampler(device, buffer, vocab, step)
        sampler.configure(params)
        threshold = reference.sample_threshold(logits, params.top_k) if params.truncates else np.float32(-np.inf)
        for i in range(4):
            device.write(step.state, np.array([5, 1, i], np.int32))
            for launch in sampler.launches:
                launch.enqueue()
            token = int(device.read(step.sampled, np.int32, (RING,))[i])
            if token != reference.sample(logits, params.temperature, threshold, params.seed or 0, i):
                return float("inf")
    return 0.0


# ---- running them -------------------------------------------------------------------------------------


def diagnose(
    entry: DeviceEntry,
    *,
    everything: bool = False,
    worker: Sequence[str] | None = None,
    timeout_s: float = TIMEOUT_S,
    note: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Runs every check for the device; `everything` adds variants the device would never choose.

    worker: the command that runs the checks; default: this module. Raises OSError if no process can be started.
    """
    device = Device(entry)
    outcomes: dict[int, Outcome] = {}

    def settle(i: int, status: str, error: float | None, detail: str) -> None:
        outcomes[i] = Outcome(listed[i], status, error, detail, listed[i].in_use(device))
        note(outcomes[i])

    listed = checks()
    wanted = []
    for i, check in enumerate(listed):
        if check.supports_device(device) or (everything and check.runs_anywhere):
            wanted.append(i)
        else:
            settle(i, UNUSED, None, f"{entry.name} never chooses this variant")
    while wanted:
        done = _run_some(entry, wanted, worker or child_process.command(__name__), timeout_s, settle)
        wanted = wanted[done:]
    return [outcomes[i] for i in range(len(listed))]


def _run_some(
    entry: DeviceEntry,
    wanted: Sequence[int],
    worker: Sequence[str],
    timeout_s: float,
    settle: Callable[[int, str, float | None, str], None],
) -> int:
    """Runs checks in one process until it ends. Returns how many are settled, at least one."""
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors,
        child_process.empty_folder() as place,
    ):
        process = subprocess.Popen(
            [*worker, str(entry.index), ",".join(map(str, wanted))],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            **place,
        )
        assert process.stdout is not None
        lines: queue.Queue[str] = queue.Queue()
        reader = threading.Thread(target=_forward, args=(process.stdout, lines), daemon=True)
        reader.start()
        for done, i in enumerate(wanted):
            try:
                line = lines.get(timeout=timeout_s)
            except queue.Empty:
                line = ""
            if line:
                result = json.loads(line)
                settle(i, result["status"], result["error"], result["detail"])
                continue
            hung = process.poll() is None and reader.is_alive()
            process.kill()
            code = process.wait()
            errors.seek(0)
            last = (errors.read().strip().splitlines() or [""])[-1]
            how = f"did not end within {timeout_s:.0f} s" if hung else f"ended the process (exit status {code})"
            settle(i, CRASHED, None, f"the driver {how}" + (f": {last}" if last else ""))
            process.stdout.close()
            return done + 1
        process.wait()
        process.stdout.close()
    return len(wanted)


def _forward(stream: Iterator[str], lines: queue.Queue[str]) -> None:
    """Forwards result lines, then an empty line. Skips other output, because drivers may print to standard output."""
    for line in stream:
        if line.startswith("{"):
            lines.put(line)
    lines.put("")


def work(index: int, wanted: Sequence[int]) -> None:
    """Runs the checks in the child process, and prints a JSON line for each."""
    device = Device.open(index)
    listed = checks()
    for i in wanted:
        try:
            error = listed[i].run(device)
            allowed = tolerance(listed[i].variant, listed[i].dtype)
            status = PASS if error < allowed else WRONG
            detail = "" if status == PASS else f"error {error:.1e} of the largest value, allowed {allowed:.0e}"
            result = {"status": status, "error": error if np.isfinite(error) else None, "detail": detail}
        except LlmclError as refusal:
            result = {"status": REFUSED, "error": None, "detail": str(refusal)}
        print(json.dumps(result), flush=True)


def excluded(outcomes: Sequence[Outcome]) -> dict[str, str]:
    """Returns the checks that failed, by cache name, with the reason; later runs exclude these kernels."""
    return {o.check.key: f"{o.status}: {o.detail.splitlines()[0] if o.detail else ''}" for o in outcomes if o.failed}


if __name__ == "__main__":
    work(int(sys.argv[1]), [int(i) for i in sys.argv[2].split(",")])
