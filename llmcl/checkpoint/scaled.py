"""Rows of a weight that several stored tensors make up: small numbers, their scales and perhaps zero points.

A row is assembled when it is read, so host memory never holds a whole model. Integers whose scales are float16 values
become a ggml block format with the same values. All other weights become floats, rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from llmcl.checkpoint.formats import FLOAT_FORMATS, encode_floats
from llmcl.checkpoint.low_bits import Float32
from llmcl.checkpoint.tensors import StoredTensor

# A function of (start, stop) that returns these rows: integers or float32 [rows, k], or float32 [rows, groups].
RowSource = Callable[[int, int], np.ndarray]
Columns = int | NDArray[np.int64]  # columns per group, or the group of each column

_BLOCK = 32
# Exact formats by the smallest and the largest integer that they hold.
_EXACT = {(-8, 7): "Q4_0", (-16, 15): "Q5_0", (-128, 127): "Q8_0"}


@dataclass(frozen=True)
class ScaledRows:
    """A `RowView`: numbers times scales, in `format`."""

    n_rows: int
    numbers: RowSource
    scales: RowSource
    columns: Columns
    format: str

    def __len__(self) -> int:
        return self.n_rows

    def __getitem__(self, rows: slice) -> np.ndarray:
        start, stop, _ = rows.indices(self.n_rows)
        numbers, scales = self.numbers(start, stop), self.scales(start, stop)
        if self.format in FLOAT_FORMATS:
            values = numbers.astype(np.float32)
            values *= by_column(scales, self.columns, values.shape[1])
            return encode_floats(values, self.format)
        assert isinstance(self.columns, int)
        return _blocks(self.format, numbers, np.repeat(scales, self.columns // _BLOCK, axis=1))


def scaled_weight(
    shape: tuple[int, int],
    numbers: RowSource,
    scales: RowSource,
    columns: Columns,
    float_format: str,
    bounds: tuple[int, int] | None = None,
) -> StoredTensor:
    """Returns the weight, in the smallest exact format, otherwise in `float_format`.

    bounds: the smallest and the largest possible number if `numbers` returns integers.
    """
    n, k = shape
    format = float_format
    if bounds in _EXACT and isinstance(columns, int) and columns % _BLOCK == 0 and k % columns == 0:
        with np.errstate(over="ignore"):
            values = scales(0, n)
            format = _EXACT[bounds] if np.array_equal(values.astype(np.float16), values) else float_format
    return StoredTensor(shape, format, np.empty(0, np.uint8), ScaledRows(n, numbers, scales, columns, format))


def by_column(groups: np.ndarray, columns: Columns, k: int) -> np.ndarray:
    """Repeats values by group for each column: [rows, groups] -> [rows, k]."""
    repeated: np.ndarray = np.repeat(groups, columns, axis=1)[:, :k] if isinstance(columns, int) else groups[:, columns]
    return repeated


def fields(words: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """Splits uint32 words into fields, the lowest first: [...] -> uint8 [..., 32 / bits].

    order: for each field of the result, its place in the word.
    """
    places = order or tuple(range(32 // bits))
    split = np.empty((*words.shape, len(places)), np.uint8)
    for i, place in enumerate(places):
        split[..., i] = words >> np.uint32(place * bits) & np.uint32((1 << bits) - 1)
    return split


def _blocks(format: str, numbers: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Returns rows in a block format: integers [rows, k] and scales [rows, k / 32] -> uint8 [rows, row_bytes]."""
    n_rows = len(numbers)
    numbers = numbers.astype(np.int8, copy=False).reshape(-1, _BLOCK)
    parts: list[np.ndarray] = [np.ascontiguousarray(scales).astype("<f2").view(np.uint8).reshape(-1, 2)]
    if format == "Q8_0":
        parts.append(numbers.view(np.uint8))
    else:
        codes = (numbers + np.int8(8 if format == "Q4_0" else 16)).view(np.uint8)
        if format == "Q5_0":
            parts.append(np.packbits(codes >> 4, axis=1, bitorder="little"))
        parts.append(codes[:, :16] & 15 | codes[:, 16:] << 4)
    return np.concatenate(parts, axis=1).reshape(n_rows, -1)


@cache
def e4m3() -> Float32:
    """Returns the values of FP8's 256 codes (OCP 8-bit floating point, E4M3): no infinities, two NaNs."""
    code = np.arange(256)
    exponent, fraction = code >> 3 & 15, code & 7
    size = np.where(exponent, (8 + fraction) * 2.0 ** (exponent - 10), fraction * 2.0**-9)
    size[code & 127 == 127] = np.nan
    values: Float32 = np.where(code < 128, size, -size).astype(np.float32)
    return values


def float32_of(format: str, items: np.ndarray) -> np.ndarray:
    """Returns the values of scales from their items."""
    values: np.ndarray = items
    if format == "BF16":
        values = (items.astype(np.uint32) << 16).view(np.float32)
    elif format == "F8_E4M3":
        values = e4m3()[items]
    elif format == "F8_E8M0":
        values = np.ldexp(np.float32(1), items.astype(np.int32) - 127)
    return values.astype(np.float32)
