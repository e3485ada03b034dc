"""Matrices on the device, in the one layout that every product kernel reads."""

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
    """Some consecutive tiles of a weight in one buffer, all of one storage type."""

    buffer: Buffer
    first_tile: int
    n_tiles: int
    dtype: str


@dataclass(frozen=True)
class Weight:
    """A matrix [rows, k] as tiles of 16 rows (kernels/common/tiles.cl), missing rows zero.

    Split over several parts where the device's largest allocation is too small for it, and where the matrices it
    is made of are stored in different types. Of two matrices of equal size the tiles may alternate (gate and up), so
    that one kernel has both at hand. exact_activations: quantised weights meet float32 activations even where the
    device would rather round those to 8 bits. n_experts: of a mixture of experts, whose matrices lie one below the
    other, each whole in one part; a token needs top_k of them.
    """

    name: str
    rows: int
    k: int
    parts: tuple[WeightPart, ...]
    exact_activations: bool = False
    n_experts: int = 1
    top_k: int = 1

    @property
    def dtype(self) -> str:
        """The storage type; of several "mixed"."""
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
        """What a decode step reads."""
        return self.nbytes * self.top_k // self.n_experts

    def rows_in(self, part: WeightPart) -> tuple[int, int]:
        """The first row that a part has, and how many of the matrix's rows."""
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
    """An uninitialised weight [rows, k]; its padding rows are zero.

    dtype: one storage type, or the runs of rows that have one each, [(rows, dtype)], all but the last whole tiles, and
    whole experts where there are n_experts.
    """
    runs = [(rows, dtype)] if isinstance(dtype, str) else dtype
    parts: list[WeightPart] = []
    first = 0
    for run_rows, run_dtype in runs:
        # A gate tile and its up tile are never separated, nor are the tiles of an expert.
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
    head_dim: int = 0,
    rotary_dim: int = 0,
    rope_interleaved: bool = False,
) -> Iterator[int]:
    """Copies `source` [n, k] into rows first_row.. of `weight`, on the device; yields bytes done.

    Into a quantised part goes a source of that very format, number for number; into any other it is dequantised.
    flags[flag] becomes 1 if a value is not finite. tile_step 2 fills every other tile, from tile_offset on.
    head_dim > 0: the rows are heads of queries or keys, of which the first rotary_dim dimensions rotate; rotary pairs
    come to lie half a head apart, whether they are stored next to each other (rope_interleaved) or half of rotary_dim
    apart (see tile_row.cl).
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
    """Values around 0 of variance spread^2 / 3, made on the device: uniform in [-spread, spread), or random quants.

    Padding rows are filled as well; no kernel stores theirs.
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
