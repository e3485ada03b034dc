"""linear_prefill: largest difference over the largest expected magnitude.

The twin computes with the weights as stored, so the tolerance, which covers float32 sums, is that of every dtype.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from helpers import (
    poisoned,
    read_guarded,
    relative_error,
    rounded_operands,
    run,
    step_state_at,
    weight_on_device,
    with_poison,
)

from llmcl import reference
from llmcl.kernels.common.dtype import TILE_ROWS
from llmcl.kernels.common.linear import GATES
from llmcl.kernels.cpu.dot_product import bf16_dot_form
from llmcl.kernels.cpu.linear import BF16_TILE_TOKENS, GROUP_TOKENS, PACKED_GROUP_TOKENS, float_constants
from llmcl.kernels.nvidia.linear import hopper_tiles
from llmcl.ops.linear import linear_prefill
from llmcl.runtime.device import Device

EPS = 1e-5
TOLERANCE = {"float32": 2e-6, "float16": 2e-6, "bfloat16": 2e-6}

# Rows whose number of tiles gives 1, 2, 3 and 4 columns of tiles a work-item on a CPU.
ROWS_BY_COLUMNS = {1: 577, 2: 157, 3: 131, 4: 64}
PORTABLE_TOKENS = 64

small = pytest.mark.oclgrind


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
    rng = np.random.default_rng(n + rows * k)
    values = (rng.standard_normal((rows, k)) / np.sqrt(k)).astype(np.float32)
    x = rng.standard_normal((n, k)).astype(np.float32)
    out_rows = rows // 2 if epilogue in GATES else rows
    before = rng.standard_normal((n, out_rows)).astype(np.float32)

    weight = weight_on_device(device, values, dtype, alternating=epilogue in GATES, tiles_per_part=tiles_per_part)
    weight = dataclasses.replace(weight, exact_activations=exact)
    out = with_poison(device, before) if epilogue == "add" else poisoned(device, (n, out_rows))
    step = step_state_at(device, position=3, n_tokens=n)
    norm_weight = rng.standard_normal(k).astype(np.float32)
    norm_buffer = with_poison(device, norm_weight) if norm else None
    x_buffer = with_poison(device, x)
    options = {"norm": norm_buffer, "eps": EPS if norm else 0.0, "epilogue": epilogue, "max_rows": max_rows}
    run(linear_prefill(device, weight, x_buffer, out, step, **options), n)  # type: ignore[arg-type]

    if norm:
        x = reference.rms_norm(x, norm_weight, EPS).astype(np.float32)
    if dtype == "bfloat16" and device.is_cpu and bf16_dot_form(device) and not exact:
        x = reference.round_bfloat16(x).astype(np.float32)
    expected = reference.linear(x, reference.round_to(values, dtype))
    if epilogue == "add":
        expected = before + expected
    elif epilogue in GATES:
        expected = getattr(reference, epilogue)(expected[:, :out_rows], expected[:, out_rows:])
    assert relative_error(read_guarded(device, out, np.float32, (n, out_rows)), expected) < rounded_operands(
        device, dtype, TOLERANCE[dtype]
    )


def around(tile: int) -> list[int]:
    return [tile - 1, tile, tile + 1]


@pytest.mark.parametrize("columns", [1, 2, 3, 4])
@pytest.mark.parametrize("n", [1, *around(GROUP_TOKENS), *around(PORTABLE_TOKENS), 577])
def test_linear_prefill(target: Device, columns: int, n: int) -> None:
    check(target, "float16", n, ROWS_BY_COLUMNS[columns], 80)


@pytest.mark.parametrize("columns", [1, 2, 3, 4])
@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_around_a_register_tile(target: Device, columns: int, tail: bool, offset: int) -> None:
    rows = ROWS_BY_COLUMNS[columns]
    own = float_constants(target, -(-rows // TILE_ROWS), 1)
    check(target, "float16", own["TILE_TOKENS"] + tail * own["TAIL_TOKENS"] + offset, rows, 80)


@pytest.mark.parametrize(
    ("dtype", "epilogue", "rows"),
    [
        ("float32", "add", 131),
        ("float32", "swiglu", 160),
        ("float16", "swiglu", 160),
        ("bfloat16", "store", 131),
        ("bfloat16", "swiglu", 160),
        ("float32", "geglu", 160),
        ("float16", "geglu", 96),
    ],
)
def test_epilogue(target: Device, dtype: str, epilogue: str, rows: int) -> None:
    check(target, dtype, 67, rows, 576, epilogue=epilogue)


@pytest.mark.parametrize("variant", ["hopper"])
@pytest.mark.parametrize(("rows", "tiles"), [(608, 4), (6144, 8)])
@pytest.mark.parametrize(("dtype", "epilogue"), [("float16", "store"), ("bfloat16", "add"), ("bfloat16", "swiglu")])
@pytest.mark.parametrize("n", [65, 128, 201, 256])
def test_narrow_units(target: Device, rows: int, tiles: int, dtype: str, epilogue: str, n: int) -> None:
    """Units of fewer tiles, where tokens are too few to give each compute unit a wide one."""
    assert hopper_tiles(132, rows // 16, 256) == tiles
    check(target, dtype, n, rows, 160, epilogue=epilogue, max_rows=256)


@small
@pytest.mark.parametrize(("dtype", "epilogue", "rows"), [("float32", "add", 37), ("bfloat16", "swiglu", 64)])
def test_few_columns(target: Device, dtype: str, epilogue: str, rows: int) -> None:
    check(target, dtype, 3, rows, 32, epilogue=epilogue)


@pytest.mark.parametrize("n", [*around(BF16_TILE_TOKENS[1]), *around(PACKED_GROUP_TOKENS)])
def test_bfloat16_dot_products(target: Device, n: int) -> None:
    check(target, "bfloat16", n, 131, 576)


def test_bfloat16_norm(target: Device) -> None:
    """Rows may round the other way where the twin's norm differs in its last bit."""
    if not target.is_cpu or not bf16_dot_form(target):
        pytest.skip("only the kernel that rounds rows to bfloat16 normalises them")
    check(target, "bfloat16", 50, 131, 576, norm=True)


def test_bfloat16_with_exact_activations(target: Device) -> None:
    if target.entry.fact("ptx_arch") >= 80:
        pytest.skip("the NVIDIA variant always rounds")
    check(target, "bfloat16", 50, 157, 80, exact=True)


@pytest.mark.parametrize("rows", [1, 15])
def test_few_rows(target: Device, rows: int) -> None:
    check(target, "bfloat16", 5, rows, 16)


@pytest.mark.parametrize(("epilogue", "rows"), [("store", 131), ("swiglu", 160)])
def test_split_weight(target: Device, epilogue: str, rows: int) -> None:
    check(target, "float32", 50, rows, 48, epilogue=epilogue, tiles_per_part=4)
