"""Brings a vision part's tensors to the device, each checked for presence, shape and finite values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

from llmcl.architectures.config.limits import SIZE_MULTIPLE
from llmcl.checkpoint.files import read_view
from llmcl.checkpoint.formats import FLOAT_FORMATS, FORMATS, dequantize, row_bytes
from llmcl.checkpoint.tensors import StoredTensor, read_rows
from llmcl.errors import CheckpointError, UnsupportedModelError, shown
from llmcl.kernels.common.dtype import TILE_ROWS
from llmcl.kernels.common.weight import Weight, alloc_weight
from llmcl.ops.load_weight import RowSource, load_weight
from llmcl.runtime.device import Buffer, Device


def padded(columns: int) -> int:
    """Returns the columns of a matrix on the device: a multiple of 16. The last ones are zero."""
    return -(-columns // SIZE_MULTIPLE) * SIZE_MULTIPLE


@dataclass(frozen=True)
class _StoredRows:
    """A stored matrix as a source for `load_weight`."""

    data: np.ndarray  # uint8 [rows, row_bytes], mapped or in memory
    shape: tuple[int, int]
    format: str

    @property
    def row_bytes(self) -> int:
        return int(self.data.shape[1])

    def rows(self, start: int, stop: int) -> np.ndarray:
        return read_rows(self.data, start, stop)


class VisionTensors:
    """The tensors of a vision part by name. `finish` reports unread tensors and values that are not finite.

    source: the file or the folder, for errors.
    """

    def __init__(self, device: Device, stored: Mapping[str, StoredTensor], source: str):
        self.device = device
        self.source = source
        self._stored = stored
        self._unread = set(stored)
        self._matrices: list[str] = []
        self._flags = device.zeros(4 * max(1, len(stored)), "finite flags")

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the stored shape. Raises CheckpointError if the tensor is missing."""
        return self._tensor(name).shape

    def dtype(self, name: str) -> str:
        """Returns the device's dtype for a matrix: as stored, or float16 for quantised formats."""
        return FLOAT_FORMATS.get(self._tensor(name).format, "float16")

    def array(self, name: str, *shape: int) -> np.ndarray:
        """Reads a tensor to the host, float32 [shape]."""
        tensor = self._read(name, shape)
        rows = read_view(tensor.data).reshape(-1, row_bytes(name, tensor.format, shape[-1]))
        values = dequantize(tensor.format, rows).reshape(shape)
        if not np.isfinite(values).all():
            raise CheckpointError(f"{self.source}: tensor {name} has values that are not finite. Fetch it again.")
        return values

    def vector(self, *names: str, size: int) -> Buffer:
        """Uploads vectors of `size` values, one behind the other, as float32."""
        return self.device.upload(np.concatenate([self.array(name, size) for name in names]), names[0])

    def matrix(self, *names: str, rows: int, k: int) -> Weight:
        """Uploads matrices [rows, k] as one, stacked by rows, in the first one's `dtype`."""
        if k % SIZE_MULTIPLE or rows % TILE_ROWS:
            return self.upload(names[0], np.concatenate([self.array(name, rows, k) for name in names]))
        weight = alloc_weight(self.device, names[0], len(names) * rows, k, self.dtype(names[0]))
        for i, name in enumerate(names):
            tensor = self._read(name, (rows, k))
            data = tensor.data.reshape(rows, row_bytes(name, tensor.format, k))
            self._load(weight, _StoredRows(data, (rows, k), tensor.format), name, i * rows)
        return weight

    def upload(self, name: str, values: np.ndarray) -> Weight:
        """Uploads a float32 matrix made from the tensor `name`, in its `dtype`, with columns padded by zeros."""
        rows, k = values.shape
        values = np.pad(values, ((0, 0), (0, padded(k) - k))).astype(np.float32)
        weight = alloc_weight(self.device, name, rows, padded(k), self.dtype(name))
        self._load(weight, _StoredRows(values.view(np.uint8), (rows, padded(k)), "F32"), name)
        return weight

    def finish(self) -> None:
        """Raises CheckpointError for a matrix that is not finite, UnsupportedModelError for tensors nobody read."""
        flags = self.device.read(self._flags, np.int32, (self._flags.nbytes // 4,))
        self._flags.release()
        if bad := [name for name, flag in zip(self._matrices, flags, strict=False) if flag]:
            raise CheckpointError(
                f"{self.source}: tensor {bad[0]} has values that are not finite on the device. Fetch it again."
            )
        if self._unread:
            raise UnsupportedModelError(
                f"{self.source}: tensor {shown(min(self._unread))} is not part of the vision tower that the settings "
                "describe; llmcl would compute images without it, so it refuses; use another file."
            )

    def _load(self, weight: Weight, rows: RowSource, name: str, first_row: int = 0) -> None:
        flag = len(self._matrices)
        self._matrices.append(name)
        for _ in load_weight(self.device, weight, rows, self._flags, flag, first_row=first_row):
            pass

    def _tensor(self, name: str) -> StoredTensor:
        tensor = self._stored.get(name)
        if tensor is None:
            raise CheckpointError(
                f"{self.source}: tensor {name} is missing; the settings of the vision tower ask for it. The file is "
                "incomplete or belongs to another model; fetch it again."
            )
        return tensor

    def _read(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        tensor = self._tensor(name)
        self._unread.discard(name)
        if tensor.format not in FORMATS:
            raise UnsupportedModelError(
                f"{self.source}: tensor {name} has the format {tensor.format}; llmcl supports {', '.join(FORMATS)}."
            )
        if tensor.shape != shape or not prod(shape):
            raise CheckpointError(
                f"{self.source}: tensor {name} has the shape {shown(list(tensor.shape))}, expected {list(shape)} by "
                "the settings of the vision tower. They belong to another model, or the file is damaged."
            )
        return tensor
