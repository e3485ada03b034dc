"""Products of a step of few tokens: largest difference over the largest expected magnitude.

Activations are made so that no layout rounds them, whether to 8 or to 16 bits, except behind a norm. So the tolerance
covers float32 sums, and on NVIDIA GPUs the float16 that quantised weights become there.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from helpers import (
    poisoned,
    read_guarded,
    read_packed,
    relative_error,
    run,
    step_state_at,
    weight_on_device,
    with_poison,
)
from parameters import each_value
from stored_rows import load, quantized_weight, random_rows

from llmcl import reference
from llmcl.kernels.common.dtype import QUANTIZED
from llmcl.kernels.common.linear import FEW_ROWS, GATES
from llmcl.kernels.common.weight import Weight
from llmcl.kernels.nvidia.linear import HopperLinearPrefill, NvidiaLinearPrefillQuantized, TensorCoreLayout
from llmcl.kernels.nvidia.linear_few_rows import NvidiaLinearFewRows
from llmcl.kernels.portable import linear
from llmcl.ops.linear import input_layout, linear_prefill, linear_supports_output, split_norm
from llmcl.runtime.device import Device

TOLERANCE = 3e-6
NORM_TOLERANCE = {"float32": 3e-6, "float16": 2.0**-10, "bfloat16": 2.0**-7}
FLOAT16_TOLERANCE = 2.0**-10
EPS = 1e-5

small = pytest.mark.oclgrind


def activations(n: int, k: int, seed: int = 0) -> np.ndarray:
    """float32 [n, k]: integers of 8 bits times a power of two in each group of 32, one of them the largest."""
    rng = np.random.default_rng(seed + n + k)
    q = rng.integers(-126, 127, (n, k // 32, 32)).astype(np.float32)
    q[:, :, 7] = 127
    return np.asarray(q * np.exp2(rng.integers(-9, -5, (n, k // 32, 1)) - 3), np.float32).reshape(n, k)


def class_of(n: int) -> int:
    return next(rows for rows in FEW_ROWS if n <= rows)


def make_weight(
    device: Device, dtype: str, rows: int, k: int, *, alternating: bool = False, tiles_per_part: int = 0
) -> tuple[Weight, np.ndarray]:
    """The weight and its values [rows, k]; alternating: gate rows, then as many up rows."""
    if dtype not in QUANTIZED:
        values = (np.random.default_rng(rows * k).standard_normal((rows, k)) / np.sqrt(k)).astype(np.float32)
        weight = weight_on_device(device, values, dtype, alternating=alternating, tiles_per_part=tiles_per_part)
        return weight, reference.round_to(values, dtype)
    weight = quantized_weight(device, rows, k, dtype, tiles_per_part)
    if not alternating:
        source = random_rows(QUANTIZED[dtype].format, rows, k)
        load(device, weight, source)
        return weight, source.values()
    halves = [random_rows(QUANTIZED[dtype].format, rows // 2, k, seed) for seed in (1, 2)]
    for offset, half in enumerate(halves):
        load(device, weight, half, tile_step=2, tile_offset=offset)
    return weight, np.concatenate([half.values() for half in halves])


def finish(expected: np.ndarray, before: np.ndarray, epilogue: str) -> np.ndarray:
    half = expected.shape[1] // 2
    if epilogue in GATES:
        return np.asarray(getattr(reference, epilogue)(expected[:, :half], expected[:, half:]))
    return before + expected if epilogue == "add" else expected


def check(
    device: Device,
    dtype: str,
    n: int,
    rows: int,
    k: int,
    *,
    epilogue: str = "store",
    tiles_per_part: int = 0,
    norm: bool = False,
    exact: bool = False,
    max_rows: int = 0,
) -> None:
    alternating = epilogue in GATES
    weight, values = make_weight(device, dtype, rows, k, alternating=alternating, tiles_per_part=tiles_per_part)
    weight = dataclasses.replace(weight, exact_activations=exact)
    x = activations(n, k)
    out_rows = rows // 2 if alternating else rows
    before = np.random.default_rng(n).standard_normal((n, out_rows)).astype(np.float32)
    out = with_poison(device, before) if epilogue == "add" else poisoned(device, (n, out_rows))
    step = step_state_at(device, position=3, n_tokens=n)
    norm_weight = np.random.default_rng(k).standard_normal(k).astype(np.float32)
    launches = linear_prefill(
        device,
        weight,
        with_poison(device, x),
        out,
        step,
        norm=device.upload(norm_weight, "norm") if norm else None,
        normed=poisoned(device, (n, k)),
        eps=EPS if norm else 0.0,
        epilogue=epilogue,
        max_rows=max_rows or class_of(n),
    )
    run(launches, n)
    used = reference.rms_norm(x, norm_weight, EPS) if norm else x
    expected = finish(reference.linear(used, values), before, epilogue)
    on_matrix_units = device.entry.fact("ptx_arch") >= 80 and dtype != "float32"
    allowed = TOLERANCE
    if on_matrix_units:  # they cut sums off where other units round, so that errors grow with the number of sums
        allowed *= max(1, k / 4096)
    if on_matrix_units and dtype in QUANTIZED:
        allowed = FLOAT16_TOLERANCE
    if norm and (on_matrix_units or device.is_cpu):  # rows are rounded: where quantised, to 8 bits
        allowed = NORM_TOLERANCE.get(dtype, 2.0**-6 if device.is_cpu and not exact else FLOAT16_TOLERANCE)
    assert relative_error(read_guarded(device, out, np.float32, (n, out_rows)), expected) < allowed


@pytest.mark.parametrize("n", [1, 2, pytest.param(7, marks=small), 8, 9, 16, 33, 64])
def test_linear_few_rows(target: Device, n: int) -> None:
    check(target, "bfloat16", n, 131, 96)


@each_value(("dtype", ["float32", "float16", "bfloat16", *QUANTIZED]), ("n", [5, 64]))
def test_dtypes(target: Device, dtype: str, n: int) -> None:
    check(target, dtype, n, 131, 768)


@each_value(
    ("epilogue,rows", [("add", 131), ("swiglu", 160), ("geglu", 96)]),
    ("dtype", ["float16", "bfloat16", "q4_0"]),
    ("n", [3, 16, 27, 64]),
)
def test_epilogue(target: Device, dtype: str, n: int, epilogue: str, rows: int) -> None:
    check(target, dtype, n, rows, 576, epilogue=epilogue)


@small
@pytest.mark.parametrize(("dtype", "epilogue", "rows"), [("q4_0", "add", 37), ("bfloat16", "swiglu", 64)])
def test_few_columns(target: Device, dtype: str, epilogue: str, rows: int) -> None:
    check(target, dtype, 3, rows, 32, epilogue=epilogue)


@pytest.mark.parametrize("dtype", ["bfloat16", "q4_0", "q6_k"])
def test_norm(target: Device, dtype: str) -> None:
    check(target, dtype, 11, 131, 768, norm=True)


@pytest.mark.parametrize("variant", ["cpu"])
@pytest.mark.parametrize("dtype", ["bfloat16", "q4_0", "q6_k"])
def test_any_number_of_rows_is_left_over(target: Device, dtype: str) -> None:
    """Behind blocks of 8 rows 1 to 7 are computed 2, 4, 6 or 8 at once: each row has the bits of a block."""
    weight, values = make_weight(target, dtype, 128, 768, alternating=True, tiles_per_part=4)
    x, most = activations(24, 768), FEW_ROWS[-1]
    expected = finish(reference.linear(x, values), x, "swiglu")
    found = np.zeros(expected.shape, np.float32)
    for n in reversed(range(1, 25)):
        out = poisoned(target, (n, 64))
        step = step_state_at(target, position=3, n_tokens=n)
        options = {"epilogue": "swiglu", "max_rows": most}
        run(linear_prefill(target, weight, with_poison(target, x[:n]), out, step, **options), n)
        rows = read_guarded(target, out, np.float32, (n, 64))
        found = found if n < 24 else rows
        np.testing.assert_array_equal(rows, found[:n])
    assert relative_error(found, expected) < TOLERANCE


@pytest.mark.parametrize("dtype", ["bfloat16", "q8_0"])
def test_exact_activations(target: Device, dtype: str) -> None:
    check(target, dtype, 27, 80, 768, exact=True)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", QUANTIZED)
@pytest.mark.parametrize("variant", ["portable-int8"])
def test_with_dot_products(device: Device, target: Device, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler of a processor takes seconds for the sums of 8 rows: there most types have those of 2."""
    if device.entry.kind == "cpu" and dtype not in ("q4_0", "q6_k"):
        monkeypatch.setattr(linear, "FEW_ROW_SUMS", 2)
    check(target, dtype, 11, 131, 768)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["portable-int8"])
