"""rope_append, attention_decode and attention_prefill on pages: the same bits as on a contiguous cache."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import (
    from_key_tiles,
    key_tiles,
    poisoned,
    read_guarded,
    rotations,
    run,
    storage_type,
    to_storage,
    with_poison,
)
from parameters import each_value

from llmcl.kernels.common.attention import AttentionShape
from llmcl.kernels.common.step_state import StepState
from llmcl.ops.attention import attention_decode, attention_prefill, rope_append
from llmcl.runtime.device import Device

PAGE, POOL, CAPACITY = 64, 12, 320
HEADS = (4, 2, 32)  # of most small models, whose programs these are then
TABLE = [7, 2, 11, 0, 5]  # of CAPACITY / PAGE pages in a pool of POOL

small = pytest.mark.oclgrind("portable")  # which cannot run the CPU variant of decode


def state_at(device: Device, position: int, n_tokens: int, table: list[int]) -> StepState:
    step = StepState(device, 1, len(table))
    device.write(step.state, np.array([position, n_tokens, 0], np.int32))
    if table:
        step.write_pages(table)
    return step


def outputs(
    device: Device, dtype: str, position: int, n: int, pages: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What n tokens append (keys, values, in the order of the text) and attend to (prefill, or decode for one)."""
    n_q_heads, n_kv_heads, head_dim = HEADS
    rng = np.random.default_rng(position)
    keys, values = rng.standard_normal((2, n_kv_heads, CAPACITY, head_dim))
    keys[:, position:] = values[:, position:] = np.nan
    qkv = rng.standard_normal((n, n_q_heads + 2 * n_kv_heads, head_dim)).astype(np.float32)
    rows = POOL * PAGE if pages else CAPACITY
    text = (np.array(TABLE)[:, None] * PAGE + np.arange(PAGE)).ravel() if pages else np.arange(CAPACITY)
    pools = np.full((2, n_kv_heads, rows, head_dim), np.nan)
    pools[0][:, text], pools[1][:, text] = keys, values
    k_cache = with_poison(device, key_tiles(to_storage(pools[0], dtype)))
    v_cache = with_poison(device, to_storage(pools[1], dtype))
    shape = AttentionShape(n_q_heads, n_kv_heads, head_dim, rows, dtype, PAGE if pages else 0)
    step = state_at(device, position, n, TABLE if pages else [])
    rope = with_poison(device, rotations(head_dim, np.arange(position, position + n)))
    x, out = with_poison(device, qkv), poisoned(device, (n, n_q_heads, head_dim))
    if n == 1:
        n_splits = 3
        ml, acc = poisoned(device, (n_q_heads, n_splits, 2)), poisoned(device, (n_q_heads, n_splits, head_dim))
        run(attention_decode(device, shape, x, rope, step, k_cache, v_cache, ml, acc, out, n_splits=n_splits))
    else:
        run(rope_append(device, shape, x, rope, step, k_cache, v_cache), n)
        run(attention_prefill(device, shape, x, step, k_cache, v_cache, out), n)
    bits = storage_type(dtype)
    tiles = read_guarded(device, k_cache, bits, (n_kv_heads, rows // 16, head_dim, 16))
    stored = read_guarded(device, v_cache, bits, (n_kv_heads, rows, head_dim))
    return (
        read_guarded(device, out, np.float32, (n, n_q_heads, head_dim)),
        from_key_tiles(tiles)[:, text],
        stored[:, text],
    )


@each_value(
    ("dtype", ["float32", "float16"]),
    (
        "position,n",
        [pytest.param(130, 1, marks=small), (0, 1), (63, 1), (64, 1), (319, 1), (0, 70), (100, 37), (191, 129)],
    ),
)
def test_pages_hold_what_a_contiguous_cache_holds(target: Device, dtype: str, position: int, n: int) -> None:
    paged, contiguous = (outputs(target, dtype, position, n, pages) for pages in (True, False))
    assert np.all(np.isfinite(paged[0]))
    for name, a, b in zip(("output", "keys", "values"), paged, contiguous, strict=True):
        np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8), err_msg=name)
