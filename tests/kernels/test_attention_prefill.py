"""attention_prefill: largest difference over the largest expected magnitude.

The twin attends to keys and values as the cache stores them, so one tolerance, which covers float32 scores and sums,
holds for every dtype of the cache. Where a CPU rounds queries, keys and values to bfloat16, the twin's are rounded,
too, and the tolerance covers what rounding the weights adds.
"""

from __future__ import annotations

import copy
import dataclasses
from functools import cache

import numpy as np
import pytest
from helpers import (
    DTYPES,
    from_storage,
    key_tiles,
    paired_buffers,
    poisoned,
    read_guarded,
    relative_error,
    rounded_operands,
    run,
    sinks_of,
    step_state_at,
    to_storage,
    with_poison,
)

from llmcl import reference
from llmcl.attention.masks import sliding_window, soft_cap
from llmcl.attention.mods import bind_mods, trace_mods
from llmcl.errors import UsageError
from llmcl.kernels.common.attention import AttentionShape, TileRequest
from llmcl.kernels.common.mods import NO_MODS
from llmcl.kernels.cpu.attention import PAIRED
from llmcl.kernels.cpu.dot_product import bf16_dot_form
from llmcl.kernels.nvidia import VARIANTS as PTX_VARIANTS
from llmcl.kernels.portable.attention import MANY_ROWS, MANY_ROWS_BLOCK, many_rows_local_bytes
from llmcl.ops.attention import attention_prefill, prefill_dtype, prefill_tiles
from llmcl.runtime.device import Device

TOLERANCE = {"float32": 5e-6, "float16": 5e-6, "bfloat16": 5e-6}
ROUNDED_WEIGHTS = 2e-3
CAPACITY = 640
LOG2_E = np.log2(np.e)

small, slow = pytest.mark.oclgrind, pytest.mark.slow

HEADS = [
    (3, 3, 32),
    (9, 3, 64),
    *(pytest.param(heads, marks=slow) for heads in [(4, 1, 80), (8, 1, 128)]),
]