def test_epilogue_with_dot_products(target: Device) -> None:
    check(target, "q4_0", 3, 128, 768, epilogue="swiglu", tiles_per_part=4)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["portable-int8"])
def test_epilogue_of_float32_activations_with_dot_products(target: Device) -> None:
    check(target, "q6_k", 3, 131, 512, epilogue="add", exact=True)


@pytest.mark.parametrize(("dtype", "epilogue", "rows"), [("bfloat16", "store", 131), ("q4_1", "swiglu", 128)])
def test_split_weight(target: Device, dtype: str, epilogue: str, rows: int) -> None:
    check(target, dtype, 13, rows, 64, epilogue=epilogue, tiles_per_part=4)


@pytest.mark.parametrize("variant", ["nvidia", "hopper"])
@pytest.mark.parametrize("max_rows", FEW_ROWS)
@pytest.mark.parametrize("dtype", ["bfloat16", "q4_0", "q5_k", "q6_k"])
def test_sizes_on_nvidia(target: Device, dtype: str, max_rows: int) -> None:
    """Many tiles and few, a number of tiles that fills no work-group, columns that end within a stage."""
    for rows, k, epilogue in ((300, 8192, "add"), (9600, 256, "swiglu"), (2000, 1024, "store"), (48, 14336, "store")):
        check(target, dtype, max_rows - 3, rows, k, epilogue=epilogue, max_rows=max_rows)


