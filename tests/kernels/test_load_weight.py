"""load_weight: bit for bit what the format defines, rounded once to the device's dtype."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from helpers import DTYPES, GUARD_WORDS, poisoned, read_guarded, to_storage
from parameters import each_value
from stored_rows import StoredRows, random_rows

from llmcl import reference
from llmcl.kernels.common.dtype import TILE_ROWS
from llmcl.kernels.common.weight import Weight, WeightPart, alloc_weight, weight_bytes
from llmcl.ops.load_weight import load_weight
from llmcl.runtime.device import Device

FORMATS = tuple(reference.FORMATS)
small = pytest.mark.oclgrind


def from_floats(values: np.ndarray) -> StoredRows:
    return StoredRows("F32", values.astype(np.float32).view(np.uint8), values.shape)


def guarded_weight(device: Device, rows: int, k: int, dtype: str, tiles_per_part: int = 0) -> Weight:
    n_tiles = -(-rows // TILE_ROWS)
    most = tiles_per_part or n_tiles
    item = 4 if dtype == "float32" else 2
    parts = []
    for first in range(0, n_tiles, most):
        count = min(most, n_tiles - first)
        parts.append(WeightPart(poisoned(device, (count, k, TILE_ROWS), item), first, count, dtype))
    return Weight("test weight", rows, k, tuple(parts))


def tiles_of(device: Device, weight: Weight) -> np.ndarray:
    """The stored bits [n_tiles, k, 16]; fails where something was written past the end of a part."""
    storage = np.float32 if weight.dtype == "float32" else np.uint16
    parts = [read_guarded(device, p.buffer, storage, (p.n_tiles, weight.k, TILE_ROWS)) for p in weight.parts]
    return np.concatenate(parts)


def load(device: Device, weight: Weight, source: StoredRows, **options: int) -> np.ndarray:
    """Loads all rows; returns the flags, of which number 1 is this tensor's."""
    flags = device.zeros(4 * 3, "flags")
    assert sum(load_weight(device, weight, source, flags, 1, **options)) == source.data.nbytes
    return device.read(flags, np.int32, (3,))


def check(device: Device, dtype: str, source: StoredRows) -> None:
    rows, k = source.shape
    weight = guarded_weight(device, rows, k, dtype)
    np.testing.assert_array_equal(load(device, weight, source), [0, 0, 0])
    stored = reference.from_tiles(tiles_of(device, weight), rows)
    expected = to_storage(source.values(), dtype)
    np.testing.assert_array_equal(stored.view(f"u{stored.itemsize}"), expected.view(f"u{stored.itemsize}"))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rows", [pytest.param(1, marks=small), 15, 16, 17, 577])
def test_every_format(device: Device, format: str, rows: int) -> None:
    check(device, "float32", random_rows(format, rows, 512))


@each_value(("format", ["F32", "BF16", "Q5_1", "Q6_K"]), ("dtype", ["float16", "bfloat16"]))
def test_rounding(device: Device, format: str, dtype: str) -> None:
    check(device, dtype, random_rows(format, 131, 512))


def test_signed_zeros_and_extremes(device: Device) -> None:
    largest = float(np.finfo(np.float32).max)
    values = np.resize(np.array([0.0, -0.0, 1.0, -1.0, largest, -largest, 2.0**-126, 65504.0], np.float32), (2, 16))
    check(device, "float32", from_floats(values))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_ties_round_to_even(device: Device, dtype: str) -> None:
    unit = 2.0**-10 if dtype == "float16" else 2.0**-7
    steps = np.arange(16, dtype=np.float32)
    values = np.stack([1.0 + (steps + 0.5) * unit, -1.0 - (steps + 0.5) * unit, 1.0 + steps * unit / 3.0])
    check(device, dtype, from_floats(values))


