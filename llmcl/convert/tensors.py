"""Converts tensor rows to another format and order, and writes the safetensors file."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmcl.checkpoint import Checkpoint
from llmcl.checkpoint.formats import FLOAT_FORMATS, dequantize, encode_floats, row_bytes
from llmcl.checkpoint.quantize import quantize_rows
from llmcl.errors import CheckpointError

CHUNK_VALUES = 1 << 22  # values converted at a time, to limit host memory


@dataclass(frozen=True)
class OutTensor:
    """A tensor to be written."""

    name: str  # in the result
    shape: tuple[int, ...]  # in the result; experts: [n_experts, rows, k]
    format: str  # a key of FORMATS
    source_format: str
    rows: Callable[[int, int], np.ndarray]  # rows(start, stop): source rows in result order, uint8 [n, row_bytes]
    importance: np.ndarray | None = None  # float32 [n, k], n experts or 1: how much errors in a column count

    @property
    def n_rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        return row_bytes(self.name, self.format, self.shape[-1])

    @property
    def nbytes(self) -> int:
        return self.n_rows * self.row_bytes

    def converted(self) -> Iterator[np.ndarray]:
        """Yields the rows in `format`, uint8 [n, row_bytes], some at a time.

        Raises CheckpointError for a value that is not finite in that format.
        """
        step = max(1, CHUNK_VALUES // self.shape[-1])
        for start in range(0, self.n_rows, step):
            stop = min(self.n_rows, start + step)
            rows = self.rows(start, stop)
            if self.format == self.source_format and self.format not in FLOAT_FORMATS:
                yield rows
                continue
            values = dequantize(self.source_format, rows)
            try:
                yield encode(values, self.format, self._importance(start, stop))
            except CheckpointError as error:
                raise CheckpointError(f"tensor {self.name}: {error}") from error

    def _importance(self, start: int, stop: int) -> np.ndarray | None:
        if self.importance is None:
            return None
        at = np.arange(start, stop) * len(self.importance) // self.n_rows
        columns: np.ndarray = self.importance[at]
        return columns


Pieces = Iterable[tuple[OutTensor, Iterator[np.ndarray]]]


def encode(values: np.ndarray, format: str, importance: np.ndarray | None = None) -> np.ndarray:
    """Encodes float32 [n, k] as stored rows, uint8 [n, row_bytes]. Raises CheckpointError for a nonfinite result.

    importance: see `quantize_rows`.
    """
    if format not in FLOAT_FORMATS:
        return quantize_rows(values, format, importance)
    stored = encode_floats(values, format)
    if not (np.isfinite(dequantize(format, stored)).all() and np.isfinite(values).all()):
        raise CheckpointError(
            f"a weight is NaN, infinite or too large for {FLOAT_FORMATS[format]}; expected finite weights"
            + ("; use --dtype bfloat16" if format == "F16" else "")
        )
    return stored


def synced(path: Path) -> None:
    """Flushes the file to disk, so that a rename cannot come first."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def write_safetensors(path: Path, pieces: Pieces, tensors: list[OutTensor]) -> None:
    """Writes a safetensors file (https://github.com/huggingface/safetensors): header length, JSON header, tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": tensor.format,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, rows in pieces:
            for part in rows:
                file.write(np.ascontiguousarray(part).data)
    synced(path)


def pairs_order(n_rows: int, head_dim: int, *, interleave: bool) -> np.ndarray:
    """Returns each result row's source row, int [n_rows].

    In Hugging Face's order a rotary pair is half a head apart; in GGUF's Llama order its rows are neighbours.
    interleave: converts Hugging Face to GGUF order; otherwise GGUF to Hugging Face.
    """
    shape = (-1, 2, head_dim // 2) if interleave else (-1, head_dim // 2, 2)
    order: np.ndarray = np.arange(n_rows).reshape(shape).swapaxes(1, 2).reshape(-1)
    return order


def checkpoint_rows(checkpoint: Checkpoint, name: str, *, interleaved: bool) -> Callable[[int, int], np.ndarray]:
    """Returns rows(start, stop) for a checkpoint tensor, with rotary pairs in the target's order."""
    info = checkpoint.tensors[name]
    wanted = interleaved and name.endswith((".q_proj.weight", ".k_proj.weight"))
    if info.rope_interleaved == wanted:
        return lambda start, stop: checkpoint.rows(name, start, stop)
    order = pairs_order(info.n_rows, checkpoint.config.head_dim, interleave=wanted)

    def rows(start: int, stop: int) -> np.ndarray:
        at = order[start:stop]
        first = int(at.min())
        stored: np.ndarray = checkpoint.rows(name, first, int(at.max()) + 1)[at - first]
        return stored

    return rows
