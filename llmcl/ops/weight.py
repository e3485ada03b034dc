"""Matrices on the device, in the one layout that every product kernel reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from llmcl.ops.dtype import ITEM_BYTES, KERNEL_NAMES
from llmcl.runtime.device import Buffer, Device

TILE_ROWS = 16
STAGING_BYTES = 32 << 20


@dataclass(frozen=True)
class WeightPart:
    """Some consecutive tiles of a weight in one buffer."""

    buffer: Buffer
    first_tile: int
    n_tiles: int


@dataclass(frozen=True)
class Weight:
    """A matrix [rows, k] as tiles [ceil(rows/16)][k][16] of `dtype`, missing rows zero.

    Split over several buffers only where the device's largest allocation is too small for it. `alternating`
    matrices hold two of equal size whose tiles alternate (gate and up), so that one kernel has both at hand.
    """

    name: str
    rows: int
    k: int
    dtype: str
    parts: tuple[WeightPart, ...]

    @property
    def n_tiles(self) -> int:
        return sum(part.n_tiles for part in self.parts)

    @property
    def nbytes(self) -> int:
        return sum(part.buffer.nbytes for part in self.parts)


def weight_bytes(rows: int, k: int, dtype: str) -> int:
    return -(-rows // TILE_ROWS) * TILE_ROWS * k * ITEM_BYTES[dtype]


def alloc_weight(device: Device, name: str, rows: int, k: int, dtype: str) -> Weight:
    """An uninitialised weight [rows, k]; its padding rows are zero."""
    n_tiles = -(-rows // TILE_ROWS)
    tile_bytes = TILE_ROWS * k * ITEM_BYTES[dtype]
    # An even number of tiles a part, so that a gate tile and its up tile are never separated.
    most = max(2, device.entry.max_alloc_bytes // tile_bytes // 2 * 2)
    parts = []
    for first in range(0, n_tiles, most):
        count = min(most, n_tiles - first)
        parts.append(WeightPart(device.alloc(count * tile_bytes, name), first, count))
    if rows % TILE_ROWS:
        last = parts[-1].buffer
        device.fill(last, np.uint32(0))
    return Weight(name, rows, k, dtype, tuple(parts))


class RowSource(Protocol):
    """Where a matrix comes from: rows as the checkpoint stores them."""

    @property
    def format(self) -> str: ...
    @property
    def row_bytes(self) -> int: ...
    @property
    def shape(self) -> tuple[int, ...]: ...

    def rows(self, start: int, stop: int) -> np.ndarray: ...


def load_rows(
    device: Device,
    weight: Weight,
    source: RowSource,
    flags: Buffer,
    flag: int,
    *,
    first_row: int = 0,
    tile_step: int = 1,
    tile_offset: int = 0,
    rope_head_dim: int = 0,
) -> Iterator[int]:
    """Copies `source` [n, k] into rows first_row.. of `weight`, dequantised on the device; yields bytes done.

    flags[flag] becomes 1 if a value is not finite. tile_step 2 fills every other tile, from tile_offset on.
    rope_head_dim > 0 restores Hugging Face's row order within each head (see load_weight.cl).
    """
    n_rows, k = source.shape
    per_chunk = max(1, min(n_rows, STAGING_BYTES // source.row_bytes))
    staging = device.alloc(per_chunk * source.row_bytes, "weight staging")
    constants: dict[str, object] = {
        "FORMAT": source.format,
        "WEIGHT": KERNEL_NAMES[weight.dtype],
        "K": k,
        "ROW_BYTES": source.row_bytes,
        "ROPE_HEAD_DIM": rope_head_dim,
        "TILE_STEP": tile_step,
        "TILE_OFFSET": tile_offset,
    }
    try:
        for start in range(0, n_rows, per_chunk):
            stop = min(n_rows, start + per_chunk)
            device.write(staging, source.rows(start, stop))
            for part in weight.parts:
                scalars = (first_row + start, part.first_tile, part.n_tiles, flag)
                device.launch(
                    "load_weight.cl",
                    "load_weight",
                    constants,
                    [staging, part.buffer, flags, *map(np.int32, scalars)],
                    groups=(k // 16, stop - start),
                    local=(1, 1),
                ).enqueue()
            yield (stop - start) * source.row_bytes
        device.finish()
    finally:
        staging.release()


def fill_random(device: Device, weight: Weight, spread: float, seed: int) -> None:
    """Uniform values in [-spread, spread), made on the device, padding rows included (no kernel stores theirs)."""
    for part in weight.parts:
        width = 1 if device.is_cpu else 64
        device.launch(
            "random_weight.cl",
            "random_weight",
            {"WEIGHT": KERNEL_NAMES[weight.dtype], "SPREAD": float(spread)},
            [part.buffer, np.uint64(part.n_tiles * TILE_ROWS * weight.k), np.uint32(seed + part.first_tile)],
            groups=(device.compute_units * 64,),
            local=(width,),
        ).enqueue()