def test_subnormal_float16(device: Device) -> None:
    check(device, "float16", from_floats(np.geomspace(2e-8, 1e-4, 64).reshape(4, 16)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_flagged(device: Device, dtype: str, bad: float) -> None:
    values = np.ones((17, 32), np.float32)
    values[16, 31] = bad
    weight = guarded_weight(device, 17, 32, dtype)
    np.testing.assert_array_equal(load(device, weight, from_floats(values)), [0, 1, 0])
    stored = reference.from_tiles(tiles_of(device, weight), 17)
    wide = reference.round_to(stored.view(np.float16) if dtype == "float16" else stored, "float32")
    if dtype != "bfloat16":
        np.testing.assert_array_equal(wide, values)


@pytest.mark.parametrize(("dtype", "largest", "too_large"), [("float16", 65519.0, 65520.0), ("bfloat16", 3e38, 3.4e38)])
def test_values_too_large_for_the_dtype_are_flagged(
    device: Device, dtype: str, largest: float, too_large: float
) -> None:
    values = np.full((16, 16), largest, np.float32)
    assert load(device, guarded_weight(device, 16, 16, dtype), from_floats(values))[1] == 0
    values[3, 4] = too_large
    assert load(device, guarded_weight(device, 16, 16, dtype), from_floats(values))[1] == 1


def test_two_tensors_in_one_weight(device: Device) -> None:
    """q, k and v one below the other, and no row of a neighbour is touched."""
    first, second = random_rows("F16", 48, 32, seed=1), random_rows("Q8_0", 19, 32, seed=2)
    weight = guarded_weight(device, 67, 32, "float32")
    load(device, weight, second, first_row=48)
    load(device, weight, first)
    expected = np.concatenate([first.values(), second.values()])
    np.testing.assert_array_equal(reference.from_tiles(tiles_of(device, weight), 67), expected)


@pytest.mark.parametrize("tiles_per_part", [0, 2])
def test_alternating_tiles(device: Device, tiles_per_part: int) -> None:
    gate, up = random_rows("F32", 80, 32, seed=1), random_rows("Q4_0", 80, 32, seed=2)
    weight = guarded_weight(device, 160, 32, "float32", tiles_per_part)
    load(device, weight, gate, tile_step=2, tile_offset=0)
    load(device, weight, up, tile_step=2, tile_offset=1)
    tiles = tiles_of(device, weight)
    np.testing.assert_array_equal(reference.from_tiles(np.ascontiguousarray(tiles[0::2]), 80), gate.values())
    np.testing.assert_array_equal(reference.from_tiles(np.ascontiguousarray(tiles[1::2]), 80), up.values())


@pytest.mark.parametrize(("n_heads", "head_dim"), [pytest.param(3, 32, marks=small), (2, 80), (1, 128)])
def test_rope_rows_are_put_back(device: Device, n_heads: int, head_dim: int) -> None:
    """The k projection of a GGUF file, below a q projection of as many rows."""
    rows = n_heads * head_dim
    source = random_rows("Q4_1", rows, 32)
    weight = guarded_weight(device, 2 * rows, 32, "float32")
    load(device, weight, source, first_row=rows, head_dim=head_dim, rotary_dim=head_dim, rope_interleaved=True)
    actual = reference.from_tiles(tiles_of(device, weight), 2 * rows)[rows:]
    np.testing.assert_array_equal(actual, reference.unpermute_rope_rows(source.values(), n_heads))


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [pytest.param(32, 24, marks=small), (16, 2), (80, 80)])
def test_rows_of_partly_rotated_heads(device: Device, head_dim: int, rotary_dim: int) -> None:
    source = random_rows("Q8_0", 3 * head_dim, 32)
    weight = guarded_weight(device, 3 * head_dim, 32, "float32")
    load(device, weight, source, head_dim=head_dim, rotary_dim=rotary_dim)
    actual = reference.from_tiles(tiles_of(device, weight), 3 * head_dim)
    np.testing.assert_array_equal(actual, reference.spread_rotary_rows(source.values(), 3, rotary_dim))


@pytest.mark.parametrize("staging_rows", [1, 7, 64])
def test_rows_come_in_several_pieces(device: Device, staging_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    source = random_rows("Q6_K", 96, 256)
    monkeypatch.setattr("llmcl.ops.load_weight.STAGING_BYTES", staging_rows * source.row_bytes + 5)
    weight = guarded_weight(device, 96, 256, "float32", tiles_per_part=2)
    load(device, weight, source, head_dim=32, rotary_dim=32, rope_interleaved=True)
    expected = reference.unpermute_rope_rows(source.values(), 3)
    np.testing.assert_array_equal(reference.from_tiles(tiles_of(device, weight), 96), expected)


@pytest.mark.parametrize(("tiles_that_fit", "parts"), [(1, [2, 2, 2, 2, 1]), (3, [2, 2, 2, 2, 1]), (5, [4, 4, 1])])
def test_a_weight_larger_than_an_allocation_is_split(
    device: Device, tiles_that_fit: int, parts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = random_rows("BF16", 131, 64)
    tile_bytes = TILE_ROWS * 64 * 2
    limited = dataclasses.replace(device.entry, max_alloc_bytes=max(2, tiles_that_fit) * tile_bytes)
    with monkeypatch.context() as patch:
        patch.setattr(device, "entry", limited)
        weight = alloc_weight(device, "a large weight", 131, 64, "bfloat16")
    assert [part.n_tiles for part in weight.parts] == parts
    assert [part.first_tile for part in weight.parts] == list(np.cumsum([0, *parts[:-1]]))
    assert weight.nbytes == weight_bytes(131, 64, "bfloat16") == 9 * tile_bytes

    assert not load(device, weight, source).any()
    tiles = np.concatenate([device.read(p.buffer, np.uint16, (p.n_tiles, 64, TILE_ROWS)) for p in weight.parts])
    np.testing.assert_array_equal(tiles, reference.to_tiles(to_storage(source.values(), "bfloat16")))


def test_guard_words_are_part_of_these_tests(device: Device) -> None:
    weight = guarded_weight(device, 16, 16, "float16")
    buffer = weight.parts[0].buffer
    device.write(buffer, np.zeros(1, np.uint32), buffer.nbytes - 4 * GUARD_WORDS)
    with pytest.raises(AssertionError, match="written past the end"):
        tiles_of(device, weight)