@pytest.mark.parametrize("variant", ["nvidia", "hopper"])
@pytest.mark.parametrize("dtype", ["bfloat16", "q4_0"])
def test_a_token_gets_the_same_bits_in_any_step(target: Device, dtype: str) -> None:
    for rows, k in ((300, 8448), (9600, 544 if dtype == "bfloat16" else 512), (2000, 1024)):
        weight, _ = make_weight(target, dtype, rows, k)
        x = activations(64, k)
        found = []
        for n, max_rows in ((1, 8), (3, 8), (3, 16), (9, 16), (20, 32), (20, 64), (64, 64)):
            out = poisoned(target, (n, rows))
            step = step_state_at(target, position=0, n_tokens=n)
            run(linear_prefill(target, weight, with_poison(target, x[:n]), out, step, max_rows=max_rows), n)
            found.append(read_guarded(target, out, np.float32, (n, rows))[0])
        assert all(np.array_equal(row, found[0]) for row in found)


@pytest.mark.parametrize("variant", ["hopper"])
@pytest.mark.parametrize(("first_dtype", "dtype"), [("bfloat16", "bfloat16"), ("q4_0", "q8_0"), ("bfloat16", "q4_0")])
@pytest.mark.parametrize("n", [1, 7, 16, 33, 64])
def test_a_product_takes_and_leaves_packed_rows(target: Device, first_dtype: str, dtype: str, n: int) -> None:
    """Two products in a row, the first with a gate, whose weights lie in several buffers."""
    k, inner, max_rows = 64, 352, class_of(n)
    first, gate_up = make_weight(target, first_dtype, 2 * inner, k, alternating=True, tiles_per_part=6)
    second, down = make_weight(target, dtype, 80, inner)
    layout = input_layout(target, second, max_rows)
    assert layout is not None and linear_supports_output(target, first, layout, max_rows)
    x = activations(n, k)
    step = step_state_at(target, position=0, n_tokens=n)
    gated = layout.packed(step, inner, "gated")
    out = poisoned(target, (n, 80))
    run(linear_prefill(target, first, with_poison(target, x), gated, step, epilogue="swiglu", max_rows=max_rows), n)
    run(linear_prefill(target, second, gated, out, step, max_rows=max_rows), n)
    packed = read_packed(target, gated, n)
    rounding = 2.0**-7 if dtype == "bfloat16" else 2.0**-10
    assert relative_error(packed, finish(reference.linear(x, gate_up), x, "swiglu")) < rounding
    expected = reference.linear(packed, down)
    assert relative_error(read_guarded(target, out, np.float32, (n, 80)), expected) < (
        TOLERANCE if dtype == "bfloat16" else FLOAT16_TOLERANCE
    )


