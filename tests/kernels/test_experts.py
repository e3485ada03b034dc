"""experts_gate_up and experts_down: largest difference over the largest expected magnitude.

The twin computes with the weights as stored, so the tolerance, which covers float32 sums, is that of every dtype.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers import (
    DTYPES,
    poisoned,
    read_guarded,
    relative_error,
    run,
    step_state_at,
    weight_on_device,
    with_poison,
)
from parameters import slow_except
from stored_rows import load, quantized_weight, random_rows

from llmcl import reference
from llmcl.kernels import table
from llmcl.kernels.common.dtype import QUANTIZED
from llmcl.kernels.common.experts import BLOCK_ROWS, ExpertsFewRows, ExpertsPrefill, block_count
from llmcl.kernels.common.linear import FEW_ROWS
from llmcl.kernels.common.step_state import StepState
from llmcl.kernels.common.weight import Weight
from llmcl.kernels.cpu.dot_product import dot_form
from llmcl.ops.experts import (
    block_rows,
    experts_down,
    experts_gate_up,
    experts_prefill,
    experts_sum,
    gated_rows,
    group_by_expert,
    slot_outputs,
)
from llmcl.runtime.device import Buffer, Device

TOLERANCE = 1e-5  # float32 sums, with nibbles on top of 256 in portable kernels, and products of a gate and an up
EPS = 1e-5
N_EXPERTS = 6
IN_PARTS = 2  # experts in each of as many buffers, which share their programs

small = pytest.mark.oclgrind


def prefill_tolerance(device: Device, dtype: str, k: int, max_rows: int = 0) -> float:
    """Of what multiplies operands of 16 bits more, and most where few of a row's weights are large.

    Quantised weights are multiplied as float16, mxfp4 as bfloat16.
    """
    kind = ExpertsFewRows if max_rows else ExpertsPrefill
    if not table.pick(kind, device, dtype, k).rounds_to_16_bits:
        return TOLERANCE
    return {"float16": 2.0**-10, "bfloat16": 2.0**-7, "mxfp4": 2.0**-6}.get(dtype, 2.0**-9)


def ids_of(n: int, top_k: int) -> np.ndarray:
    """Different experts for each token, the last one among them."""
    rng = np.random.default_rng(n)
    ids = np.stack([rng.permutation(N_EXPERTS)[:top_k] for _ in range(n)])
    ids[0, 0] = N_EXPERTS - 1 if N_EXPERTS - 1 not in ids[0] else ids[0, 0]
    return ids.astype(np.int32)


def experts_on_device(
    device: Device,
    dtype: str,
    rows: int,
    k: int,
    top_k: int,
    *,
    gate_up: bool,
    experts_per_part: int = N_EXPERTS,
    exact: bool = True,
) -> tuple[Weight, np.ndarray]:
    """N_EXPERTS matrices [rows, k] below each other, and their values; gate_up: those of gate, then as many of up."""
    tiles = experts_per_part * rows // 16
    shape = N_EXPERTS * rows, k
    if dtype not in QUANTIZED:
        values = (np.random.default_rng(rows * k).standard_normal(shape) / np.sqrt(k)).astype(np.float32)
        weight = weight_on_device(device, values, dtype, alternating=gate_up, tiles_per_part=tiles)
        values = np.asarray(reference.round_to(values, dtype))
    else:
        weight = quantized_weight(device, *shape, dtype, tiles)
        halves = 2 if gate_up else 1
        sources = [random_rows(QUANTIZED[dtype].format, shape[0] // halves, k, seed=i) for i in range(halves)]
        for offset, source in enumerate(sources):
            load(device, weight, source, tile_step=halves, tile_offset=offset)
        values = np.concatenate([source.values() for source in sources])
    return replace(weight, n_experts=N_EXPERTS, top_k=top_k, exact_activations=exact), values


def check_gate_up(
    device: Device,
    dtype: str,
    f: int,
    k: int,
    *,
    n: int = 3,
    top_k: int = 2,
    norm: bool = True,
    per_part: int = N_EXPERTS,
    gate_kind: str = "swiglu",
    biased: bool = False,
    in_blocks_alone: bool = False,
) -> None:
    """in_blocks_alone: not with the kernel that computes each slot by itself."""
    rng = np.random.default_rng(f * k)
    weight, values = experts_on_device(device, dtype, 2 * f, k, top_k, gate_up=True, experts_per_part=per_part)
    gate, up = values.reshape(2, N_EXPERTS, f, k)
    x = (2.0 * rng.standard_normal((n, k))).astype(np.float32)
    norm_weight = (1.0 + 0.2 * rng.standard_normal(k)).astype(np.float32)
    ids, out = ids_of(n, top_k), poisoned(device, (n, top_k, f))
    given = with_poison(device, x), with_poison(device, ids), out
    buffer = with_poison(device, norm_weight) if norm else None
    bias = (4.0 * rng.standard_normal((N_EXPERTS, 2, f))).astype(np.float32) if biased else None
    kind: dict[str, Any] = {"gate": gate_kind, "bias": None if bias is None else with_poison(device, bias)}
    normed = reference.rms_norm(x, norm_weight, EPS) if norm else x
    expected = reference.experts_gate_up(normed, gate, up, ids, gate_kind, bias)
    if not in_blocks_alone:
        run(experts_gate_up(device, weight, *given, **kind, norm=buffer, eps=EPS if norm else 0.0), n)
        assert relative_error(read_guarded(device, out, np.float32, expected.shape), expected) < TOLERANCE
    if norm:
        return
    for max_rows, size in sizes_of_blocks(device, weight, n):
        out = poisoned(device, (n, top_k, f))
        order, blocks, step = grouped(device, ids, size)
        rows = with_poison(device, x)
        run(experts_prefill(device, weight, rows, order, blocks, out, step, **kind, max_rows=max_rows), n)
        assert relative_error(read_guarded(device, out, np.float32, expected.shape), expected) < prefill_tolerance(
            device, dtype, weight.k, max_rows
        )


def check_down(
    device: Device,
    dtype: str,
    hidden: int,
    f: int,
    *,
    n: int = 3,
    top_k: int = 2,
    per_part: int = N_EXPERTS,
    biased: bool = False,
    in_blocks_alone: bool = False,
) -> None:
    """in_blocks_alone: as in check_gate_up."""
    rng = np.random.default_rng(hidden * f)
    weight, values = experts_on_device(device, dtype, hidden, f, top_k, gate_up=False, experts_per_part=per_part)
    rows = rng.standard_normal((n, top_k, f)).astype(np.float32)
    weights = rng.uniform(0.1, 1.0, (n, top_k)).astype(np.float32)
    before = rng.standard_normal((n, hidden)).astype(np.float32)
    ids, out = ids_of(n, top_k), with_poison(device, before)
    given = (with_poison(device, array) for array in (rows, ids, weights))
    bias = rng.standard_normal((N_EXPERTS, hidden)).astype(np.float32) if biased else None
    bias_buffer = None if bias is None else with_poison(device, bias)
    down = values.reshape(N_EXPERTS, hidden, f)
    expected = before + reference.experts_down(rows, down, ids, weights, bias)
    if not in_blocks_alone:
        run(experts_down(device, weight, *given, out, bias=bias_buffer), n)
        assert relative_error(read_guarded(device, out, np.float32, before.shape), expected) < TOLERANCE

    for max_rows, size in sizes_of_blocks(device, weight, n):
        y, out = poisoned(device, (n, top_k, hidden)), with_poison(device, before)
        order, blocks, step = grouped(device, ids, size)
        kind: dict[str, Any] = {"weights": with_poison(device, weights), "bias": bias_buffer, "max_rows": max_rows}
        run(experts_prefill(device, weight, with_poison(device, rows), order, blocks, y, step, **kind), n)
        run(experts_sum(device, y, out, top_k=top_k, columns=hidden), n)
        assert relative_error(read_guarded(device, out, np.float32, before.shape), expected) < prefill_tolerance(
            device, dtype, weight.k, max_rows
        )


def sizes_of_blocks(device: Device, weight: Weight, n: int) -> list[tuple[int, int]]:
    """For prompts, and where that is another kernel for steps of few tokens: max_rows, and the slots of its blocks."""
    most = FEW_ROWS[-1]
    sizes = {block_rows(device, weight): 0}
    if n <= most:
        sizes.setdefault(block_rows(device, weight, most), most)
    return [(max_rows, size) for size, max_rows in sizes.items()]


def grouped(device: Device, ids: np.ndarray, rows: int = BLOCK_ROWS) -> tuple[Buffer, Buffer, StepState]:
    """order and blocks of group_by_expert, compared with the twin's; of an expert's slots any order will do."""
    n, top_k = ids.shape
    n_blocks = block_count(n, N_EXPERTS, top_k, rows)
    order, blocks = poisoned(device, (n * top_k,)), poisoned(device, (n_blocks, 4))
    step = step_state_at(device, position=3, n_tokens=n)
    counts = {"n_experts": N_EXPERTS, "top_k": top_k, "block_rows": rows}
    run(group_by_expert(device, with_poison(device, ids), order, blocks, step, **counts), n)
    found = read_guarded(device, blocks, np.int32, (n_blocks, 4))
    expected_order, expected_blocks = reference.group_by_expert(ids, rows)
    used = len(expected_blocks)
    np.testing.assert_array_equal(found[:used, :3], expected_blocks)
    assert found[:, 3].tolist() == [used, *[0] * (n_blocks - 1)]
    assert not found[used:].any()
    experts, slots = ids.reshape(-1), read_guarded(device, order, np.int32, (n * top_k,))
    assert sorted(slots.tolist()) == sorted(expected_order.tolist())
    np.testing.assert_array_equal(experts[slots], experts[expected_order])
    return order, blocks, step


def block_of(dtype: str) -> int:
    return QUANTIZED[dtype].block if dtype in QUANTIZED else 1


@pytest.mark.parametrize("product", ["gate_up", "down"])
@pytest.mark.parametrize("dtype", slow_except([*DTYPES, *QUANTIZED], "float32", "bfloat16", "q4_0", "q6_k"))
def test_experts(target: Device, dtype: str, product: str) -> None:
    k, f = (512, 256) if block_of(dtype) > 32 else (96, 64)
    if product == "gate_up":
        check_gate_up(target, dtype, f, k, norm=False)
    else:
        check_down(target, dtype, k, f)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "n"), [("float32", 3), ("mxfp4", 67)])
def test_biases_and_a_clamped_gate(target: Device, dtype: str, n: int) -> None:
    """Gates and ups beyond the clamp on both sides."""
    clamped: dict[str, Any] = {"gate_kind": "clamped_swiglu", "biased": True, "n": n}
    if dtype == "float32":
        check_gate_up(target, dtype, 80, 64, **clamped)
    check_gate_up(target, dtype, 48, 96, norm=False, per_part=IN_PARTS, **clamped)
    check_down(target, dtype, 48, 64, biased=True, per_part=IN_PARTS, top_k=3, n=n)


@pytest.mark.parametrize(
    ("dtype", "n"),
    [("float32", 67), pytest.param("bfloat16", 3, marks=small), pytest.param("q4_0", 3, marks=pytest.mark.slow)],
)
def test_experts_without_a_gate(target: Device, dtype: str, n: int) -> None:
    """Token by token with a norm, and in blocks without one."""
    f, k, top_k, rng = 48, 96, 2, np.random.default_rng(n)
    weight, values = experts_on_device(target, dtype, f, k, top_k, gate_up=False, experts_per_part=IN_PARTS)
    up = values.reshape(N_EXPERTS, f, k)
    x, norm = rng.standard_normal((n, k)).astype(np.float32), (1.0 + 0.2 * rng.standard_normal(k)).astype(np.float32)
    ids, out, rows = ids_of(n, top_k), poisoned(target, (n, top_k, f)), with_poison(target, x)
    normed = {"norm": with_poison(target, norm), "eps": EPS}
    run(experts_gate_up(target, weight, rows, with_poison(target, ids), out, gate="relu2", **normed), n)
    expected = reference.experts_gate_up(reference.rms_norm(x, norm, EPS), up, up, ids, "relu2")
    assert relative_error(read_guarded(target, out, np.float32, expected.shape), expected) < TOLERANCE
    expected = reference.experts_gate_up(x, up, up, ids, "relu2")
    ones = with_poison(target, np.ones((n, top_k), np.float32))
    for max_rows, size in sizes_of_blocks(target, weight, n):
        out, (order, blocks, step) = poisoned(target, (n, top_k, f)), grouped(target, ids, size)
        first = {"gate": "relu2", "weights": ones, "max_rows": max_rows}
        run(experts_prefill(target, weight, rows, order, blocks, out, step, **first), n)
        error = relative_error(read_guarded(target, out, np.float32, expected.shape), expected)
        assert error < 2 * prefill_tolerance(target, dtype, weight.k, max_rows)


@small
def test_few_columns(target: Device) -> None:
    check_gate_up(target, "bfloat16", 16, 32, n=2, norm=False)
    check_down(target, "bfloat16", 32, 16, n=2, top_k=4)


@pytest.mark.parametrize("n", [1, 17, 211])
def test_every_token_has_its_experts(target: Device, n: int) -> None:
    """Of 211 tokens an expert has more than a block."""
    check_gate_up(target, "float16", 64, 96, n=n, norm=False)
    check_down(target, "float16", 96, 64, n=n)


@pytest.mark.slow
@pytest.mark.parametrize(("f", "k", "top_k", "in_blocks_alone"), [(144, 96, 3, False), (64, 160, 4, True)])
def test_several_blocks_of_an_expert(target: Device, f: int, k: int, top_k: int, in_blocks_alone: bool) -> None:
    """Of 300 tokens an expert has 150 or 200 slots: matrix units take two blocks, then others. Tiles are left over."""
    many: dict[str, Any] = {"n": 300, "top_k": top_k, "in_blocks_alone": in_blocks_alone}
    check_gate_up(target, "bfloat16", f, k, norm=False, biased=True, **many)
    check_down(target, "bfloat16", f, k, biased=True, **many)
    check_down(target, "float16", f, k, per_part=IN_PARTS, **many)
    check_gate_up(target, "mxfp4", f, k, norm=False, gate_kind="clamped_swiglu", biased=True, **many)
    check_down(target, "q8_0", f, k, per_part=IN_PARTS, **many)


@pytest.mark.parametrize(
    ("dtype", "down_dtype"),
    [("bfloat16", "bfloat16"), ("mxfp4", "mxfp4"), ("bfloat16", "float16"), ("q4_0", "mxfp4"), ("q4_0", "q4_0")],
)
def test_rows_are_left_as_the_next_product_takes_them(target: Device, dtype: str, down_dtype: str) -> None:
    """k and f are the same, so that working memory of one name would be that of both.

    Not with the k formats, whose random weights are so large that the rows are beyond float16.
    """
    f = k = 96
    n, top_k, rng = 131, 3, np.random.default_rng(5)
    gate_up, gate_values = experts_on_device(target, dtype, 2 * f, k, top_k, gate_up=True)
    down, down_values = experts_on_device(target, down_dtype, k, f, top_k, gate_up=False)
    ids, x = ids_of(n, top_k), rng.standard_normal((n, k)).astype(np.float32)
    order, blocks, step = grouped(target, ids, block_rows(target, gate_up))
    rows = gated_rows(target, gate_up, down, step)
    if rows is None:
        pytest.skip("only Hopper's variant takes rows that another product has left")
    y, shares = poisoned(target, (n, top_k, k)), with_poison(target, np.ones((n, top_k), np.float32))
    run(experts_prefill(target, gate_up, with_poison(target, x), order, blocks, rows, step, gate="swiglu"), n)
    outputs = slot_outputs(target, down, y)
    run(experts_prefill(target, down, rows, order, blocks, outputs, step, weights=shares), n)
    out = with_poison(target, np.zeros((n, k), np.float32))
    run(experts_sum(target, outputs, out, top_k=top_k, columns=k), n)
    gate, up = gate_values.reshape(2, N_EXPERTS, f, k)
    middle = reference.experts_gate_up(x, gate, up, ids, "swiglu")
    expected = np.einsum("tsf,tshf->th", middle, down_values.reshape(N_EXPERTS, k, f).astype(np.float64)[ids])
    tolerance = 2 * max(prefill_tolerance(target, of, k) for of in (dtype, down_dtype))
    assert relative_error(read_guarded(target, out, np.float32, expected.shape), expected) < tolerance


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "q4_0"])
def test_with_a_norm(target: Device, dtype: str) -> None:
    check_gate_up(target, dtype, 64, 160, top_k=4)


def test_experts_in_several_buffers(target: Device) -> None:
    """The last of them has fewer."""
    check_gate_up(target, "float32", 32, 48, per_part=4, top_k=3, norm=False)
    check_down(target, "float16", 144, 96, per_part=4, top_k=3)


def rounded_rows(shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """x and what its rounding to 8 bits in groups of 32 makes of it; no rounding is a close call."""
    rng = np.random.default_rng(shape[-1])
    q = rng.integers(-126, 127, (*shape[:-1], shape[-1] // 32, 32)).astype(np.float64)
    q[..., 7] = 127.0
    noise = rng.uniform(-0.3, 0.3, q.shape) * (np.abs(q) < 127)
    scale = np.exp2(rng.integers(-9, -5, (*q.shape[:-1], 1)))
    return ((q + noise) * scale).reshape(shape).astype(np.float32), (q * scale).reshape(shape)


@pytest.mark.parametrize("dtype", slow_except(QUANTIZED, "q4_0", "q6_k", "mxfp4"))
def test_activations_in_8_bits(target: Device, dtype: str) -> None:
    """Where the device multiplies 8 bits, activations beside quantised weights are rounded, in both kinds of kernel."""
    k, f, n, top_k = 512 if block_of(dtype) > 32 else 96, 64, 131, 3
    is_rounded = bool(target.is_cpu and dot_form(target))
    ids = ids_of(n, top_k)
    weight, values = experts_on_device(target, dtype, 2 * f, k, top_k, gate_up=True, exact=False)
    order, blocks, step = grouped(target, ids, block_rows(target, weight))
    gate, up = values.reshape(2, N_EXPERTS, f, k)
    x, rounded = rounded_rows((n, k))
    expected = reference.experts_gate_up(rounded if is_rounded else x, gate, up, ids, "swiglu")
    given = with_poison(target, x), with_poison(target, ids)
    outs = [poisoned(target, expected.shape) for _ in range(2)]
    run(experts_gate_up(target, weight, *given, outs[0], gate="swiglu"), n)
    run(experts_prefill(target, weight, given[0], order, blocks, outs[1], step, gate="swiglu"), n)
    for out, tolerance in zip(outs, (TOLERANCE, prefill_tolerance(target, dtype, k)), strict=True):
        assert relative_error(read_guarded(target, out, np.float32, expected.shape), expected) < tolerance


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["cpu"])
@pytest.mark.parametrize("dtype", ["q4_0", "q6_k"])
def test_a_row_has_the_same_bits_in_blocks_and_alone(target: Device, dtype: str) -> None:
    """Of 1 to 23 tokens an expert has 12 to 1 behind its last 12, which are computed 12, 10, 8, 6, 4 or 2 at once."""
    if not dot_form(target):
        pytest.skip("without 8-bit dot products both kernels add up float32 in orders of their own")
    k, f = (512, 256) if dtype == "q6_k" else (96, 64)
    weights = [
        experts_on_device(target, dtype, rows, k, 1, gate_up=gate_up, exact=False, experts_per_part=per_part)[0]
        for rows, gate_up, per_part in ((2 * f, True, N_EXPERTS), (f, False, IN_PARTS))
    ]
    for counts in ((1, 2, 3, 4, 5, 6), (7, 8, 9, 10, 11, 12), (13, 17, 23, 0, 0, 1), (0, 64, 0, 65, 1, 0)):
        ids = np.random.default_rng(7).permutation(np.repeat(np.arange(N_EXPERTS, dtype=np.int32), counts))[:, None]
        n = len(ids)
        order, blocks, step = grouped(target, ids)
        x, of_tokens = with_poison(target, rounded_rows((n, k))[0]), with_poison(target, ids)
        ones = with_poison(target, np.ones((n, 1), np.float32))
        alone, together = poisoned(target, (n, 1, f)), poisoned(target, (n, 1, f))
        run(experts_gate_up(target, weights[0], x, of_tokens, alone, gate="swiglu"), n)
        run(experts_prefill(target, weights[0], x, order, blocks, together, step, gate="swiglu"), n)
        np.testing.assert_array_equal(*(read_guarded(target, out, np.float32, (n, f)) for out in (alone, together)))
        alone, together = with_poison(target, np.zeros((n, f), np.float32)), poisoned(target, (n, 1, f))
        run(experts_down(target, weights[1], x, of_tokens, ones, alone), n)
        run(experts_prefill(target, weights[1], x, order, blocks, together, step, weights=ones), n)
        np.testing.assert_array_equal(*(read_guarded(target, out, np.float32, (n, f)) for out in (alone, together)))


@pytest.mark.parametrize("variant", ["cpu"])
def test_biases_beside_activations_in_8_bits(target: Device) -> None:
    k, f, n, top_k = 96, 64, 67, 2
    is_rounded = bool(dot_form(target))
    ids = ids_of(n, top_k)
    order, blocks, step = grouped(target, ids)
    rng = np.random.default_rng(7)
    weight, values = experts_on_device(target, "mxfp4", 2 * f, k, top_k, gate_up=True, exact=False)
    bias = rng.standard_normal((N_EXPERTS, 2, f)).astype(np.float32)
    x, rounded = rounded_rows((n, k))
    gate, up = values.reshape(2, N_EXPERTS, f, k)
    expected = reference.experts_gate_up(rounded if is_rounded else x, gate, up, ids, "swiglu", bias)
    out, given = poisoned(target, expected.shape), (with_poison(target, x), order, blocks)
    run(experts_prefill(target, weight, *given, out, step, gate="swiglu", bias=with_poison(target, bias)), n)
    assert relative_error(read_guarded(target, out, np.float32, expected.shape), expected) < TOLERANCE

    weight, values = experts_on_device(target, "mxfp4", k, f, top_k, gate_up=False, exact=False)
    bias, shares = rng.standard_normal((N_EXPERTS, k)).astype(np.float32), rng.random((n, top_k), np.float32)
    x, rounded = rounded_rows((n, top_k, f))
    down = values.reshape(N_EXPERTS, k, f)
    products = np.einsum("tsf,tshf->tsh", rounded if is_rounded else x.astype(np.float64), down.astype(np.float64)[ids])
    expected = (products + bias[ids]) * shares[..., None]
    out, given = poisoned(target, expected.shape), (with_poison(target, x), order, blocks)
    options = {"weights": with_poison(target, shares), "bias": with_poison(target, bias)}
    run(experts_prefill(target, weight, *given, out, step, **options), n)
    assert relative_error(read_guarded(target, out, np.float32, expected.shape), expected) < TOLERANCE
