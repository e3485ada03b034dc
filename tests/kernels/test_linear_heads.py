"""linear_heads: largest difference over the largest expected magnitude."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from helpers import DTYPES, poisoned, read_guarded, relative_error, run, step_state_at, weight_on_device, with_poison
from parameters import each_value
from stored_rows import load, quantized_weight, random_rows

from llmcl import reference
from llmcl.kernels.common.dtype import QUANTIZED
from llmcl.ops.linear_heads import linear_heads
from llmcl.runtime.device import Device

TOLERANCE = 6e-6

small = pytest.mark.oclgrind


def check(device: Device, dtype: str, n: int, heads: int, rows: int, k: int, stride: int, per_part: int = 0) -> None:
    shape = heads * rows, k
    rng = np.random.default_rng(rows + k)
    if dtype in QUANTIZED:
        weight, source = quantized_weight(device, *shape, dtype, per_part), random_rows(QUANTIZED[dtype].format, *shape)
        load(device, weight, source)
        values = source.values()
    else:
        values = (rng.standard_normal(shape) / np.sqrt(k)).astype(np.float32)
        weight = weight_on_device(device, values, dtype, tiles_per_part=per_part)
        values = np.asarray(reference.round_to(values, dtype))
    x = rng.standard_normal((n, heads, stride)).astype(np.float32)
    x[..., k:] = np.nan
    out = poisoned(device, (n, heads, rows))
    step = step_state_at(device, position=0, n_tokens=n)
    weight = replace(weight, exact_activations=True)
    run(linear_heads(device, weight, with_poison(device, x), out, step, n_heads=heads, x_stride=stride), n)
    expected = reference.linear_heads(x[..., :k], values.reshape(heads, rows, k))
    assert relative_error(read_guarded(device, out, np.float32, expected.shape), expected) < TOLERANCE


@each_value(
    ("dtype", DTYPES),
    (
        "n,heads,rows,k,stride",
        [(1, 3, 32, 16, 32), pytest.param(5, 3, 16, 48, 48, marks=small), (1, 20, 512, 192, 256), (37, 4, 48, 64, 80)],
    ),
)
def test_linear_heads(target: Device, dtype: str, n: int, heads: int, rows: int, k: int, stride: int) -> None:
    check(target, dtype, n, heads, rows, k, stride)


@pytest.mark.parametrize("dtype", ["q8_0", "q4_0", "q6_k"])
def test_quantised_matrices(target: Device, dtype: str) -> None:
    check(target, dtype, 6, 3, 32, 256, 288)


def test_a_weight_in_several_buffers_ends_within_a_head(target: Device) -> None:
    check(target, "float32", 3, 3, 48, 32, 32, per_part=4)
