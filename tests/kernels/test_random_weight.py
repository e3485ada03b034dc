"""random_weight: a pure function of seed and index, exact in float32, rounded once to the device's dtype, or quants."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import DTYPES, poisoned, read_guarded, storage_type, to_storage, with_poison
from stored_rows import values_of

from llmcl.kernels.common.dtype import QUANTIZED, TILE_ROWS, tile_bytes
from llmcl.kernels.common.weight import Weight, WeightPart, alloc_weight
from llmcl.ops.random_weight import random_weight
from llmcl.runtime.device import Device


def random_bits(n: int, seed: int) -> np.ndarray:
    x = np.arange(n, dtype=np.uint32) * np.uint32(0x9E3779B9) + np.uint32(seed)
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x21F0AAAD)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0xD35A2D97)
    return x ^ (x >> np.uint32(15))


def expected_values(n: int, spread: float, seed: int) -> np.ndarray:
    unit = (random_bits(n, seed) >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1.0)
    return unit * np.float32(spread)


def filled(device: Device, dtype: str, n_tiles: int, k: int, spread: float, seed: int) -> np.ndarray:
    buffer = poisoned(device, (n_tiles, k, TILE_ROWS), np.dtype(storage_type(dtype)).itemsize)
    weight = Weight("test weight", n_tiles * TILE_ROWS, k, (WeightPart(buffer, 0, n_tiles, dtype),))
    random_weight(device, weight, spread, seed)
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


# Types whose bytes are compared; of the others only the values are.
TYPES = ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k", "mxfp4")


def expected_tiles(n_tiles: int, k: int, dtype: str, spread: float, seed: int) -> np.ndarray:
    """The bytes of quantised tiles, as random_weight.cl describes them."""
    if dtype == "mxfp4":
        blocks = random_bits(n_tiles * k // 32 * 68, seed).view(np.uint8).reshape(-1, 272)
        wanted = spread * np.sqrt(1 / (3 * 8.5625))  # the root of the mean square of a scale
        lower = np.floor(np.log2(wanted))
        share = ((wanted / 2**lower) ** 2 - 1) / 3
        blocks[:, :16] = 127 + lower + (blocks[:, :16] < 256 * share)
        return blocks.reshape(-1)
    kind, levels = QUANTIZED[dtype], {"q8": 256, "q6": 64, "q5": 32, "q4": 16}[dtype[:2]]
    has_min, is_super, q6 = dtype in ("q4_1", "q5_1", "q4_k", "q5_k"), kind.block == 256, dtype == "q6_k"
    n_blocks = n_tiles * k // kind.block
    blocks = random_bits(n_blocks * kind.tile_bytes // 4, seed).view(np.uint8).reshape(n_blocks, kind.tile_bytes)
    half = np.float32(0.5)
    mean = np.float32(63.5 if q6 else 47.5 if is_super else 1.0)
    bits = blocks[:, :32].copy().view("<u2")
    size = np.float32(2) * np.float32(spread) / np.float32(levels) / mean
    d = (size * (np.float32(0.75) + bits.astype(np.float32) * np.float32(2.0**-17))).astype(np.float16)
    d = d if has_min else np.where(bits % 2, d, -d)
    blocks[:, :32] = d.view(np.uint8)
    if has_min:
        m = (half if is_super else -half) * np.float32(levels - 1) * d.astype(np.float32)
        blocks[:, 32:64] = m.astype(np.float16).view(np.uint8)
    if is_super:
        head = 32 if q6 else 64
        sc = blocks[:, head:].reshape(n_blocks, 8, -1)[:, :, :32]
        if q6:
            sc[:] = np.where(sc < 128, 32 + sc % 64, 224 - sc % 64)
        else:
            sc[:, :, :16] = 32 + sc[:, :, :16] % 32
            sc[:, :, 16:] = sc[:, :, :16]
    return blocks.reshape(-1)


@pytest.mark.parametrize("dtype", TYPES)
def test_quantized_tiles(target: Device, dtype: str) -> None:
    k = 512
    buffer = with_poison(target, np.zeros(3 * tile_bytes(k, dtype), np.uint8))
    random_weight(target, Weight("test weight", 48, k, (WeightPart(buffer, 0, 3, dtype),)), 0.125, 9)
    expected = expected_tiles(3, k, dtype, 0.125, 9)
    np.testing.assert_array_equal(read_guarded(target, buffer, np.uint8, expected.shape), expected)


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_quantized_values_are_of_the_asked_size(default_device: Device, dtype: str) -> None:
    weight = alloc_weight(default_device, "test weight", 160, 512, dtype)
    random_weight(default_device, weight, 0.125, 9)
    values = values_of(default_device, weight)
    assert abs(values.mean()) < 0.02 * 0.125
    assert 0.9 < values.std() / (0.125 / np.sqrt(3)) < 1.1
