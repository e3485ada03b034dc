"""latent_attention: largest difference over the largest expected magnitude, with the cache as it is stored."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import poisoned, read_guarded, relative_error, run, to_storage, with_poison
from parameters import each_value

from llmcl import reference
from llmcl.kernels.common.attention import AttentionShape
from llmcl.kernels.common.latent import LatentShape
from llmcl.kernels.common.mods import NO_MODS, Mods
from llmcl.kernels.common.step_state import StepState
from llmcl.ops.latent_attention import latent_attention
from llmcl.runtime.device import Device

TOLERANCE = 3e-6
DTYPES = ("float32", "float16", "bfloat16", "q8_0")
PAGE, TABLE = 64, [3, 0, 5, 1, 2, 7, 4, 6, 9, 8]
SIZES = {"small": (3, 32, 32, 48), "odd": (5, 48, 16, 32), "flash": (20, 512, 64, 256)}

small = pytest.mark.oclgrind


def cache_of(device: Device, rows: np.ndarray, dtype: str, capacity: int, *, paged: bool) -> tuple[object, np.ndarray]:
    """A cache with these rows, and NaN in all others; and the rows as it holds them."""
    stored = np.asarray(reference.round_to(rows, dtype), np.float32)
    at = np.arange(len(rows))
    if paged:
        at = np.asarray(TABLE)[at // PAGE] * PAGE + at % PAGE
    values = np.full((capacity, rows.shape[1]), np.nan if dtype != "q8_0" else 0.0, np.float32)
    values[at] = rows if dtype == "q8_0" else stored
    if dtype != "q8_0":
        return with_poison(device, to_storage(values, dtype)), stored
    bits = reference.pack_values(values[None])
    return with_poison(device, bits), reference.unpack_values(bits)[0][at]


def check(
    device: Device,
    sizes: tuple[int, int, int, int],
    dtype: str,
    n: int,
    position: int,
    *,
    n_splits: int = 1,
    paged: bool = False,
) -> None:
    heads, rank, rope, query = sizes
    rng = np.random.default_rng(position + n)
    capacity = 640
    cache, rows = cache_of(device, rng.standard_normal((position + n, rank + rope)), dtype, capacity, paged=paged)
    shape = LatentShape(
        AttentionShape(heads, 1, rank + rope, capacity, dtype, PAGE if paged else 0, query**-0.5), rank, query
    )
    absorbed = rng.standard_normal((n, heads, rank)).astype(np.float32)
    queries = rng.standard_normal((n, heads, query)).astype(np.float32)
    queries[..., : query - rope] = np.nan
    step = StepState(device, n, len(TABLE) if paged else 0)
    device.write(step.state, np.array([position, n, 0], np.int32))
    if paged:
        step.write_pages(TABLE)
    out = poisoned(device, (n, heads, rank))
    parts = poisoned(device, (n, heads, n_splits, 2)), poisoned(device, (n, heads, n_splits, rank))
    given = with_poison(device, absorbed), with_poison(device, queries), step, cache, *parts, out
    run(latent_attention(device, shape, *given, n_splits=n_splits), n)
    expected = reference.latent_attention(absorbed, queries[..., -rope:], rows, position, query**-0.5)
    assert relative_error(read_guarded(device, out, np.float32, expected.shape), expected) < TOLERANCE


@each_value(
    ("dtype", DTYPES),
    (
        "sizes,n,position",
        [
            ("small", 1, 0),
            pytest.param("small", 3, 15, marks=small),
            ("odd", 17, 0),
            ("flash", 2, 576),
            ("small", 1, 15),
            ("small", 1, 16),
        ],
    ),
)
def test_latent_attention(target: Device, sizes: str, n: int, position: int, dtype: str) -> None:
    check(target, SIZES[sizes], dtype, n, position)


@pytest.mark.parametrize("n_splits", [2, 3])
@pytest.mark.parametrize("position", [0, 17, 576])
def test_splits_of_the_keys(target: Device, position: int, n_splits: int) -> None:
    """Some of which have no keys."""
    check(target, SIZES["small"], "float32", 1, position, n_splits=n_splits)


@pytest.mark.parametrize("dtype", ["float16", "q8_0"])
def test_pages(target: Device, dtype: str) -> None:
    check(target, SIZES["small"], dtype, 5, 200, paged=True)


def test_rows_of_several_sequences(target: Device) -> None:
    """Each attends to its own pages, in splits."""
    heads, rank, rope, query = SIZES["small"]
    rng = np.random.default_rng(1)
    positions, sequences, pages = [70, 3], [1, 0], {0: [4], 1: [2, 0]}
    pool = rng.standard_normal((6 * PAGE, rank + rope)).astype(np.float32)
    shape = LatentShape(AttentionShape(heads, 1, rank + rope, len(pool), "float32", PAGE, 0.2), rank, query)
    absorbed = rng.standard_normal((2, heads, rank)).astype(np.float32)
    queries = rng.standard_normal((2, heads, query)).astype(np.float32)
    step = StepState(target, 2, 2, n_sequences=2)
    for sequence, position in zip(sequences, positions, strict=True):
        step.write_sequence(sequence, position, 0)
        step.write_pages(pages[sequence], sequence)
    step.write_rows(sequences, 0)
    out, n_splits = poisoned(target, (2, heads, rank)), 2
    parts = poisoned(target, (2, heads, n_splits, 2)), poisoned(target, (2, heads, n_splits, rank))
    given = with_poison(target, absorbed), with_poison(target, queries), step, with_poison(target, pool), *parts, out
    run(latent_attention(target, shape, *given, n_splits=n_splits), 2)
    found = read_guarded(target, out, np.float32, (2, heads, rank))
    for i, (sequence, position) in enumerate(zip(sequences, positions, strict=True)):
        at = np.arange(position + 1)
        rows = pool[np.asarray(pages[sequence])[at // PAGE] * PAGE + at % PAGE]
        expected = reference.latent_attention(absorbed[i : i + 1], queries[i : i + 1, :, -rope:], rows, position, 0.2)
        assert relative_error(found[i : i + 1], expected) < TOLERANCE


def test_mods(target: Device) -> None:
    """A window and a slope of each head, as a family's rules and a user's are."""
    from llmcl.attention.masks import sliding_window
    from llmcl.attention.mods import bind_mods, trace_mods

    slopes = np.array([0.5, 0.0, 0.1], np.float32)

    def slope(score: object, b: object, h: object, q_idx: object, kv_idx: object) -> object:
        return score + slopes[h] * (kv_idx - q_idx)  # type: ignore[index,operator]

    window, (heads, rank, rope, query) = 20, SIZES["small"]
    mods: Mods = bind_mods(target, *trace_mods(slope, sliding_window(window)))
    assert mods is not NO_MODS
    rng = np.random.default_rng(2)
    n, position, capacity = 2, 60, 64
    rows = rng.standard_normal((position + n, rank + rope)).astype(np.float32)
    values = np.full((capacity, rank + rope), np.nan, np.float32)
    values[: len(rows)] = rows
    shape = LatentShape(AttentionShape(heads, 1, rank + rope, capacity, "float32", 0, 0.2), rank, query)
    absorbed = rng.standard_normal((n, heads, rank)).astype(np.float32)
    queries = rng.standard_normal((n, heads, query)).astype(np.float32)
    step = StepState(target, n)
    target.write(step.state, np.array([position, n, 0], np.int32))
    out = poisoned(target, (n, heads, rank))
    given = (
        with_poison(target, absorbed),
        with_poison(target, queries),
        step,
        with_poison(target, values),
        out,
        out,
        out,
    )
    run(latent_attention(target, shape, *given, n_splits=1, mods=mods), n)
    found = read_guarded(target, out, np.float32, (n, heads, rank))
    for t in range(n):
        at = np.arange(position + t + 1 - window, position + t + 1)
        full = np.concatenate([absorbed[t], queries[t, :, -rope:]], axis=1).astype(np.float64)
        scores = 0.2 * full @ rows[at].T.astype(np.float64) + slopes[:, None] * (at - position - t)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        expected = weights @ rows[at, :rank] / weights.sum(axis=1, keepdims=True)
        assert relative_error(found[t], expected) < TOLERANCE
