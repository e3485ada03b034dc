"""rope_append: values are copied exactly (rounded once); rotated queries and keys have float32 products.

Error: largest difference over the largest expected magnitude. Keys: where the float32 rotation differs in its last
bit, rounding to the cache's type may go the other way, so one unit of that type is allowed.
"""

from __future__ import annotations

import numpy as np
import pytest
from helpers import (
    DTYPES,
    from_key_tiles,
    from_storage,
    key_tiles,
    read_guarded,
    relative_error,
    rotations,
    run,
    step_state_at,
    to_storage,
    with_poison,
)

from llmcl import reference
from llmcl.kernels.common.attention import AttentionShape
from llmcl.ops.attention import rope_append
from llmcl.runtime.device import Device

QUERY_TOLERANCE = 1e-6
KEY_TOLERANCE = {"float32": 1e-6, "float16": 2.0**-10, "bfloat16": 2.0**-7}
CAPACITY = 640

small = pytest.mark.oclgrind


def check(device: Device, dtype: str, n_q_heads: int, n_kv_heads: int, head_dim: int, n: int, position: int) -> None:
    rng = np.random.default_rng(n + position)
    shape = AttentionShape(n_q_heads, n_kv_heads, head_dim, CAPACITY, dtype)
    heads = n_q_heads + 2 * n_kv_heads
    qkv = rng.standard_normal((n, heads, head_dim)).astype(np.float32)
    rope = rotations(head_dim, position + np.arange(n))
    cache_shape = (n_kv_heads, CAPACITY, head_dim)
    keys_before, values_before = (to_storage(rng.standard_normal(cache_shape), dtype) for _ in range(2))
    k_cache, v_cache = with_poison(device, key_tiles(keys_before)), with_poison(device, values_before)

    buffer = with_poison(device, qkv)
    step = step_state_at(device, position=position, n_tokens=n)
    run(rope_append(device, shape, buffer, with_poison(device, rope), step, k_cache, v_cache), n)

    half = head_dim // 2
    rotated = reference.rope(qkv[:, :-n_kv_heads], rope[:, :half], rope[:, half:])
    after = read_guarded(device, buffer, np.float32, qkv.shape)
    assert relative_error(after[:, :n_q_heads], rotated[:, :n_q_heads]) < QUERY_TOLERANCE
    np.testing.assert_array_equal(after[:, -n_kv_heads:], qkv[:, -n_kv_heads:])

    storage = keys_before.dtype
    keys = from_key_tiles(read_guarded(device, k_cache, storage, (n_kv_heads, CAPACITY // 16, head_dim, 16)))
    values = read_guarded(device, v_cache, storage, cache_shape)
    written, kept = np.s_[:, position : position + n], np.s_[:, np.r_[0:position, position + n : CAPACITY]]
    expected = reference.round_to(rotated[:, n_q_heads:], dtype).swapaxes(0, 1)
    assert relative_error(from_storage(keys[written], dtype), expected) < KEY_TOLERANCE[dtype]
    np.testing.assert_array_equal(values[written], to_storage(qkv[:, -n_kv_heads:].swapaxes(0, 1), dtype))
    np.testing.assert_array_equal(keys[kept], keys_before[kept])
    np.testing.assert_array_equal(values[kept], values_before[kept])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 15, 16, 17, 577])
@pytest.mark.parametrize("position", [0, 37])
def test_rope_append(target: Device, dtype: str, n: int, position: int) -> None:
    check(target, dtype, 9, 3, 64, n, position)


@pytest.mark.parametrize(("n_q_heads", "n_kv_heads", "head_dim"), [(4, 1, 80), (8, 1, 128), (40, 10, 16)])
def test_heads(target: Device, n_q_heads: int, n_kv_heads: int, head_dim: int) -> None:
    check(target, "bfloat16", n_q_heads, n_kv_heads, head_dim, 33, 15)


@small
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_few_tokens(target: Device, dtype: str) -> None:
    check(target, dtype, 4, 2, 32, 3, 14)


def test_the_cache_can_be_filled_to_its_end(target: Device) -> None:
    check(target, "float32", 4, 2, 32, 17, CAPACITY - 17)
