"""linear_decode: largest difference over the largest expected magnitude.

The twin computes with the weights as stored, so the tolerance, which covers float32 sums, is that of every dtype.
"""

from __future__ import annotations

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
from parameters import each_value

from llmcl import reference
from llmcl.errors import UsageError
from llmcl.kernels.common.linear import GATES
from llmcl.ops.linear import linear_decode
from llmcl.runtime.device import Device

TOLERANCE = {"float32": 2e-6, "float16": 2e-6, "bfloat16": 2e-6}
EPS = 1e-5

small = pytest.mark.oclgrind


def check(
    device: Device,
    dtype: str,
    rows: int,
    k: int,
    *,
    epilogue: str = "store",
    norm: bool = False,
    n_tokens: int = 1,
    tiles_per_part: int = 0,
) -> None:
    rng = np.random.default_rng(rows * k)
    values = (rng.standard_normal((rows, k)) / np.sqrt(k)).astype(np.float32)
    x = (2.0 * rng.standard_normal((n_tokens, k))).astype(np.float32)
    x[:-1] = np.nan  # only the last token of the step is read
    norm_weight = (1.0 + 0.2 * rng.standard_normal(k)).astype(np.float32)
    out_rows = rows // 2 if epilogue in GATES else rows
    before = rng.standard_normal(out_rows).astype(np.float32)

    weight = weight_on_device(device, values, dtype, alternating=epilogue in GATES, tiles_per_part=tiles_per_part)
    out = with_poison(device, before) if epilogue == "add" else poisoned(device, (out_rows,))
    launches = linear_decode(
        device,
        weight,
        with_poison(device, x),
        out,
        step_state_at(device, position=5, n_tokens=n_tokens),
        norm=with_poison(device, norm_weight) if norm else None,
        eps=EPS,
        epilogue=epilogue,
    )
    run(launches)

    last = x[-1:]
    expected = reference.linear(
        reference.rms_norm(last, norm_weight, EPS) if norm else last, reference.round_to(values, dtype)
    )[0]
    if epilogue == "add":
        expected = before + expected
    elif epilogue in GATES:
        expected = getattr(reference, epilogue)(expected[:out_rows], expected[out_rows:])
    assert relative_error(read_guarded(device, out, np.float32, (out_rows,)), expected) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("dtype", "rows", "k"),
    [
        ("float32", 1, 64),
        ("bfloat16", 15, 16),
        ("float16", 16, 272),
        pytest.param("float32", 17, 64, marks=small),
        ("float16", 577, 80),
    ],
)
def test_linear_decode(target: Device, dtype: str, rows: int, k: int) -> None:
    check(target, dtype, rows, k)


@each_value(("dtype", DTYPES), ("epilogue,rows", [("store", 131), ("add", 131), ("swiglu", 160), ("geglu", 160)]))
def test_norm_and_epilogue(target: Device, dtype: str, epilogue: str, rows: int) -> None:
    check(target, dtype, rows, 576, epilogue=epilogue, norm=True)


@pytest.mark.parametrize(("dtype", "epilogue", "rows"), [("bfloat16", "add", 131), ("float32", "swiglu", 160)])
def test_epilogue_without_norm(target: Device, dtype: str, epilogue: str, rows: int) -> None:
    check(target, dtype, rows, 576, epilogue=epilogue)


@small
@pytest.mark.parametrize(("epilogue", "rows"), [("add", 21), ("swiglu", 64)])
def test_norm_and_epilogue_on_few_columns(target: Device, epilogue: str, rows: int) -> None:
    check(target, "bfloat16", rows, 64, epilogue=epilogue, norm=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_squares_that_overflow_give_no_zeros(target: Device, dtype: str) -> None:
    x = np.ones((1, 576), np.float32)
    x[0, 5] = 1e20
    out = poisoned(target, (131,))
    weight = weight_on_device(target, np.ones((131, 576), np.float32), dtype)
    norm = with_poison(target, np.ones(576, np.float32))
    state = step_state_at(target, position=5, n_tokens=1)
    run(linear_decode(target, weight, with_poison(target, x), out, state, norm=norm, eps=EPS))
    assert np.isnan(read_guarded(target, out, np.float32, (131,))).all()


def test_the_last_token_of_a_step_is_taken(target: Device) -> None:
    check(target, "float32", 131, 576, norm=True, n_tokens=4)


@pytest.mark.parametrize(("epilogue", "rows"), [("add", 131), ("swiglu", 160)])
def test_split_weight(target: Device, epilogue: str, rows: int) -> None:
    check(target, "float16", rows, 48, epilogue=epilogue, norm=True, tiles_per_part=4)


def test_many_columns(target: Device) -> None:
    check(target, "float16", 48, 8192, norm=True)


def test_unknown_variant(device: Device) -> None:
    weight = weight_on_device(device, np.zeros((16, 16), np.float32), "float32")
    x = poisoned(device, (16,))
    with pytest.raises(UsageError, match=r"'fast'; there are nvidia, cpu, portable-int8, portable"):
        linear_decode(device, weight, x, x, step_state_at(device, position=0, n_tokens=1), variant="fast")