@cache
def case(
    dtype: str,
    heads: tuple[int, int, int],
    n: int,
    position: int,
    capacity: int,
    rounds: bool = False,
    window: int | None = None,
    cap: float | None = None,
    slope: float = 0.0,
    with_sinks: bool = False,
    bidirectional: bool = False,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """qkv [n, heads, head_dim], keys and values as stored [n_kv_heads, capacity, head_dim], and the expected output.

    slope: by how much each score is above that of the key before it, beside what is random.
    """
    n_q_heads, n_kv_heads, head_dim = heads
    rng = np.random.default_rng(n + position)
    qkv = rng.standard_normal((n, n_q_heads + 2 * n_kv_heads, head_dim)).astype(np.float32)
    qkv[:, :n_q_heads] *= 2.0
    qkv[:, n_q_heads:] = np.nan  # keys and values come from the cache
    kv_len = position + n
    keys, values = rng.standard_normal((2, n_kv_heads, capacity, head_dim))
    if slope:
        qkv[:, :n_q_heads, 0], keys[:, :, 0] = head_dim**0.5, slope * np.arange(capacity)
    keys[:, kv_len:] = values[:, kv_len:] = np.nan
    keys, values = to_storage(keys, dtype), to_storage(values, dtype)
    seen = [from_storage(rows[:, :kv_len], dtype).swapaxes(0, 1) for rows in (keys, values)]
    queries, scale = qkv[:, :n_q_heads], head_dim**-0.5
    if rounds:  # the queries as the kernel holds them, with the scale in them and, without a score_mod, log2(e)
        unit = 1.0 if cap else LOG2_E
        queries, scale = reference.round_bfloat16(queries * np.float32(scale * unit)), 1.0 / unit
        seen = [reference.round_bfloat16(rows) for rows in seen]
    sinks = sinks_of(n_q_heads) if with_sinks else None
    rules = {"window": window, "cap": cap, "sinks": sinks}
    if bidirectional:  # each query as if it was the last one
        rows = [reference.attention(query[None], *seen, kv_len - 1, scale, **rules) for query in queries]
        return qkv, keys, values, np.concatenate(rows)
    expected = reference.attention(queries, *seen, position, scale, **rules)
    return qkv, keys, values, expected


def check(
    device: Device,
    dtype: str,
    heads: tuple[int, int, int],
    n: int,
    position: int,
    *,
    capacity: int = CAPACITY,
    exact: bool = True,
    window: int | None = None,
    cap: float | None = None,
    slope: float = 0.0,
    with_sinks: bool = False,
    bidirectional: bool = False,
    **tiles: int,
) -> None:
    n_q_heads, n_kv_heads, head_dim = heads
    how = {"exact_queries": exact, "bidirectional": bidirectional}
    shape = AttentionShape(n_q_heads, n_kv_heads, head_dim, capacity, dtype, **how)
    tolerance = rounded_operands(device, dtype, TOLERANCE[dtype])
    rounds = prefill_dtype(device, shape) == PAIRED
    if rounds:
        tolerance = ROUNDED_WEIGHTS
    rules = window, cap, slope, with_sinks, bidirectional
    qkv, keys, values, expected = case(dtype, heads, n, position, capacity, rounds, *rules)
    mods = bind_mods(device, *trace_mods(soft_cap(cap), sliding_window(window))) if window and cap else NO_MODS
    out = poisoned(device, (n, n_q_heads, head_dim))
    launches = attention_prefill(
        device,
        shape,
        with_poison(device, qkv),
        step_state_at(device, position=position, n_tokens=n),
        with_poison(device, key_tiles(keys)),
        with_poison(device, values),
        out,
        request=TileRequest(**tiles) if tiles else None,
        mods=mods,
        sinks=with_poison(device, sinks_of(n_q_heads)) if with_sinks else None,
    )
    run(launches, n)
    assert relative_error(read_guarded(device, out, np.float32, expected.shape), expected) < tolerance


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("n", [1, 7, 8, 9, 31, 32, 33])
@pytest.mark.parametrize("position", [0, 37])
def test_around_a_tile(target: Device, heads: tuple[int, int, int], n: int, position: int) -> None:
    check(target, "float32", heads, n, position)


@pytest.mark.parametrize(
    ("dtype", "n"), [*(("float32", n) for n in (1, 8, 33)), pytest.param("float32", 17, marks=small), ("float16", 577)]
)
def test_bidirectional(target: Device, dtype: str, n: int) -> None:
    """Every query sees all keys of the step."""
    check(target, dtype, (3, 3, 32), n, 0, bidirectional=True)


@pytest.mark.parametrize(
    ("dtype", "heads", "rules", "exact"),
    [
        pytest.param("float32", (3, 3, 32), {}, True, marks=small),  # whose queries are exact in any case
        *(("float16", (9, 3, 64), {}, exact) for exact in (True, False)),
        *(("float16", (3, 3, 32), {"window": 70, "cap": 3.0}, exact) for exact in (True, False)),
    ],
)
def test_sinks(target: Device, dtype: str, heads: tuple[int, int, int], rules: dict[str, int], exact: bool) -> None:
    check(target, dtype, heads, 33, 100, exact=exact, with_sinks=True, **rules)


@pytest.mark.parametrize(
    ("dtype", "heads"),
    [("float32", (3, 3, 32)), *((dtype, (9, 3, 64)) for dtype in DTYPES)],
)
@pytest.mark.parametrize("position", [0, 63])
def test_long(target: Device, dtype: str, heads: tuple[int, int, int], position: int) -> None:
    check(target, dtype, heads, 577, position)


@pytest.mark.parametrize(
    ("dtype", "heads"),
    [
        ("float16", (3, 3, 32)),
        ("float16", (4, 1, 80)),
        ("bfloat16", (8, 1, 128)),
        pytest.param("float16", (4, 2, 256), marks=slow),
    ],
)
def test_reduced_cache(target: Device, dtype: str, heads: tuple[int, int, int]) -> None:
    check(target, dtype, heads, 33, 100)


@pytest.mark.parametrize("variant", ["cpu"])
@pytest.mark.parametrize(
    ("dtype", "heads", "n", "position"),
    [
        *(("float16", (3, 3, 32), n, position) for n in (1, 7, 33) for position in (0, 37)),
        ("float16", (9, 3, 64), 577, 63),
        ("bfloat16", (4, 1, 80), 33, 100),
    ],
)
def test_rounded_to_bfloat16(target: Device, dtype: str, heads: tuple[int, int, int], n: int, position: int) -> None:
    check(target, dtype, heads, n, position, exact=False)


@pytest.mark.parametrize("variant", ["cpu"])
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("slope", [0.25, -0.25])
def test_scores_that_rise_and_fall(target: Device, exact: bool, slope: float) -> None:
    """By 16 a step of 64 keys: where they rise each step raises the references, where they fall none does."""
    check(target, "float16", (3, 3, 32), 33, 200, exact=exact, slope=slope)


@pytest.mark.parametrize("variant", ["cpu"])
def test_rounded_to_bfloat16_under_rules(target: Device) -> None:
    """A window that hides whole tiles and parts of others, and a soft cap."""
    check(target, "float16", (3, 3, 32), 90, 101, exact=False, window=70, cap=3.0)


@pytest.mark.parametrize("variant", ["cpu"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("position", "n"), [(0, 1), (0, 33), (37, 12)])
def test_pair_cache(target: Device, dtype: str, position: int, n: int) -> None:
    """The rounded keys and values: bit for bit, and no value where there is no key."""
    if not bf16_dot_form(target):
        pytest.skip("the processor or the driver has no dot product of bfloat16")
    heads, end = (3, 3, 32), position + n
    qkv, keys, values, _ = case(dtype, heads, n, position, 64)
    step = step_state_at(target, position=position, n_tokens=n)
    operands = [with_poison(target, rows) for rows in (qkv, key_tiles(keys), values)]
    launches = attention_prefill(
        target, AttentionShape(*heads, 64, dtype), operands[0], step, *operands[1:], poisoned(target, (n, 3, 32))
    )
    paired = paired_buffers(step, 3 * 64 * 32)
    for buffer in paired:
        target.fill(buffer, np.uint32(0x7FC07FC0))
    run(launches[:1], n)
    rows = -(-end // 16) * 16
    stored = [from_storage(x[:, :rows], dtype) for x in (keys, values)]
    stored[1][:, end:] = 0.0
    for buffer, expected in zip(paired, reference.pair_cache(*stored), strict=True):
        found = target.read(buffer, np.uint16, (3, 64 * 32))[:, : rows * 32].reshape(expected.shape)
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("dtype", "heads"), [("float16", (9, 3, 64)), ("bfloat16", (8, 1, 128)), ("bfloat16", (4, 2, 256))]
)
@pytest.mark.parametrize("n", [63, 64, 65, 127, 128, 129, 300])
@pytest.mark.parametrize("position", [0, 63, 130])
def test_around_a_wide_tile(
    target: Device, variant: str, dtype: str, heads: tuple[int, int, int], n: int, position: int
) -> None:
    if variant not in PTX_VARIANTS:
        pytest.skip("this variant's tiles are narrower")
    check(target, dtype, heads, n, position)


@pytest.mark.parametrize(
    ("heads", "block_m", "block_n", "dv_tile"),
    [((9, 3, 64), 8, 16, 16), ((9, 3, 64), 16, 64, 32), ((8, 1, 128), 8, 32, 64)],
)
@pytest.mark.parametrize(("n", "position"), [(17, 0), (65, 1), (33, 128)])
def test_tile_sizes(
    target: Device, heads: tuple[int, int, int], block_m: int, block_n: int, dv_tile: int, n: int, position: int
) -> None:
    check(target, "float16", heads, n, position, block_m=block_m, block_n=block_n, dv_tile=dv_tile)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["portable"])
@pytest.mark.parametrize(
    ("dtype", "heads", "block_n", "rules"),
    [
        ("float16", (9, 3, 64), 64, {}),
        ("float16", (9, 3, 64), 32, {"window": 70, "cap": 3.0}),
        ("bfloat16", (8, 1, 128), 64, {}),
    ],
)
@pytest.mark.parametrize(("n", "position"), [(1, 0), (64, 63), (129, 130)])
def test_many_rows_of_a_work_item(
    target: Device, dtype: str, heads: tuple[int, int, int], block_n: int, rules: dict[str, int], n: int, position: int
) -> None:
    if many_rows_local_bytes(heads[2], block_n) > target.entry.local_mem_bytes:
        pytest.skip("the device has not enough local memory for it")
    request = TileRequest(block_m=MANY_ROWS_BLOCK, block_n=block_n)
    assert prefill_tiles(target, heads[2], dtype, request=request).extra == {"ITEM_ROWS": MANY_ROWS}
    check(target, dtype, heads, n, position, block_m=MANY_ROWS_BLOCK, block_n=block_n, **rules)


@small
@pytest.mark.parametrize(("dtype", "n", "position"), [("float32", 3, 0), ("bfloat16", 9, 14)])
def test_few_tokens(target: Device, dtype: str, n: int, position: int) -> None:
    check(target, dtype, (2, 1, 32), n, position, capacity=64, block_m=8, block_n=16, dv_tile=16)


def test_the_cache_can_be_full(target: Device) -> None:
    check(target, "float32", (3, 3, 32), 40, CAPACITY - 40)


def test_query_without_effect_of_later_keys(target: Device) -> None:
    """The last token's key and value change nothing for those before it."""
    n, heads = 50, (3, 3, 32)
    qkv, keys, values, _ = case("float32", heads, n, 0, CAPACITY)
    outputs = []
    for last in (0.0, 1e30):
        changed = keys.copy(), values.copy()
        for rows in changed:
            rows[:, n - 1] = last
        out = poisoned(target, (n, 3, 32))
        launches = attention_prefill(
            target,
            AttentionShape(*heads, CAPACITY, "float32"),
            with_poison(target, qkv),
            step_state_at(target, position=0, n_tokens=n),
            with_poison(target, key_tiles(changed[0])),
            with_poison(target, changed[1]),
            out,
        )
        run(launches, n)
        outputs.append(read_guarded(target, out, np.float32, (n, 3, 32)))
    np.testing.assert_array_equal(outputs[0][:-1], outputs[1][:-1])
    assert not np.array_equal(outputs[0][-1], outputs[1][-1])


@pytest.mark.parametrize(
    ("tiles", "message"),
    [
        ({"block_n": 24}, "BLOCK_N is 24; expected 16, 32 or 64"),
        ({"dv_tile": 48}, r"DV_TILE is 48; expected a divisor of head_dim 64: \[16, 32, 64\]"),
    ],
)
def test_tiles_that_do_not_fit_the_shape(target: Device, tiles: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check(target, "float32", (9, 3, 64), 3, 0, **tiles)


@pytest.mark.parametrize("variant", ["portable"])
@pytest.mark.parametrize(
    ("dtype", "heads"), [("float32", (2, 1, 512)), pytest.param("float16", (2, 1, 768), marks=slow)]
)
def test_keys_in_slices(target: Device, dtype: str, heads: tuple[int, int, int]) -> None:
    """Heads that a small local memory has no room for as a whole."""
    small = copy.copy(target)
    small.entry = dataclasses.replace(target.entry, local_mem_bytes=heads[2] * 60)
    assert "KEY_DIMS" in prefill_tiles(small, heads[2], dtype, variant="portable").extra
    check(small, dtype, heads, 11, 7, capacity=64)


@pytest.mark.parametrize("variant", ["portable"])
def test_tiles_that_do_not_fit_the_device(target: Device) -> None:
    with pytest.raises(UsageError, match="BLOCK_M is 12; expected a multiple of 8"):
        check(target, "float32", (9, 3, 64), 3, 0, block_m=12)
    small = copy.copy(target)
    small.entry = dataclasses.replace(target.entry, local_mem_bytes=16384)
    with pytest.raises(UsageError, match=r"bytes of local memory, .* has .*; lower BLOCK_M"):
        check(small, "float32", (9, 3, 64), 3, 0, block_m=128)
