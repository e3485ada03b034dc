"""Rows as checkpoints store them, and quantised weights on the device, that several kernel tests share."""

from __future__ import annotations

import numpy as np
from helpers import GUARD_WORDS, POISON, poisoned, read_guarded, run, small_config, to_storage, with_poison

from llmcl.kernels.common.dtype import TILE_ROWS, tile_bytes
from llmcl.kernels.common.step_state import StepState
from llmcl.kernels.common.weight import Weight, WeightPart
from llmcl.ops.embed import embed
from llmcl.ops.load_weight import load_weight
from llmcl.runtime.device import Device
from llmcl.tools.trials import StoredRows, random_blocks


def random_rows(format: str, n: int, k: int, seed: int = 0) -> StoredRows:
    """Every bit random, but for the floats, which are finite and of the size that weights have."""
    if format not in ("F32", "BF16"):
        return random_blocks(format, n, k, seed)
    floats = np.random.default_rng(seed).standard_normal((n, k)).astype(np.float32)
    stored = floats if format == "F32" else to_storage(floats, "bfloat16")
    return StoredRows(format, stored.view(np.uint8).reshape(n, -1), (n, k))


def quantized_weight(device: Device, rows: int, k: int, dtype: str, tiles_per_part: int = 0) -> Weight:
    """Zeros with poison after each part."""
    n_tiles = -(-rows // TILE_ROWS)
    most = tiles_per_part or n_tiles
    parts = []
    for first in range(0, n_tiles, most):
        count = min(most, n_tiles - first)
        tiles = np.zeros(count * tile_bytes(k, dtype), np.uint8)
        parts.append(WeightPart(with_poison(device, tiles), first, count, dtype))
    return Weight("test weight", rows, k, tuple(parts))


def load(device: Device, weight: Weight, source: StoredRows, **options: int) -> np.ndarray:
    flags = device.zeros(4 * 3, "flags")
    assert sum(load_weight(device, weight, source, flags, 1, **options)) == source.data.nbytes
    for part in weight.parts:
        words = device.read(part.buffer, np.uint32, (part.buffer.nbytes // 4,))
        assert np.all(words[-GUARD_WORDS:] == POISON), "written past the end of a part"
    return device.read(flags, np.int32, (3,))


def values_of(device: Device, weight: Weight) -> np.ndarray:
    """Every row of a weight, read as an embedding's."""
    step = StepState(device, weight.rows)
    step.write_tokens(np.arange(weight.rows), 0)
    x = poisoned(device, (weight.rows, weight.k))
    rope, seen = poisoned(device, (weight.rows, 32)), device.zeros(4 * weight.rows, "seen")
    frequencies = device.upload(small_config(head_dim=32).rotations()["main"], "frequencies")
    run(embed(device, weight, step, frequencies, x, rope, seen), weight.rows)
    return read_guarded(device, x, np.float32, (weight.rows, weight.k))
