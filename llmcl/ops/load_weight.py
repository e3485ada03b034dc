"""load_weight and pack_weight: bring a checkpoint's matrix into the device's tiles, as numbers or as packed blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from llmcl.checkpoint.formats import FORMATS
from llmcl.checkpoint.low_bits import grid_words
from llmcl.kernels.common.dtype import NATIVE, QUANTIZED, TILE_ROWS, kernel_name
from llmcl.kernels.common.sizes import run_of
from llmcl.kernels.common.weight import Weight
from llmcl.kernels.table import op_launches
from llmcl.runtime.device import Buffer, Device

STAGING_BYTES = 32 << 20


class RowSource(Protocol):
    """The source of a matrix: rows as stored in the checkpoint."""

    @property
    def format(self) -> str: ...
    @property
    def row_bytes(self) -> int: ...
    @property
    def shape(self) -> tuple[int, ...]: ...

    def rows(self, start: int, stop: int) -> np.ndarray: ...


def load_weight(
    device: Device,
    weight: Weight,
    source: RowSource,
    flags: Buffer,
    flag: int,
    *,
    first_row: int = 0,
    tile_step: int = 1,
    tile_offset: int = 0,
    head_dim: int = 0,
    rotary_dim: int = 0,
    rope_interleaved: bool = False,
) -> Iterator[int]:
    """Copies `source` [n, k] on the device into rows first_row.. of `weight`. Yields the bytes done.

    A quantised part takes a source in the same format only, copied number for number. Any other part takes dequantised
    values. flags[flag] becomes 1 if a value is not finite.

    tile_step: 2 fills every other tile, beginning with tile_offset.
    head_dim: if positive, the rows are query or key heads, and the first rotary_dim dimensions rotate. Rotary pairs are
    moved half a head apart. In the source, pairs are neighbours (rope_interleaved) or half of rotary_dim apart (see
    tile_row.cl).
    """
    n_rows, k = source.shape
    per_chunk = max(1, min(n_rows, STAGING_BYTES // source.row_bytes))
    staging = device.alloc(per_chunk * source.row_bytes, "weight staging")
    grid_name = FORMATS[source.format].grid
    grid = device.upload(grid_words(grid_name), "lookup grid") if grid_name else staging
    first_tile = first_row // TILE_ROWS * tile_step + tile_offset
    last_tile = (first_row + n_rows - 1) // TILE_ROWS * tile_step + tile_offset
    parts = [p for p in weight.parts if p.first_tile <= last_tile and first_tile < p.first_tile + p.n_tiles]
    rotated = head_dim if rope_interleaved or rotary_dim < head_dim else 0
    where = (rotated, rotary_dim, rope_interleaved, tile_step, tile_offset)
    try:
        for start in range(0, n_rows, per_chunk):
            stop = min(n_rows, start + per_chunk)
            device.write(staging, source.rows(start, stop))
            for part in parts:
                scalars = (k, source.row_bytes, first_row + start, part.first_tile, part.n_tiles, flag, *where)
                op, columns = ("pack_weight", 32) if part.dtype in QUANTIZED else ("load_weight", 16)
                if op == "pack_weight" and NATIVE[source.format] != part.dtype:
                    raise ValueError(f"{weight.name}: {source.format} rows for a part of {part.dtype}")
                (launch,) = op_launches(
                    device,
                    op,
                    {"FORMAT": source.format, "WEIGHT": kernel_name(part.dtype)},
                    [staging, grid, part.buffer, flags, *map(np.int32, scalars)],
                    groups=(k // run_of(device, k, columns), stop - start),
                    local=(1, 1),
                )
                launch.share_kernel().enqueue()
            yield (stop - start) * source.row_bytes
    finally:
        staging.release()
        if grid is not staging:
            grid.release()
