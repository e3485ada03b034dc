"""attention_decode and attention_merge: largest difference over the largest expected magnitude.

The twin attends to the keys and values as the cache stores them, the new key included (it is read back, after it was
compared on its own), so one tolerance, which covers float32 scores and sums, holds for every dtype of the cache.
"""

from __future__ import annotations

import numpy as np
import pytest
from helpers import (
    from_key_tiles,
    from_storage,
    key_tiles,
    poisoned,
    read_guarded,
    relative_error,
    rotations,
    run,
    sinks_of,
    step_state_at,
    to_storage,
    with_poison,
)

from llmcl import reference
from llmcl.errors import UsageError
from llmcl.kernels.common.attention import AttentionShape
from llmcl.kernels.portable.attention import PortableAttentionDecode
from llmcl.ops.attention import attention_decode, attention_merge
from llmcl.runtime.device import Device, Launch

TOLERANCE = {"float32": 5e-6, "float16": 5e-6, "bfloat16": 5e-6}
# The float32 rotation may round to the cache's type the other way: one unit of that type.
KEY_TOLERANCE = {"float32": 1e-6, "float16": 2.0**-10, "bfloat16": 2.0**-7}
MERGE_TOLERANCE = 1e-6
CAPACITY = 640

small, slow = pytest.mark.oclgrind, pytest.mark.slow
small_portable = pytest.mark.oclgrind("portable")  # which cannot run the CPU variant of decode

# (query heads, KV heads, head_dim): group sizes 1, 3, 4, 8 and one that is no power of two and above 8.
HEADS = [
    (3, 3, 32),
    (9, 3, 64),
    (8, 1, 128),
    *(pytest.param(heads, marks=slow) for heads in [(4, 1, 80), (24, 2, 48)]),
]
KV_LENGTHS = [1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 577]


