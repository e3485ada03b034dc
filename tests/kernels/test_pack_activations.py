"""Activations in 16 bits and blocks of 8 x 8, as one kernel leaves them for the next product on Hopper's matrix units.

The rounding is exact where the kernel only rounds; else the error is relative to the largest expected magnitude.
"""

from __future__ import annotations

import numpy as np
import pytest
from helpers import (
    key_tiles,
    poisoned,
    read_guarded,
    read_packed,
    relative_error,
    rotations,
    run,
    step_state_at,
    to_storage,
    weight_on_device,
    with_poison,
)

from llmcl import reference
from llmcl.kernels.common.attention import AttentionShape
from llmcl.kernels.common.step_state import StepState
from llmcl.kernels.nvidia.linear import TensorCoreLayout
from llmcl.ops.attention import (
    attention_decode,
    attention_prefill,
    attention_supports_output,
    decode_supports_output,
)
from llmcl.ops.linear import input_layout, linear_prefill, linear_supports_output
from llmcl.runtime.device import Device

ROUNDING = {"float16": 2.0**-10, "bfloat16": 2.0**-7}
LENGTHS = [1, 7, 8, 9, 127, 129, 300]

pytestmark = pytest.mark.parametrize("variant", ["hopper"])


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("k", [32, 144, 1056])
def test_pack_activations(target: Device, dtype: str, n: int, k: int) -> None:
    x = np.random.default_rng(n).standard_normal((n, k)).astype(np.float32)
    step = step_state_at(target, position=0, n_tokens=n)
    layout = TensorCoreLayout(dtype, blocks=True)
    rows = layout.packed(step, k)
    run([layout.pack(target, with_poison(target, x), rows, step, None, 0.0)], n)
    np.testing.assert_array_equal(read_packed(target, rows, n), reference.round_to(x, dtype))


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("k", [32, 144, 1056])
def test_rms_norm_narrow(target: Device, dtype: str, n: int, k: int) -> None:
    rng = np.random.default_rng(n)
    x, weight = rng.standard_normal((n, k)).astype(np.float32), rng.standard_normal(k).astype(np.float32)
    step = step_state_at(target, position=0, n_tokens=n)
    layout = TensorCoreLayout(dtype, blocks=True)
    rows = layout.packed(step, k)
    run([layout.pack(target, with_poison(target, x), rows, step, target.upload(weight, "norm"), 1e-5)], n)
    assert relative_error(read_packed(target, rows, n), reference.rms_norm(x, weight, 1e-5)) < ROUNDING[dtype]


@pytest.mark.parametrize(("dtype", "rows"), [("float16", 128), ("bfloat16", 704)])
@pytest.mark.parametrize("n", LENGTHS)
def test_a_product_takes_and_leaves_them(target: Device, dtype: str, rows: int, n: int) -> None:
    """Two products in a row, the first with a gate, whose weights lie in several buffers."""
    rng = np.random.default_rng(n)
    k, inner = 64, rows // 2
    x, gate_up, down = (
        (rng.standard_normal(shape) / np.sqrt(shape[1])).astype(np.float32)
        for shape in ((n, k), (rows, k), (80, inner))
    )
    first = weight_on_device(target, gate_up, dtype, alternating=True, tiles_per_part=6)
    second = weight_on_device(target, down, dtype)
    layout = TensorCoreLayout(dtype, blocks=True)
    assert input_layout(target, second) == layout and linear_supports_output(target, first, layout)
    step = step_state_at(target, position=0, n_tokens=n)
    gated = layout.packed(step, inner, "gated")
    out = poisoned(target, (n, 80))
    run(linear_prefill(target, first, with_poison(target, x), gated, step, epilogue="swiglu"), n)
    run(linear_prefill(target, second, gated, out, step), n)

    halves = reference.linear(reference.round_to(x, dtype), reference.round_to(gate_up, dtype))
    expected = reference.swiglu(halves[:, :inner], halves[:, inner:])
    assert relative_error(read_packed(target, gated, n), expected) < ROUNDING[dtype]
    expected = reference.linear(read_packed(target, gated, n), reference.round_to(down, dtype))
    assert relative_error(read_guarded(target, out, np.float32, (n, 80)), expected) < 2e-6


@pytest.mark.parametrize("n", LENGTHS)
def test_attention_leaves_them(target: Device, n: int) -> None:
    """In the weights' dtype, whatever that of the cache is."""
    n_heads, head_dim, capacity = 4, 64, 320
    shape = AttentionShape(n_heads, 2, head_dim, capacity, "float16")
    layout = TensorCoreLayout("bfloat16", blocks=True)
    assert attention_supports_output(target, shape, layout)
    rng = np.random.default_rng(n)
    qkv = rng.standard_normal((n, n_heads + 4, head_dim)).astype(np.float32)
    keys, values = (to_storage(rng.standard_normal((2, capacity, head_dim)), "float16") for _ in range(2))
    step = step_state_at(target, position=0, n_tokens=n)
    operands = [with_poison(target, qkv), step, with_poison(target, key_tiles(keys)), with_poison(target, values)]
    plain = poisoned(target, (n, n_heads * head_dim))
    narrow = layout.packed(step, n_heads * head_dim)
    for out in (plain, narrow):
        run(attention_prefill(target, shape, *operands, out), n)
    expected = reference.round_to(read_guarded(target, plain, np.float32, (n, n_heads * head_dim)), "bfloat16")
    np.testing.assert_array_equal(read_packed(target, narrow, n), expected)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("n_splits", [1, 3])
@pytest.mark.parametrize("n", [2, 8, 19])
def test_decode_attention_leaves_them(target: Device, dtype: str, n_splits: int, n: int) -> None:
    """A row of each of several sequences, whose keys lie in two pages."""
    n_heads, head_dim, page = 8, 64, 64
    shape = AttentionShape(n_heads, 2, head_dim, 2 * n * page, "float16", page)
    layout = TensorCoreLayout(dtype, blocks=True, by_token=True)
    assert decode_supports_output(target, shape, layout)
    rng = np.random.default_rng(n)
    positions = rng.integers(0, 2 * page, n)
    step = StepState(target, n, 2, n)
    for i, position in enumerate(positions):
        step.write_sequence(i, int(position), 0)
        step.write_pages([2 * n - 1 - i, i], i)
    step.write_rows(range(n), 0)
    caches = rng.standard_normal((2, 2, 2 * n * page, head_dim))
    keys, values = (to_storage(cache, "float16") for cache in caches)
    qkv = rng.standard_normal((n, n_heads + 4, head_dim)).astype(np.float32)
    operands = (
        with_poison(target, qkv),
        with_poison(target, rotations(head_dim, positions)),
        step,
        with_poison(target, key_tiles(keys)),
        with_poison(target, values),
        poisoned(target, (n, n_heads, n_splits, 2)),
        poisoned(target, (n, n_heads, n_splits, head_dim)),
    )
    plain, narrow = poisoned(target, (n, n_heads * head_dim)), layout.packed(step, n_heads * head_dim)
    for out in (plain, narrow):
        run(attention_decode(target, shape, *operands, out, n_splits=n_splits), n)
    expected = reference.round_to(read_guarded(target, plain, np.float32, (n, n_heads * head_dim)), dtype)
    np.testing.assert_array_equal(read_packed(target, narrow, n), expected)
