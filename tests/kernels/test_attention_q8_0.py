"""rope_append, attention_decode and attention_prefill with keys and values in q8_0.

What they append is held against the bound of the format: half a step, and the half-precision rounding of the step.
Attention is held against the twin over the cache as it is then, so that one tolerance covers float32 scores and sums.
Where the device rounds queries to 8 bits, or in prefill queries, keys and values to bfloat16, the twin's are rounded,
too; a query that the device's float32 rotation leaves on the other side of a tie costs one step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import paired_buffers, poisoned, read_guarded, relative_error, rotations, run, with_poison

from llmcl import reference
from llmcl.attention.masks import sliding_window, soft_cap
from llmcl.attention.mods import bind_mods, trace_mods
from llmcl.kernels.common.attention import AttentionShape
from llmcl.kernels.common.mods import NO_MODS
from llmcl.kernels.common.step_state import StepState
from llmcl.kernels.cpu.attention import PAIRED
from llmcl.kernels.cpu.dot_product import bf16_dot_form, dot_form
from llmcl.ops.attention import attention_decode, attention_prefill, prefill_dtype, rope_append
from llmcl.runtime.device import Device

EXACT, ROUNDED = 5e-6, 2e-3
CAPACITY, PAGE = 192, 64
TABLE = [4, 0, 3]  # of CAPACITY / PAGE pages in a pool of 5
WINDOW, CAP = 70, 3.0

small = pytest.mark.oclgrind("portable")  # which cannot run the CPU variant of decode
CASES = [  # heads; whether queries stay exact where the device would round them
    ((3, 3, 32), False),
    ((9, 3, 64), True),
    pytest.param((8, 1, 128), False, marks=pytest.mark.slow),
    pytest.param((4, 2, 256), False, marks=[pytest.mark.slow, pytest.mark.gpu]),
]


def eight_bits(x: np.ndarray) -> np.ndarray:
    """Queries as the 8-bit products take them: groups of 32, each with a float32 scale."""
    groups = x.reshape(*x.shape[:-1], -1, 32)
    d = np.abs(groups).max(axis=-1, keepdims=True) / 127.0
    return (np.trunc(groups / d + np.copysign(0.5, groups)) * d).reshape(x.shape)


def rounds_queries(device: Device, exact: bool) -> bool:
    return device.is_cpu and dot_form(device) > 0 and not exact


def widens(device: Device, shape: AttentionShape) -> bool:
    """Whether values, and in prefill keys, become float16 and not float32."""
    return prefill_dtype(device, shape) == "float16"


def within_the_format(actual: np.ndarray, x: np.ndarray) -> bool:
    """Whether values read back are those appended, up to what q8_0 rounds."""
    step = np.repeat(np.abs(x.reshape(*x.shape[:-1], -1, 32)).max(axis=-1) / 127.0, 32, axis=-1)
    return bool(np.all(np.abs(actual - x) <= 0.501 * step + 2.0**-10 * np.abs(x)))


class Cache:
    """Random keys and values of `position` tokens; what follows has scales of NaN. Contiguous or in pages."""

    def __init__(self, device: Device, heads: tuple[int, int, int], position: int, pages: bool, exact: bool):
        _, n_kv_heads, head_dim = heads
        rng = np.random.default_rng(position)
        rows = 5 * PAGE if pages else CAPACITY
        self.text = np.arange(CAPACITY)
        if pages:
            self.text = (np.array(TABLE)[:, None] * PAGE + np.arange(PAGE)).ravel()
        keys, values = np.full((2, n_kv_heads, rows, head_dim), np.nan)
        keys[:, self.text[:position]], values[:, self.text[:position]] = rng.standard_normal(
            (2, n_kv_heads, position, head_dim)
        )
        self.before = reference.pack_keys(keys), reference.pack_values(values)
        self.k, self.v = (with_poison(device, tiles) for tiles in self.before)
        self.shape = AttentionShape(*heads, rows, "q8_0", PAGE if pages else 0, exact_queries=exact)
        self._device = device

    def step(self, position: int, n: int) -> StepState:
        table = TABLE if self.shape.page_tokens else []
        step = StepState(self._device, n, len(table))
        self._device.write(step.state, np.array([position, n, 0], np.int32))
        if table:
            step.write_pages(table)
        return step

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values in the order of the text: float32 [n_kv_heads, CAPACITY, head_dim]."""
        k, v = (
            read_guarded(self._device, buffer, np.uint8, tiles.shape)
            for buffer, tiles in zip((self.k, self.v), self.before, strict=True)
        )
        return reference.unpack_keys(k)[:, self.text], reference.unpack_values(v)[:, self.text]

    def untouched(self, position: int, n: int) -> bool:
        """Whether nothing has changed but the places of n tokens from `position` on."""
        ours = (
            reference.unpack_keys(self.before[0])[:, self.text],
            reference.unpack_values(self.before[1])[:, self.text],
        )
        others = np.r_[0:position, position + n : CAPACITY]
        return all(
            np.array_equal(now[:, others], was[:, others], equal_nan=True)
            for now, was in zip(self.read(), ours, strict=True)
        )


