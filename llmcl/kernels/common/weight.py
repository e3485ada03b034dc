"""Matrices on the device, in the layout shared by all product kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmcl.kernels.common.dtype import TILE_ROWS, tile_bytes
from llmcl.runtime.device import Buffer, Device


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
