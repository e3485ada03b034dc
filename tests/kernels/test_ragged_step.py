"""Steps of runs of several sequences: rope_append and attention_prefill over chunks, embed, gather_rows.

Error: largest difference over the largest expected magnitude, of each run. Keys, values and positions of runs differ.
The tolerances are those of the tests of a step of one sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from examples import examples
from helpers import (
    from_key_tiles,
    from_storage,
    key_tiles,
    poisoned,
    read_guarded,
    relative_error,
    rotations,
    rounded_operands,
    run,
    small_config,
    storage_type,
    to_storage,
    weight_on_device,
    with_poison,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from parameters import each_value

from llmcl import reference
from llmcl.attention.masks import sliding_window, soft_cap
from llmcl.attention.mods import bind_mods, trace_mods
from llmcl.kernels.common.attention import AttentionShape, TileRequest
from llmcl.kernels.common.mods import NO_MODS
from llmcl.kernels.common.ragged_step import Cut, RaggedStep, Run, pieces_of
from llmcl.kernels.common.step_state import StepState
from llmcl.kernels.cpu.attention import PAIRED
from llmcl.ops.attention import attention_prefill, prefill_dtype, rope_append
from llmcl.ops.embed import embed
from llmcl.ops.gather_rows import gather_rows
from llmcl.runtime.device import Device

PAGE, POOL, PLACES, ENTRIES = 64, 24, 6, 12
TOLERANCE, ROUNDED = 5e-6, 2e-2  # the second where a CPU rounds queries, keys and values to bfloat16
ROPE_TOLERANCE = 1e-6
small = pytest.mark.oclgrind


@dataclass(frozen=True)
class Text:
    """A chunk of n rows from `position` on, of the sequence at `place`."""

    place: int
    position: int
    n: int


# A prompt of one token beside one of hundreds, chunks that begin within a page or a tile, one that is all there is.
STEPS = [
    pytest.param(0, [Text(1, 0, 1)], id="one row"),
    pytest.param(2, [Text(4, 0, 3), Text(0, 70, 5)], marks=small, id="two prompts"),
    pytest.param(3, [Text(5, 3, 1), Text(1, 0, 300), Text(3, 63, 2), Text(0, 577, 33)], id="lengths"),
    pytest.param(0, [Text(2, 128, 64), Text(0, 0, 64), Text(1, 1, 127)], id="full tiles"),
]


def begin(device: Device, n_decoding: int, texts: Sequence[Text]) -> tuple[RaggedStep, list[list[int]]]:
    """The step state, whose first rows decode, and the page table of each text."""
    sampling = StepState(device, PLACES, ENTRIES, PLACES)
    step = RaggedStep(device, 400, sampling)
    free = [int(page) for page in np.random.default_rng(len(texts)).permutation(POOL)]
    tables = []
    for text in texts:
        n_pages = -(-(text.position + text.n) // PAGE)
        tables.append(free[:n_pages])
        del free[:n_pages]
        step.write_pages(tables[-1], text.place)
    return step, tables


def write(step: RaggedStep, n_decoding: int, texts: Sequence[Text], wanted: Sequence[int] = ()) -> None:
    decoding = [Run(0, 9) for _ in range(n_decoding)]
    step.write([*decoding, *(Run(text.place, text.position, [0] * text.n) for text in texts)], wanted)


def check(
    device: Device,
    dtype: str,
    heads: tuple[int, int, int],
    n_decoding: int,
    texts: Sequence[Text],
    *,
    exact: bool = True,
    window: int | None = None,
    cap: float | None = None,
    **tiles: int,
) -> None:
    n_q_heads, n_kv_heads, head_dim = heads
    rng = np.random.default_rng(len(texts))
    step, tables = begin(device, n_decoding, texts)
    shape = AttentionShape(*heads, POOL * PAGE, dtype, PAGE, exact_queries=exact)
    n = n_decoding + sum(text.n for text in texts)
    qkv = rng.standard_normal((n, n_q_heads + 2 * n_kv_heads, head_dim)).astype(np.float32)
    qkv[:n_decoding] = np.nan
    positions = np.concatenate([text.position + np.arange(text.n) for text in texts])
    rope = rotations(head_dim, np.concatenate([np.zeros(n_decoding, np.int64), positions]))
    half = head_dim // 2
    rotated = reference.rope(qkv[:, :-n_kv_heads], rope[:, :half], rope[:, half:])
    pools = np.full((2, n_kv_heads, POOL * PAGE, head_dim), np.nan, np.float32)
    keys, values, first = [], [], n_decoding
    rows_of = []
    for text, table in zip(texts, tables, strict=True):
        rows = (np.array(table)[:, None] * PAGE + np.arange(PAGE)).ravel()[: text.position + text.n]
        before = rng.standard_normal((2, n_kv_heads, text.position, head_dim))
        pools[:, :, rows[: text.position]] = before
        new = slice(first, first + text.n)
        new_rows = [rotated[new, n_q_heads:], qkv[new, -n_kv_heads:]]
        for all_rows, old, own in zip((keys, values), before, new_rows, strict=True):
            whole = np.concatenate([old.swapaxes(0, 1), own])
            all_rows.append(from_storage(to_storage(whole, dtype), dtype))
        rows_of.append(rows)
        first += text.n
    stored = [to_storage(pool, dtype) for pool in pools]
    k_cache, v_cache = with_poison(device, key_tiles(stored[0])), with_poison(device, stored[1])
    mods = bind_mods(device, *trace_mods(soft_cap(cap), sliding_window(window))) if window and cap else NO_MODS
    x, out = with_poison(device, qkv), poisoned(device, (n, n_q_heads, head_dim))
    request = TileRequest(**tiles) if tiles else None
    launches = [
        *rope_append(device, shape, x, with_poison(device, rope), step, k_cache, v_cache),
        *attention_prefill(device, shape, x, step, k_cache, v_cache, out, request=request, mods=mods),
    ]
    write(step, n_decoding, texts)
    run(launches, n)

    bits = storage_type(dtype)
    found_keys = from_key_tiles(read_guarded(device, k_cache, bits, (n_kv_heads, POOL * PAGE // 16, head_dim, 16)))
    found_values = read_guarded(device, v_cache, bits, (n_kv_heads, POOL * PAGE, head_dim))
    written = np.concatenate([rows[text.position :] for text, rows in zip(texts, rows_of, strict=True)])
    kept = np.setdiff1d(np.arange(POOL * PAGE), written)
    np.testing.assert_array_equal(found_keys[:, kept].view(np.uint8), stored[0][:, kept].view(np.uint8))
    np.testing.assert_array_equal(found_values[:, kept].view(np.uint8), stored[1][:, kept].view(np.uint8))
    unit = {"float32": 1e-6, "float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype]
    for i, rows in enumerate(rows_of):
        found = from_storage(found_keys[:, rows], dtype).swapaxes(0, 1)
        assert relative_error(found, keys[i]) < unit
        np.testing.assert_array_equal(from_storage(found_values[:, rows], dtype).swapaxes(0, 1), values[i])
        keys[i] = found
    tolerance = rounded_operands(device, dtype, TOLERANCE)
    if prefill_dtype(device, shape) == PAIRED:
        tolerance = ROUNDED
    spans = [(text.position, text.n) for text in texts]
    expected = reference.attention_of_runs(
        rotated[n_decoding:, :n_q_heads], keys, values, spans, window=window, cap=cap
    )
    attended = read_guarded(device, out, np.float32, (n, n_q_heads, head_dim))
    assert np.all(np.isnan(attended[:n_decoding]))
    first = 0
    for text in texts:
        part = slice(first, first + text.n)
        assert relative_error(attended[n_decoding:][part], expected[part]) < tolerance
        first += text.n


@each_value(("heads", [(9, 3, 64), (3, 3, 32)]), ("n_decoding,texts", STEPS))
def test_chunks_attend_to_their_own_sequence(
    target: Device, heads: tuple[int, int, int], n_decoding: int, texts: list[Text]
) -> None:
    check(target, "float32", heads, n_decoding, texts)


@pytest.mark.parametrize(
    ("dtype", "heads", "exact"),
    [("float16", (9, 3, 64), True), ("float16", (4, 2, 32), False), ("bfloat16", (8, 1, 128), False)],
)
def test_reduced_cache(target: Device, dtype: str, heads: tuple[int, int, int], exact: bool) -> None:
    check(target, dtype, heads, 3, [Text(5, 3, 1), Text(1, 0, 300), Text(3, 63, 2), Text(0, 577, 33)], exact=exact)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_rules(target: Device, dtype: str) -> None:
    """A window that hides whole tiles and parts of others, and a soft cap."""
    check(target, dtype, (9, 3, 64), 1, [Text(2, 300, 90), Text(0, 0, 200), Text(1, 80, 1)], window=70, cap=3.0)


def test_embed(device: Device) -> None:
    """Tokens that the host gives and tokens that were sampled, each at its position; latest positions by sequence."""
    hidden, head_dim, vocab = 48, 32, 131
    rng = np.random.default_rng(1)
    sampling = StepState(device, PLACES, ENTRIES, PLACES)
    step = RaggedStep(device, 20, sampling)
    sampled = rng.integers(0, vocab, PLACES).astype(np.int32)
    device.write(sampling.tokens, sampled)
    given = rng.integers(0, vocab, (2, 5)).tolist()
    step.write([Run(4, 70), Run(1, 3), Run(2, 7, given[0]), Run(0, 0, given[1])], [])
    tokens = np.array([sampled[4], sampled[1], *given[0], *given[1]])
    positions = np.array([70, 3, *range(7, 12), *range(5)])
    places = np.array([4, 1, *[2] * 5, *[0] * 5])
    table = rng.standard_normal((vocab, hidden)).astype(np.float32)
    rotation = small_config(head_dim=head_dim).rotations()["main"]
    x, rope = poisoned(device, (12, hidden)), poisoned(device, (12, head_dim))
    latest = np.full((PLACES, vocab), -1, np.int32)
    last_seen = with_poison(device, latest)
    run(
        embed(
            device, weight_on_device(device, table, "float32"), step, device.upload(rotation, "r"), x, rope, last_seen
        ),
        12,
    )
    np.testing.assert_array_equal(read_guarded(device, x, np.float32, (12, hidden)), table[tokens])
    expected = rotations(head_dim, positions)
    np.testing.assert_allclose(
        read_guarded(device, rope, np.float32, expected.shape), expected, rtol=0, atol=ROPE_TOLERANCE
    )
    np.maximum.at(latest, (places, tokens), positions)
    np.testing.assert_array_equal(read_guarded(device, last_seen, np.int32, latest.shape), latest)


@small
def test_gather_rows(device: Device) -> None:
    rng = np.random.default_rng(2)
    x = rng.standard_normal((9, 36)).astype(np.float32)
    step, _ = begin(device, 1, [Text(1, 0, 3), Text(0, 5, 5)])
    wanted = [0, 3, 8]
    out = poisoned(device, (3, 36))
    write(step, 1, [Text(1, 0, 3), Text(0, 5, 5)], wanted)
    run(gather_rows(device, step, with_poison(device, x), out, 36), 9)
    np.testing.assert_array_equal(read_guarded(device, out, np.float32, (3, 36)), reference.gather_rows(x, wanted))


@settings(max_examples=examples(200), deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 300)), min_size=1, max_size=5),
    size=st.sampled_from([0, 1, 12, 16, 128]),
    aligned=st.booleans(),
)
def test_pieces(lengths: list[tuple[int, int]], size: int, aligned: bool) -> None:
    """Each row is in one piece of its run, in order; no piece is too long, or reaches over a multiple of the size."""
    runs = [Run(i, position, [0] * n) for i, (position, n) in enumerate(lengths)]
    pieces = pieces_of(runs, Cut(size, aligned and size > 0), 3)
    rows = {}
    for place, first, n, position in pieces.tolist():
        assert n and (not size or n <= size)
        assert not (aligned and size) or position // size == (position + n - 1) // size
        rows |= {first + i: (place, position + i) for i in range(n)}
    expected = [(run.place, run.position + i) for run in runs for i in range(run.n_rows)]
    assert [rows[3 + i] for i in range(len(rows))] == expected and sum(pieces[:, 2]) == len(expected)
    ends = pieces[:, 2] + pieces[:, 3]
    assert np.all(ends[:-1] >= ends[1:])