def outputs(
    device: Device,
    heads: tuple[int, int, int],
    position: int,
    n: int,
    *,
    pages: bool = False,
    exact: bool = True,
    ruled: bool = False,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What n tokens append (keys, values) and attend to, checked against the twin. ruled: a window and a soft cap."""
    n_q_heads, n_kv_heads, head_dim = heads
    rng = np.random.default_rng(n)
    qkv = rng.standard_normal((n, n_q_heads + 2 * n_kv_heads, head_dim)).astype(np.float32)
    rope = rotations(head_dim, np.arange(position, position + n))
    cache = Cache(device, heads, position, pages, exact)
    step = cache.step(position, n)
    x, turned = with_poison(device, qkv), with_poison(device, rope)
    out = poisoned(device, (n, n_q_heads, head_dim))
    rules: dict[str, Any] = {"window": WINDOW, "cap": CAP} if ruled else {}
    mods = bind_mods(device, *trace_mods(soft_cap(CAP), sliding_window(WINDOW))) if ruled else NO_MODS
    if n == 1:
        n_splits = 2
        ml, acc = poisoned(device, (n_q_heads, n_splits, 2)), poisoned(device, (n_q_heads, n_splits, head_dim))
        parts = (ml, acc, out)
        run(
            attention_decode(
                device, cache.shape, x, turned, step, cache.k, cache.v, *parts, n_splits=n_splits, mods=mods
            )
        )
    else:
        run(rope_append(device, cache.shape, x, turned, step, cache.k, cache.v), n)
        run(attention_prefill(device, cache.shape, x, step, cache.k, cache.v, out, mods=mods), n)
    half = head_dim // 2
    rotated = reference.rope(qkv[:, :-n_kv_heads], rope[:, :half], rope[:, half:])
    keys, values = cache.read()
    new = np.s_[:, position : position + n]
    assert within_the_format(keys[new], rotated[:, n_q_heads:].swapaxes(0, 1))
    assert within_the_format(values[new], qkv[:, -n_kv_heads:].swapaxes(0, 1))
    assert cache.untouched(position, n)

    queries = rotated[:, :n_q_heads]
    seen = [rows[:, : position + n].swapaxes(0, 1) for rows in (keys, values)]
    in_pairs = n > 1 and prefill_dtype(device, cache.shape) == PAIRED
    rounds = in_pairs or rounds_queries(device, exact)
    if in_pairs:
        unit = head_dim**-0.5 if ruled else head_dim**-0.5 * np.log2(np.e)  # as the kernel scales them before
        queries = reference.round_bfloat16(queries * unit) / unit
        seen = [reference.round_bfloat16(rows) for rows in seen]
    elif rounds:
        queries = eight_bits(queries)
    elif widens(device, cache.shape):
        rounds = n > 1  # prefill's queries and weights, too
        seen = [rows.astype(np.float16) if rounds or rows is seen[1] else rows for rows in seen]
    expected = reference.attention(queries, *seen, position, **rules)
    actual = read_guarded(device, out, np.float32, expected.shape)
    assert relative_error(actual, expected) < (ROUNDED if rounds else EXACT)
    return actual, keys, values


@pytest.mark.parametrize(("heads", "exact"), CASES)
@pytest.mark.parametrize("position", [0, 15, 64, 191])
def test_decode(target: Device, heads: tuple[int, int, int], position: int, exact: bool) -> None:
    outputs(target, heads, position, 1, exact=exact)


@pytest.mark.parametrize(("heads", "exact"), CASES)
@pytest.mark.parametrize(("position", "n"), [(0, 33), (63, 129)])
def test_prefill(target: Device, heads: tuple[int, int, int], position: int, n: int, exact: bool) -> None:
    outputs(target, heads, position, n, exact=exact)


@small
@pytest.mark.parametrize(("position", "n"), [(19, 1), (14, 3)])
def test_few_tokens(target: Device, position: int, n: int) -> None:
    outputs(target, (3, 3, 32), position, n, exact=False)


@pytest.mark.slow
@pytest.mark.parametrize(("position", "n"), [(130, 1), (100, 37)])
def test_rules_and_pages(target: Device, position: int, n: int) -> None:
    """A window that hides whole tiles, a soft cap, and pages: the same bits as without pages."""
    heads = (9, 3, 64)
    found = [outputs(target, heads, position, n, pages=pages, exact=True, ruled=True) for pages in (True, False)]
    for paged, contiguous in zip(*found, strict=True):
        np.testing.assert_array_equal(paged, contiguous)


@pytest.mark.parametrize("variant", ["cpu"])
def test_pair_cache(target: Device) -> None:
    """The cache rounded to bfloat16 in pairs, from pages out of order: bit for bit."""
    if not bf16_dot_form(target):
        pytest.skip("the processor or the driver has no dot product of bfloat16")
    heads, position, n = (2, 2, 64), 70, 20
    cache = Cache(target, heads, position + n, True, False)
    step = cache.step(position, n)
    x, out = poisoned(target, (n, 6, 64)), poisoned(target, (n, 2, 64))
    run(attention_prefill(target, cache.shape, x, step, cache.k, cache.v, out)[:1], n)
    keys, values = cache.read()
    values[:, position + n :] = 0.0
    rows = -(-(position + n) // 16) * 16
    expected = reference.pair_cache(keys[:, :rows], values[:, :rows])
    for buffer, bits in zip(paired_buffers(step, 2 * CAPACITY * 64), expected, strict=True):
        found = target.read(buffer, np.uint16, (2, CAPACITY * 64))[:, : rows * 64].reshape(bits.shape)
        real = np.s_[:, : (position + n) // 16]  # keys that do not exist have scales of NaN
        np.testing.assert_array_equal(found[real], bits[real])


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_shows(target: Device, value: float) -> None:
    cache = Cache(target, (3, 3, 32), 3, False, True)
    qkv = np.ones((2, 9, 32), np.float32)
    qkv[0, 3:, 5] = value
    turned = with_poison(target, rotations(32, np.array([3, 4])))
    run(rope_append(target, cache.shape, with_poison(target, qkv), turned, cache.step(3, 2), cache.k, cache.v), 2)
    for rows in cache.read():
        assert not np.any(np.isfinite(rows[:, 3])) and np.all(np.isfinite(rows[:, 4]))
