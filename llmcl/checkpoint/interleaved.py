"""Splits gpt-oss experts: one tensor holds all experts of a layer, with alternating rows of gate and up.

    gate_up_proj         [n_experts, hidden, 2 size]           transposed: columns are rows of gate, up, gate, up, ...
    gate_up_proj_bias    [n_experts, 2 size]
    gate_up_proj_blocks  [n_experts, 2 size, hidden / 32, 16]  instead: MXFP4 codes, neighbouring columns per byte,
    gate_up_proj_scales  [n_experts, 2 size, hidden / 32]      and the scales

down_proj has the same tensors, without alternation. Rows are reordered when read, because experts are most of the
model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from llmcl.architectures.config import ModelConfig
from llmcl.checkpoint.files import read_view
from llmcl.checkpoint.formats import FORMATS
from llmcl.checkpoint.stacked import n_experts_of, parts_of
from llmcl.checkpoint.tensors import StoredTensor
from llmcl.errors import CheckpointError, shown

_BLOCKS, _SCALES = "_blocks", "_scales"


@dataclass(frozen=True)
class TransposedRows:
    """Rows that are stored as matrix columns: values [columns, rows] with any stride."""

    values: np.ndarray

    def __len__(self) -> int:
        return int(self.values.shape[1])

    def __getitem__(self, rows: slice) -> np.ndarray:
        part: np.ndarray = np.ascontiguousarray(read_view(self.values[:, rows]).T)
        return part.view(np.uint8)


@dataclass(frozen=True)
class Mxfp4Rows:
    """MXFP4 rows in GGUF block layout, built from codes [rows, blocks, 16] and scales [rows, blocks]."""

    codes: np.ndarray
    scales: np.ndarray

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, rows: slice) -> np.ndarray:
        # Byte j has columns 2j and 2j + 1; in a GGUF file columns j and j + 16.
        words = read_view(self.codes[rows]).astype(np.uint16)
        columns = (words & 15) | (words & 0xF0) << 4  # two columns per word, a byte each, low halves
        joined = columns[..., :8] | columns[..., 8:] << 4
        blocks = np.empty((*words.shape[:2], FORMATS["MXFP4"].nbytes), np.uint8)
        blocks[..., 0] = read_view(self.scales[rows])
        blocks[..., 1:] = joined.astype("<u2").view(np.uint8)
        return blocks.reshape(len(blocks), -1)


def interleaved_parts(
    stored: Mapping[str, StoredTensor], interleaved: Mapping[str, tuple[str, ...]], config: ModelConfig
) -> dict[str, StoredTensor]:
    """Returns a folder's tensors, with the tensors in `interleaved` (`Family.interleaved`) split into named parts.

    Raises CheckpointError if a tensor has an unexpected shape.
    """
    n_experts, split = n_experts_of(config), dict[str, StoredTensor]()
    for name, tensor in stored.items():
        module = next((module for module in interleaved if f".{module}" in name), None)
        if module is None:
            split[name] = tensor
            continue
        prefix, _, kind = name.partition(module)
        parts = [f"{prefix}{part}" for part in interleaved[module]]
        if kind == "_bias":
            split |= _biases(name, tensor, parts, n_experts)
        elif kind == "":
            split |= _transposed(name, tensor, parts, n_experts, alternate=True)
        elif kind == _BLOCKS:
            scales = stored.get(name.removesuffix(_BLOCKS) + _SCALES)
            split |= _mxfp4(name, tensor, scales, parts, n_experts)
        elif kind != _SCALES:
            split[name] = tensor
    return split


def transposed_parts(
    stored: Mapping[str, StoredTensor], transposed: Mapping[str, tuple[str, ...]], config: ModelConfig
) -> dict[str, StoredTensor]:
    """Returns a folder's tensors, with the tensors in `transposed` (`Family.transposed`) split into named parts.

    transformers 5 saves the same tensors [n_experts, rows, columns]. The shapes tell the two apart.
    """
    n_experts, shapes, split = n_experts_of(config), config.tensors(), dict[str, StoredTensor]()
    for name, tensor in stored.items():
        module = next((module for module in transposed if name.endswith(f".{module}")), None)
        if module is None:
            split[name] = tensor
            continue
        parts = [f"{name.removesuffix(module)}{part}" for part in transposed[module]]
        rows, columns = shapes.get(f"{parts[0].format(0)}.weight", (0, 0))
        if tensor.shape == (n_experts, len(parts) * rows, columns) and len(parts) * rows != columns:
            split |= parts_of(name, tensor, tuple(f"{part}.weight" for part in parts), config)
        else:
            split |= _transposed(name, tensor, parts, n_experts, alternate=False)
    return split


def _biases(name: str, tensor: StoredTensor, parts: Sequence[str], n_experts: int) -> dict[str, StoredTensor]:
    _check(name, tensor, (n_experts, None), len(parts), 1)
    values = _items(tensor).reshape(n_experts, -1, len(parts))
    biases = {}
    for e in range(n_experts):
        for p, part in enumerate(parts):
            data = np.ascontiguousarray(values[e, :, p]).view(np.uint8)
            biases[f"{part.format(e)}.bias"] = StoredTensor((values.shape[1],), tensor.format, data)
    return biases


def _transposed(
    name: str, tensor: StoredTensor, parts: Sequence[str], n_experts: int, *, alternate: bool
) -> dict[str, StoredTensor]:
    _check(name, tensor, (n_experts, None, None), len(parts), 2)
    values = _items(tensor).reshape(*tensor.shape[:2], len(parts), -1).swapaxes(2, 3)
    if alternate:
        values = _items(tensor).reshape(*tensor.shape[:2], -1, len(parts))
    shape = values.shape[2], values.shape[1]
    return {
        f"{part.format(e)}.weight": StoredTensor(
            shape, tensor.format, tensor.data[:0], TransposedRows(values[e, :, :, p])
        )
        for e in range(n_experts)
        for p, part in enumerate(parts)
    }


def _mxfp4(
    name: str, tensor: StoredTensor, scales: StoredTensor | None, parts: Sequence[str], n_experts: int
) -> dict[str, StoredTensor]:
    _check(name, tensor, (n_experts, None, None, 16), len(parts), 1)
    if scales is None or scales.shape != tensor.shape[:3] or {tensor.format, scales.format} != {"U8"}:
        actual = "missing" if scales is None else f"{scales.format} {shown(list(scales.shape))}"
        raise CheckpointError(
            f"tensor {shown(name)} is {tensor.format} {shown(list(tensor.shape))} and its scales are {actual}, "
            "expected U8 of the same first three sizes. The checkpoint is damaged; fetch it again."
        )
    n_blocks = tensor.shape[2]
    codes = tensor.data.reshape(n_experts, -1, len(parts), n_blocks, 16)
    exponents = scales.data.reshape(codes.shape[:4])
    shape = codes.shape[1], 32 * n_blocks
    return {
        f"{part.format(e)}.weight": StoredTensor(
            shape, "MXFP4", tensor.data[:0], Mxfp4Rows(codes[e, :, p], exponents[e, :, p])
        )
        for e in range(n_experts)
        for p, part in enumerate(parts)
    }


def _items(tensor: StoredTensor) -> np.ndarray:
    """Returns the values as unsigned integers of the same size."""
    return tensor.data.view(f"<u{FORMATS[tensor.format].nbytes}")


def _check(name: str, tensor: StoredTensor, shape: tuple[int | None, ...], n_parts: int, axis: int) -> None:
    """Checks a tensor's shape. shape: None allows any size. The size on `axis` must be a multiple of n_parts."""
    fits = len(tensor.shape) == len(shape) and all(
        expected in (None, size) and size > 0 for size, expected in zip(tensor.shape, shape, strict=False)
    )
    is_known = tensor.format in FORMATS or shape[-1] == 16
    if not fits or tensor.shape[axis] % n_parts or not is_known:
        sizes = ["any" if size is None else size for size in shape]
        raise CheckpointError(
            f"tensor {shown(name)} is {tensor.format} {shown(list(tensor.shape))}, expected {sizes} with a multiple of "
            f"{n_parts} at place {axis}. The configuration belongs to another model, or the file is damaged."
        )
