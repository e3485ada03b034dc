"""Matrices on the device, in the layout shared by all product kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from llmcl.kernels.common.dtype import NATIVE, QUANTIZED, TILE_ROWS, kernel_name, tile_bytes
from llmcl.kernels.common.sizes import local_size, run_of
from llmcl.runtime.device import Buffer, Device

STAGING_BYTES = 32 << 20


@dataclass(frozen=True)
class WeightPart:
    """Consecutive tiles of a weight in a single buffer and storage type."""

    buffer: Buffer
    first_tile: int
    n_tiles: int
    dtype: str


@dataclass(frozen=True)
class Weight:
    """A matrix [rows, k] as tiles of 16 rows (kernels/common/tiles.cl). Missing rows are zero.

    A weight has several parts if it exceeds the device's largest allocation, or if its matrices have different storage
    types. Tiles of two equal-sized matrices (gate and up) may alternate, to give a kernel both at hand.
    """

    name: str
    rows: int
    k: int
    parts: tuple[WeightPart, ...]
    exact_activations: bool = False  # keep activations in float32 beside quantised weights
    n_experts: int = 1  # experts, stacked by rows, each whole in a single part
    top_k: int = 1  # experts that a token needs

    @property
    def dtype(self) -> str:
        """Returns the storage type, or "mixed" for several types."""
        dtypes = {part.dtype for part in self.parts}
        return dtypes.pop() if len(dtypes) == 1 else "mixed"

    @property
    def n_tiles(self) -> int:
        return sum(part.n_tiles for part in self.parts)

    @property
    def nbytes(self) -> int:
        return sum(part.buffer.nbytes for part in self.parts)

    @property
    def token_bytes(self) -> int:
        """Returns the bytes that a decode step reads."""
        return self.nbytes * self.top_k // self.n_experts

    def rows_in(self, part: WeightPart) -> tuple[int, int]:
        """Returns a part's first row and number of matrix rows."""
        first = part.first_tile * TILE_ROWS
        return first, min(part.n_tiles * TILE_ROWS, self.rows - first)


def weight_bytes(rows: int, k: int, dtype: str) -> int:
    return -(-rows // TILE_ROWS) * tile_bytes(k, dtype)


def alloc_weight(
    device: Device,
    name: str,
    rows: int,
    k: int,
    dtype: str | Sequence[tuple[int, str]],
    *,
    exact_activations: bool = False,
    n_experts: int = 1,
    top_k: int = 1,
) -> Weight:
    """Allocates an uninitialised weight [rows, k]. Padding rows are zero.

    dtype: a storage type, or [(rows, dtype)] for row runs with different types. All runs except the last have whole
    tiles, and with n_experts all runs have whole experts.
    """
    runs = [(rows, dtype)] if isinstance(dtype, str) else dtype
    parts: list[WeightPart] = []
    first = 0
    for run_rows, run_dtype in runs:
        # Gate and up tiles stay together in pairs, and so do all tiles of an expert.
        unit = 2 if n_experts == 1 else rows // n_experts // TILE_ROWS
        most = max(unit, device.entry.max_alloc_bytes // tile_bytes(k, run_dtype) // unit * unit)
        end = first + -(-run_rows // TILE_ROWS)
        for start in range(first, end, most):
            count = min(most, end - start)
            buffer = device.alloc(count * tile_bytes(k, run_dtype), name, streamed=True)
            parts.append(WeightPart(buffer, start, count, run_dtype))
        first = end
    if rows % TILE_ROWS:
        device.fill(parts[-1].buffer, np.uint32(0))
    return Weight(name, rows, k, tuple(parts), exact_activations, n_experts, top_k)


class RowSource(Protocol):
    """The source of a matrix: rows as stored in the checkpoint."""

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
                kernel, columns = ("pack_weight", 32) if part.dtype in QUANTIZED else ("load_weight", 16)
                if kernel == "pack_weight" and NATIVE[source.format] != part.dtype:
                    raise ValueError(f"{weight.name}: {source.format} rows for a part of {part.dtype}")
                device.launch(
                    f"portable/{kernel}.cl",
                    kernel,
                    {"FORMAT": source.format, "WEIGHT": kernel_name(part.dtype)},
                    [staging, part.buffer, flags, *map(np.int32, scalars)],
                    groups=(k // run_of(device, k, columns), stop - start),
                    local=(1, 1),
                ).share_kernel().enqueue()
            yield (stop - start) * source.row_bytes
    finally:
        staging.release()


def fill_random(device: Device, weight: Weight, spread: float, seed: int) -> None:
    """Fills a weight on the device with random values around 0, variance spread^2 / 3: uniform in [-spread, spread), or
    random quants.

    Padding rows are filled as well; no kernel stores their results.
    """
    for part in weight.parts:
        width = local_size(device, 64)
        values = part.n_tiles * TILE_ROWS * weight.k
        count = values // (32 * TILE_ROWS) if part.dtype in QUANTIZED else values
        device.launch(
            "portable/random_weight.cl",
            "random_weight",
            {"WEIGHT": kernel_name(part.dtype)},
            [part.buffer, np.uint64(count), np.int32(weight.k), np.float32(spread), np.uint32(seed + part.first_tile)],
            groups=(device.compute_units * 64,),
            local=(width,),
        ).enqueue()