def check(
    device: Device,
    dtype: str,
    heads: tuple[int, int, int],
    kv_len: int,
    n_splits: int,
    *,
    capacity: int = CAPACITY,
    query_gain: float = 1.0,
    with_sinks: bool = False,
) -> None:
    n_q_heads, n_kv_heads, head_dim = heads
    position = kv_len - 1
    rng = np.random.default_rng(kv_len)
    shape = AttentionShape(n_q_heads, n_kv_heads, head_dim, capacity, dtype)
    qkv = rng.standard_normal((1, n_q_heads + 2 * n_kv_heads, head_dim)).astype(np.float32)
    qkv[:, :n_q_heads] *= query_gain
    rope = rotations(head_dim, np.array([position]))
    cache_shape = (n_kv_heads, capacity, head_dim)
    keys_before, values_before = rng.standard_normal(cache_shape), rng.standard_normal(cache_shape)
    for cache in keys_before, values_before:
        cache[:, position:] = np.nan  # the new token's place included
    keys_before, values_before = to_storage(keys_before, dtype), to_storage(values_before, dtype)
    k_cache, v_cache = with_poison(device, key_tiles(keys_before)), with_poison(device, values_before)
    part_ml, part_acc = poisoned(device, (n_q_heads, n_splits, 2)), poisoned(device, (n_q_heads, n_splits, head_dim))
    out = poisoned(device, (n_q_heads, head_dim))
    qkv_buffer = with_poison(device, qkv)
    sinks = sinks_of(n_q_heads) if with_sinks else None

    run(
        attention_decode(
            device,
            shape,
            qkv_buffer,
            with_poison(device, rope),
            step_state_at(device, position=position, n_tokens=1),
            k_cache,
            v_cache,
            part_ml,
            part_acc,
            out,
            n_splits=n_splits,
            sinks=None if sinks is None else with_poison(device, sinks),
        )
    )

    half = head_dim // 2
    rotated = reference.rope(qkv[:, :-n_kv_heads], rope[:, :half], rope[:, half:])
    storage = keys_before.dtype
    keys = from_key_tiles(read_guarded(device, k_cache, storage, (n_kv_heads, capacity // 16, head_dim, 16)))
    values = read_guarded(device, v_cache, storage, cache_shape)
    new_key = reference.round_to(rotated[0, n_q_heads:], dtype)
    assert relative_error(from_storage(keys[:, position], dtype), new_key) < KEY_TOLERANCE[dtype]
    np.testing.assert_array_equal(values[:, position], to_storage(qkv[0, -n_kv_heads:], dtype))
    others = np.s_[:, np.arange(capacity) != position]
    np.testing.assert_array_equal(keys[others].view(np.uint8), keys_before[others].view(np.uint8))
    np.testing.assert_array_equal(values[others].view(np.uint8), values_before[others].view(np.uint8))
    np.testing.assert_array_equal(read_guarded(device, qkv_buffer, np.float32, qkv.shape), qkv)

    seen = [from_storage(cache[:, :kv_len], dtype).swapaxes(0, 1) for cache in (keys, values)]
    expected = reference.attention_decode(rotated[:, :n_q_heads], *seen, position, sinks=sinks)[0]
    assert relative_error(read_guarded(device, out, np.float32, (n_q_heads, head_dim)), expected) < TOLERANCE[dtype]
    for buffer, width in (part_ml, 2), (part_acc, head_dim):
        read_guarded(device, buffer, np.float32, (n_q_heads, n_splits, width))


@pytest.mark.parametrize(
    ("dtype", "heads", "n_splits"),
    [
        pytest.param("float32", (4, 1, 32), 1, marks=small_portable),
        pytest.param("float16", (9, 3, 64), 1, marks=slow),
        ("float16", (3, 3, 32), 3),
        pytest.param("bfloat16", (8, 1, 128), 2, marks=slow),
    ],
)
@pytest.mark.parametrize("kv_len", [1, 33, 577])
def test_sinks(target: Device, dtype: str, heads: tuple[int, int, int], n_splits: int, kv_len: int) -> None:
    """A sink counts once, however many splits there are; of some heads it counts nothing, or all but everything."""
    check(target, dtype, heads, kv_len, n_splits, with_sinks=True)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("kv_len", KV_LENGTHS)
def test_one_split(target: Device, heads: tuple[int, int, int], kv_len: int) -> None:
    check(target, "float32", heads, kv_len, 1)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kv_len", [1, 33, 65, 577])
def test_reduced_cache(target: Device, dtype: str, kv_len: int) -> None:
    check(target, dtype, (9, 3, 64), kv_len, 1)


@pytest.mark.parametrize(
    ("dtype", "heads"),
    [("float16", (8, 2, 128)), ("bfloat16", (12, 2, 64)), ("float16", (4, 1, 256)), ("bfloat16", (9, 1, 64))],
)
@pytest.mark.parametrize("kv_len", [577])
def test_groups_of_heads(target: Device, dtype: str, heads: tuple[int, int, int], kv_len: int) -> None:
    """Group sizes 4, 6 and 9: one, two and three fragments of the matrix units."""
    if target.entry.fact("ptx_arch") < 80 and heads[2] != 64:
        pytest.skip("only NVIDIA's variant has code of its own for heads of 128 and 256")
    check(target, dtype, heads, kv_len, 2)


@pytest.mark.parametrize(
    ("dtype", "heads", "n_splits"),
    [
        ("float32", (9, 3, 64), 7),
        ("float16", (3, 3, 32), 3),
        ("bfloat16", (8, 1, 128), 2),
    ],
)
@pytest.mark.parametrize("kv_len", [1, 64, 65, 577])
def test_splits_some_of_them_empty(
    target: Device, dtype: str, heads: tuple[int, int, int], n_splits: int, kv_len: int
) -> None:
    check(target, dtype, heads, kv_len, n_splits)


@small_portable
@pytest.mark.parametrize(("dtype", "n_splits", "kv_len"), [("float32", 1, 3), ("float16", 2, 33)])
def test_few_keys(target: Device, dtype: str, n_splits: int, kv_len: int) -> None:
    check(target, dtype, (4, 1, 32), kv_len, n_splits, capacity=64)


@small_portable
@pytest.mark.parametrize("variant", ["portable"])
@pytest.mark.parametrize(("dtype", "heads", "kv_len"), [("float16", (4, 1, 32), 33), ("float32", (3, 3, 80), 65)])
@pytest.mark.parametrize("one_split_keys", [1, 32])
def test_few_keys_in_splits(
    target: Device,
    dtype: str,
    heads: tuple[int, int, int],
    kv_len: int,
    one_split_keys: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the first split has all keys of a short context, a lower limit shows the others and their merge."""
    monkeypatch.setattr(PortableAttentionDecode, "one_split_keys", one_split_keys)
    check(target, dtype, heads, kv_len, 2, capacity=128)


@slow
@pytest.mark.parametrize("variant", ["cpu", "portable"])
@pytest.mark.parametrize("heads", [(3, 3, 16), (24, 1, 128), (16, 1, 256), (6, 1, 160)])
@pytest.mark.parametrize("kv_len", [65, 577])
def test_sizes_that_follow_from_the_shape(
    target: Device, variant: str, heads: tuple[int, int, int], kv_len: int
) -> None:
    if variant == "portable" and heads == (16, 1, 256) and target.entry.local_mem_bytes < 34880:
        with pytest.raises(UsageError, match="16 query heads of 256 for a KV head needs 34,880 bytes of local memory"):
            check(target, "bfloat16", heads, kv_len, 3)
    else:
        check(target, "bfloat16", heads, kv_len, 3)


@pytest.mark.parametrize("variant", ["portable"])
def test_merge_is_left_out_of_a_short_context(target: Device) -> None:
    assert [launch.first_position for launch in decode_launches(target, n_splits=3)] == [0, 256]
    assert [launch.first_position for launch in decode_launches(target, n_splits=1)] == [0]


def decode_launches(device: Device, n_splits: int) -> list[Launch]:
    shape = AttentionShape(4, 2, 32, CAPACITY, "float16")
    buffer = poisoned(device, (1,))
    step = step_state_at(device, position=0, n_tokens=1)
    return attention_decode(device, shape, *[buffer] * 2, step, *[buffer] * 5, n_splits=n_splits)


@pytest.mark.parametrize("n_splits", [7, 1])
def test_the_last_place_of_the_cache(target: Device, n_splits: int) -> None:
    check(target, "float32", (9, 3, 64), CAPACITY, n_splits)


def test_scores_too_large_for_exp(target: Device) -> None:
    """Scores of hundreds: without the running maximum exp would overflow."""
    check(target, "float32", (9, 3, 64), 577, 7, query_gain=100.0)


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize(("n_splits", "head_dim"), [(1, 64), pytest.param(5, 80, marks=small), (32, 32)])
def test_attention_merge(target: Device, n_splits: int, head_dim: int, with_sinks: bool) -> None:
    rng = np.random.default_rng(n_splits)
    n_heads = 5
    m = (20.0 * rng.standard_normal((n_heads, n_splits))).astype(np.float32)
    total = rng.uniform(1.0, 30.0, (n_heads, n_splits)).astype(np.float32)
    acc = rng.standard_normal((n_heads, n_splits, head_dim)).astype(np.float32)
    empty = rng.random((n_heads, n_splits)) < 0.4
    empty[0], empty[1] = True, False  # a head without keys, and one without an empty split
    m[empty], total[empty], acc[empty] = -np.inf, 0.0, np.nan

    shape = AttentionShape(n_heads, n_heads, head_dim, CAPACITY, "float32")
    out = poisoned(target, (n_heads, head_dim))
    part_ml = with_poison(target, np.stack([m, total], axis=2))
    step = step_state_at(target, position=0, n_tokens=1)
    sinks = sinks_of(n_heads) if with_sinks else None
    given = None if sinks is None else with_poison(target, sinks)
    run(attention_merge(target, shape, part_ml, with_poison(target, acc), out, step, n_splits=n_splits, sinks=given))
    actual = read_guarded(target, out, np.float32, (n_heads, head_dim))
    assert relative_error(actual, reference.attention_merge(m, total, acc, sinks)) < MERGE_TOLERANCE
    assert np.all(actual[0] == 0.0)
