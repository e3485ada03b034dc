"""Products with quantised weights: largest difference over the largest expected magnitude.

Where activations are rounded to 8 bits, the twin has them rounded too: they are made so that no rounding is a close
call, and the weights of a norm are powers of two, which leave it so.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from helpers import poisoned, read_guarded, relative_error, run, step_state_at, with_poison
from stored_rows import load, quantized_weight, random_rows

from llmcl import reference
from llmcl.kernels.common.dtype import QUANTIZED
from llmcl.kernels.common.linear import LinearDecode, LinearPrefill
from llmcl.kernels.common.weight import Weight
from llmcl.kernels.cpu.dot_product import dot_form
from llmcl.kernels.cpu.linear import PACKED_GROUP_TOKENS, DotProductLayout
from llmcl.kernels.table import pick
from llmcl.ops.linear import input_layout, linear_decode, linear_prefill, linear_supports_output
from llmcl.runtime.device import Device

TOLERANCE = 6e-6  # float32 sums; portable kernels multiply nibbles with 256 on top
FLOAT16_TOLERANCE = 2.0**-10  # NVIDIA's prefill rounds both operands to float16
EPS = 1e-5

small = pytest.mark.oclgrind
ALL_TYPES = pytest.mark.parametrize(  # exact: as on a processor without dot products
    ("dtype", "exact"),
    [
        *((dtype, False) for dtype in QUANTIZED),
        *(pytest.param(dtype, True, marks=[pytest.mark.slow] * (dtype not in ("q4_0", "q6_k"))) for dtype in QUANTIZED),
    ],
)


def make_weight(
    device: Device, dtype: str, rows: int, k: int, *, alternating: bool = False, tiles_per_part: int = 0, exact: bool
) -> tuple[Weight, np.ndarray]:
    """The weight and its values [rows, k]; alternating: gate rows, then as many up rows."""
    weight = quantized_weight(device, rows, k, dtype, tiles_per_part)
    format = QUANTIZED[dtype].format
    if not alternating:
        source = random_rows(format, rows, k)
        load(device, weight, source)
        values = source.values()
    else:
        gate, up = random_rows(format, rows // 2, k, seed=1), random_rows(format, rows // 2, k, seed=2)
        load(device, weight, gate, tile_step=2)
        load(device, weight, up, tile_step=2, tile_offset=1)
        values = np.concatenate([gate.values(), up.values()])
    return Weight(weight.name, weight.rows, k, weight.parts, exact_activations=exact), values


def activations(n: int, k: int, *, gain: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """x float32 [n, k] and what its rounding to 8 bits makes of it."""
    rng = np.random.default_rng(n + k)
    q = rng.integers(-126, 127, (n, k // 32, 32)).astype(np.float64)
    q[:, :, 7] = 127 * rng.choice([-1, 1], (n, k // 32))
    q[:, 0] *= np.arange(n)[:, None] % 5 != 4  # some groups are all zero
    noise = rng.uniform(-0.3, 0.3, q.shape) * ((np.abs(q) < 127) & (q != 0))
    scale = gain * np.exp2(rng.integers(-9, -5, (n, k // 32, 1)))
    return ((q + noise) * scale).reshape(n, k).astype(np.float32), (q * scale).reshape(n, k)


def finish(expected: np.ndarray, before: np.ndarray, epilogue: str) -> np.ndarray:
    half = expected.shape[-1] // 2
    if epilogue == "add":
        return np.asarray(before + expected)
    return reference.swiglu(expected[..., :half], expected[..., half:]) if epilogue == "swiglu" else expected


def check_decode(
    device: Device,
    dtype: str,
    rows: int,
    k: int,
    *,
    epilogue: str = "store",
    norm: bool = False,
    exact: bool = False,
    tiles_per_part: int = 0,
) -> None:
    alternating = epilogue == "swiglu"
    weight, values = make_weight(
        device, dtype, rows, k, alternating=alternating, tiles_per_part=tiles_per_part, exact=exact
    )
    x, rounded = activations(3, k, gain=1 / np.sqrt(k))
    x[:-1] = np.nan  # only the last token of the step is read
    rng = np.random.default_rng(rows)
    norm_weight = np.repeat(np.exp2(rng.integers(-2, 3, k // 32)), 32) * rng.choice([-1.0, 1.0], k)
    out_rows = rows // 2 if alternating else rows
    before = rng.standard_normal(out_rows).astype(np.float32)
    out = with_poison(device, before) if epilogue == "add" else poisoned(device, (out_rows,))
    launches = linear_decode(
        device,
        weight,
        with_poison(device, x),
        out,
        step_state_at(device, position=5, n_tokens=3),
        norm=with_poison(device, norm_weight.astype(np.float32)) if norm else None,
        eps=EPS if norm else 0.0,
        epilogue=epilogue,
    )
    run(launches)
    chosen = pick(LinearDecode, device, dtype, k)
    is_rounded = chosen.rounds_to_16_bits or chosen.name == "portable-int8"
    is_rounded = is_rounded or (device.is_cpu and dot_form(device) != 0)
    used = (rounded if is_rounded and not exact else x.astype(np.float64))[-1:]
    if norm:
        used = used * norm_weight / np.sqrt(np.mean(x[-1].astype(np.float64) ** 2) + EPS)
    expected = finish(reference.linear(used, values)[0], before, epilogue)
    tolerance = 2 * TOLERANCE if "llvmpipe" in device.name and epilogue == "swiglu" else TOLERANCE  # 6.4e-6 there
    assert relative_error(read_guarded(device, out, np.float32, (out_rows,)), expected) < tolerance


def check_prefill(
    device: Device,
    dtype: str,
    n: int,
    rows: int,
    k: int,
    *,
    epilogue: str = "store",
    norm: bool = False,
    exact: bool = False,
    tiles_per_part: int = 4,
) -> None:
    alternating = epilogue == "swiglu"
    weight, values = make_weight(
        device, dtype, rows, k, alternating=alternating, tiles_per_part=tiles_per_part, exact=exact
    )
    x, rounded = activations(n, k, gain=1 / np.sqrt(k))
    out_rows = rows // 2 if alternating else rows
    before = np.random.default_rng(rows).standard_normal((n, out_rows)).astype(np.float32)
    out = with_poison(device, before) if epilogue == "add" else poisoned(device, (n, out_rows))
    step = step_state_at(device, position=3, n_tokens=n)
    norm_weight = np.exp2(np.random.default_rng(k).integers(-2, 3, k // 32)).repeat(32).astype(np.float32)
    norm_buffer = with_poison(device, norm_weight) if norm else None
    x_buffer = with_poison(device, x)
    eps = EPS if norm else 0.0
    run(linear_prefill(device, weight, x_buffer, out, step, norm=norm_buffer, eps=eps, epilogue=epilogue), n)
    layouts = [
        pick(LinearPrefill, device, part.dtype, k).activation_layout(device, part.dtype, k, exact)
        for part in weight.parts
    ]
    used = rounded if all(isinstance(layout, DotProductLayout) for layout in layouts) else x
    if norm:
        used = used * norm_weight / np.sqrt(np.mean(x.astype(np.float64) ** 2, axis=1, keepdims=True) + EPS)
    expected = finish(reference.linear(used, values), before, epilogue)
    allowed = FLOAT16_TOLERANCE if device.entry.fact("ptx_arch") >= 80 else TOLERANCE
    assert relative_error(read_guarded(device, out, np.float32, (n, out_rows)), expected) < allowed


@ALL_TYPES
@pytest.mark.parametrize("variant", ["cpu", "portable"])
def test_decode(target: Device, dtype: str, exact: bool) -> None:
    check_decode(target, dtype, 131, 768, exact=exact)


@pytest.mark.parametrize(
    ("dtype", "exact"),
    [
        ("q4_0", False),
        *(pytest.param(dtype, False, marks=pytest.mark.slow) for dtype in ("q5_1", "q4_k", "q6_k", "iq3_s", "mxfp4")),
        pytest.param("q4_0", True, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("variant", ["portable-int8"])
def test_decode_with_dot_products(target: Device, dtype: str, exact: bool) -> None:
    """With exact activations there are none: these are the portable kernels. A processor's compiler takes 3 s for one;
    how each type is unpacked is the same code in test_linear_few_rows.py.
    """
    check_decode(target, dtype, 131, 768, exact=exact)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["portable-int8"])
def test_what_dot_products_make_of_no_number(target: Device) -> None:
    for wrong in (np.nan, np.inf):
        x = np.ones((1, 768), np.float32)
        x[0, 100] = wrong
        weight, _ = make_weight(target, "q4_0", 131, 768, exact=False)
        out, step = poisoned(target, (131,)), step_state_at(target, position=5, n_tokens=1)
        run(linear_decode(target, weight, with_poison(target, x), out, step, eps=EPS))
        assert not np.isfinite(read_guarded(target, out, np.float32, (131,))).any()


@pytest.mark.parametrize("variant", ["portable-int8"])
def test_decode_where_columns_do_not_fit_into_local_memory(target: Device) -> None:
    target.entry = dataclasses.replace(target.entry, local_mem_bytes=8 << 10)
    weight, values = make_weight(target, "q8_0", 32, 8192, exact=False)
    x = np.random.default_rng(0).standard_normal((1, 8192)).astype(np.float32)
    out = poisoned(target, (32,))
    run(linear_decode(target, weight, with_poison(target, x), out, step_state_at(target, position=5, n_tokens=1)))
    expected = reference.linear(x, values)[0]  # not rounded
    assert relative_error(read_guarded(target, out, np.float32, (32,)), expected) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "epilogue", "rows"), [("q8_0", "add", 37), ("q4_k", "swiglu", 96)])
@pytest.mark.parametrize("variant", ["portable-int8"])
def test_decode_norm_and_epilogue_with_dot_products(target: Device, dtype: str, epilogue: str, rows: int) -> None:
    check_decode(target, dtype, rows, 512, epilogue=epilogue, norm=True)


@pytest.mark.parametrize("exact", [False, True], ids=["auto", "exact"])
@pytest.mark.parametrize("dtype", QUANTIZED)
@pytest.mark.parametrize("variant", ["nvidia"])
def test_decode_on_nvidia(target: Device, dtype: str, exact: bool) -> None:
    check_decode(target, dtype, 131, 768, exact=exact)
    check_decode(target, dtype, 16 * 700, 2816, exact=exact, epilogue="swiglu", norm=True)


# Tiles of less than a step, of steps that end in the middle, of several turns; many tiles for each team.
@pytest.mark.parametrize("k", [32, 96, 576, 1056, 4096, 14336])
@pytest.mark.parametrize("variant", ["nvidia"])
def test_decode_sizes_on_nvidia(target: Device, k: int) -> None:
    for rows, epilogue in ((17, "store"), (1024, "add"), (96 if k > 32 else 640_000, "swiglu")):
        check_decode(target, "q4_0", rows, k, epilogue=epilogue, norm=epilogue != "add")


@pytest.mark.parametrize(("dtype", "epilogue", "rows"), [("q8_0", "add", 37), ("q4_1", "swiglu", 96)])
def test_decode_norm_and_epilogue(target: Device, dtype: str, epilogue: str, rows: int) -> None:
    check_decode(target, dtype, rows, 512, epilogue=epilogue, norm=True)
    check_decode(target, dtype, rows, 512, epilogue=epilogue, norm=True, exact=True)


def test_decode_of_a_split_weight(target: Device) -> None:
    check_decode(target, "q6_k", 128, 256, epilogue="swiglu", tiles_per_part=2)


@small
def test_decode_of_few_columns(target: Device) -> None:
    check_decode(target, "q4_0", 21, 32, norm=True)


@ALL_TYPES
@pytest.mark.parametrize("variant", ["cpu", "portable"])
def test_prefill(target: Device, dtype: str, exact: bool) -> None:
    """Of a shape whose programs test_linear_few_rows_cpu.py has, too."""
    check_prefill(target, dtype, 13, 131, 768, exact=exact, tiles_per_part=0)


@pytest.mark.parametrize("dtype", QUANTIZED)
@pytest.mark.parametrize("variant", ["nvidia"])
def test_prefill_on_nvidia(target: Device, dtype: str) -> None:
    check_prefill(target, dtype, 133, 160, 768, epilogue="swiglu")


@pytest.mark.parametrize("n", [1, 11, 12, PACKED_GROUP_TOKENS, PACKED_GROUP_TOKENS + 1])
def test_prefill_lengths(target: Device, n: int) -> None:
    check_prefill(target, "q4_0", n, 37, 96)


@pytest.mark.parametrize(("dtype", "epilogue", "rows"), [("q4_1", "add", 37), ("q8_0", "swiglu", 160)])
def test_prefill_epilogue(target: Device, dtype: str, epilogue: str, rows: int) -> None:
    check_prefill(target, dtype, 29, rows, 256, epilogue=epilogue)


@pytest.mark.parametrize("dtype", ["q4_1", "q6_k"])
def test_prefill_norm(target: Device, dtype: str) -> None:
    if not target.is_cpu or not dot_form(target):
        pytest.skip("only the kernel that rounds rows to 8 bits normalises them")
    check_prefill(target, dtype, 25, 64, 512, norm=True)


@small
def test_prefill_of_few_columns(target: Device) -> None:
    check_prefill(target, "q8_0", 3, 21, 32)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["cpu"])
@pytest.mark.parametrize(
    ("dtypes", "epilogue", "tiles_per_part"),
    [(("q4_0", "q4_0"), "swiglu", 0), (("q4_k", "q6_k"), "geglu", 8), (("q6_k", "q4_1"), "swiglu", 4)],
)
def test_a_gate_leaves_rows_in_8_bits(
    target: Device, dtypes: tuple[str, str], epilogue: str, tiles_per_part: int
) -> None:
    """The next product has the bits that float32 rows give it."""
    k, inner = 256, 512
    first, gate_up = make_weight(
        target, dtypes[0], 2 * inner, k, alternating=True, tiles_per_part=tiles_per_part, exact=False
    )
    second, down = make_weight(target, dtypes[1], 64, inner, exact=False)
    layout = input_layout(target, second)
    if not dot_form(target):
        assert layout is None
        return
    assert layout is not None and linear_supports_output(target, first, layout)
    cut = quantized_weight(target, 2 * inner, k, dtypes[0], tiles_per_part=6)
    assert not linear_supports_output(target, cut, layout)  # 32 columns would lie in two parts
    gate = reference.swiglu if epilogue == "swiglu" else reference.geglu
    for n in (1, 12, 13, 107):
        x, rounded = activations(n, k)
        step = step_state_at(target, position=3, n_tokens=n)
        gated, rows, given = layout.packed(step, inner, "gated"), poisoned(target, (n, inner)), with_poison(target, x)
        outs = []
        for between in (gated, rows):
            run(linear_prefill(target, first, given, between, step, epilogue=epilogue), n)
            outs.append(poisoned(target, (n, 64)))
            run(linear_prefill(target, second, between, outs[-1], step), n)
        found = [read_guarded(target, out, np.float32, (n, 64)) for out in outs]
        np.testing.assert_array_equal(*found)
        products = reference.linear(rounded, gate_up)
        expected = reference.linear(gate(products[:, :inner], products[:, inner:]), down)
        assert relative_error(found[0], expected) < 2e-2  # of the rounding in between
