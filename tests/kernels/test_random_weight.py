"""random_weight: a pure function of seed and index, exact in float32, rounded once to the device's dtype."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import DTYPES, poisoned, read_guarded, storage_type, to_storage

from llmcl.ops.dtype import TILE_ROWS
from llmcl.ops.weight import Weight, WeightPart, fill_random
from llmcl.runtime.device import Device


def expected_values(n: int, spread: float, seed: int) -> np.ndarray:
    x = np.arange(n, dtype=np.uint32) * np.uint32(0x9E3779B9) + np.uint32(seed)
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x21F0AAAD)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0xD35A2D97)
    x ^= x >> np.uint32(15)
    unit = (x >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1.0)
    return unit * np.float32(spread)


def filled(device: Device, dtype: str, n_tiles: int, k: int, spread: float, seed: int) -> np.ndarray:
    buffer = poisoned(device, (n_tiles, k, TILE_ROWS), np.dtype(storage_type(dtype)).itemsize)
    weight = Weight("test weight", n_tiles * TILE_ROWS, k, (WeightPart(buffer, 0, n_tiles, dtype),))
    fill_random(device, weight, spread, seed)
    return read_guarded(device, buffer, storage_type(dtype), (n_tiles * k * TILE_ROWS,))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n_tiles", "k"), [pytest.param(1, 16, marks=pytest.mark.oclgrind), (3, 80), (37, 576)])
def test_random_weight(target: Device, dtype: str, n_tiles: int, k: int) -> None:
    expected = to_storage(expected_values(n_tiles * k * TILE_ROWS, 0.125, 9), dtype)
    np.testing.assert_array_equal(filled(target, dtype, n_tiles, k, 0.125, 9), expected)


def test_values_are_spread_evenly(target: Device) -> None:
    values = filled(target, "float32", 37, 576, 0.1, 1)
    assert values.min() >= np.float32(-0.1)
    assert values.max() < np.float32(0.1)
    counts = np.histogram(values, bins=16, range=(-0.1, 0.1))[0]
    expected = values.size / 16
    assert np.sum((counts - expected) ** 2) / expected < 37.7  # chi-square, 15 degrees of freedom, p = 0.001
    assert not np.array_equal(values, filled(target, "float32", 37, 576, 0.1, 2))