@pytest.mark.parametrize("variant", ["nvidia", "hopper"])
@pytest.mark.parametrize(("hidden", "inner"), [(64, 32), (2080, 160), (288, 8192), (288, 8448)])
def test_a_norm_between_two_products(target: Device, hidden: int, inner: int) -> None:
    """The first product begins it and the second ends it; both in the same bits in any step."""
    rng = np.random.default_rng(hidden)
    down, down_values = make_weight(target, "bfloat16", hidden, inner)
    gate_up, gate_up_values = make_weight(target, "bfloat16", 320, hidden, alternating=True)
    norm_values = (1.0 + 0.2 * rng.standard_normal(hidden)).astype(np.float32)
    norm = target.upload(norm_values, "norm")
    x, before = activations(64, inner), rng.standard_normal((64, hidden)).astype(np.float32)
    found = []
    for n, max_rows in ((3, 8), (5, 16), (30, 32), (64, 64)):
        step = step_state_at(target, position=0, n_tokens=n)
        split = split_norm(target, down, norm, gate_up, step, eps=EPS, max_rows=max_rows)
        assert split is not None
        residual, out = with_poison(target, before[:n]), poisoned(target, (n, 160))
        rows = with_poison(target, x[:n])
        run(linear_prefill(target, down, rows, residual, step, epilogue="add", max_rows=max_rows, begins=split), n)
        args = target, gate_up, residual, out, step
        run(linear_prefill(*args, norm=norm, eps=EPS, epilogue="swiglu", max_rows=max_rows, ends=split), n)
        expected = before[:n] + reference.linear(x[:n], down_values)
        assert relative_error(read_guarded(target, residual, np.float32, (n, hidden)), expected) < TOLERANCE
        expected = finish(reference.linear(reference.rms_norm(expected, norm_values, EPS), gate_up_values), x, "swiglu")
        found.append(read_guarded(target, out, np.float32, (n, 160)))
        assert relative_error(found[-1], expected) < NORM_TOLERANCE["bfloat16"]
    assert all(np.array_equal(rows[:3], found[0]) for rows in found)


def test_which_products_leave_packed_rows() -> None:
    """Prefill's rounds as its weights are, which the next weights may not want; for few rows any does."""
    sixteen, dtypes = ("float16", "bfloat16"), ("float16", "bfloat16", "q4_0")
    for row, expected in (
        (HopperLinearPrefill(), {(dtype, dtype) for dtype in sixteen}),
        (NvidiaLinearPrefillQuantized(), {("q4_0", "float16")}),
        (NvidiaLinearFewRows(), {(dtype, left) for dtype in dtypes for left in sixteen}),
    ):
        found = {(dtype, left) for dtype in dtypes for left in sixteen if row.supports(dtype, 64)}
        layouts = {left: TensorCoreLayout(left, blocks=True) for left in sixteen}
        assert {pair for pair in found if row.supports_output(layouts[pair[1]], pair[0])} == expected


def test_which_norms_are_split(device: Device) -> None:
    """Only those of rows in bfloat16: float16 could not hold what is not scaled yet."""
    weights = {dtype: make_weight(device, dtype, 64, 64)[0] for dtype in ("float32", "float16", "bfloat16", "q8_0")}
    norm, step = device.upload(np.ones(64, np.float32), "norm"), step_state_at(device, position=0, n_tokens=8)
    split = {
        dtype
        for dtype, weight in weights.items()
        if split_norm(device, weights["bfloat16"], norm, weight, step, eps=EPS, max_rows=8)
    }
    assert split == ({"bfloat16"} if device.entry.fact("ptx_arch") >= 80 else set())
    assert split_norm(device, weights["bfloat16"], norm, weights["bfloat16"], step, eps=EPS, max_rows=0) is None


@pytest.mark.parametrize("variant", ["hopper"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("n", "k"), [(1, 64), (7, 160), (8, 2048), (33, 2080), (64, 4096)])
def test_norm_of_each_token(target: Device, dtype: str, n: int, k: int) -> None:
    """rms_norm_token.cl, which leaves rows in blocks."""
    layout = input_layout(target, make_weight(target, dtype, 16, k)[0], 8)
    assert layout is not None
    rng = np.random.default_rng(n)
    x, norm = rng.standard_normal((n, k)).astype(np.float32), rng.standard_normal(k).astype(np.float32)
    step = step_state_at(target, position=0, n_tokens=n)
    rows = layout.packed(step, k)
    run([layout.pack(target, with_poison(target, x), rows, step, target.upload(norm, "norm"), EPS)], n)
    assert relative_error(read_packed(target, rows, n), reference.rms_norm(x, norm, EPS)) < NORM_TOLERANCE[dtype]
