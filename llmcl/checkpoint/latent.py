"""Splits latent-attention checkpoints' key and value projections into the two matrices used on the device.

    kv_b_proj   [n_heads (nope + value), rank]     per head: key rows, then value rows
    k_b_proj    [n_heads rank, nope]               transposed; later GGUF files store it as [n_heads, rank, nope]
    v_b_proj    [n_heads value, rank]              later GGUF files: [n_heads, value, rank]

Rows are reordered when read. Transposing breaks quantised blocks, so transposed keys become float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from llmcl.architectures.config import ModelConfig
from llmcl.architectures.families.blocks import layer_name
from llmcl.architectures.families.latent import KEY_VALUE, KEYS, VALUES
from llmcl.checkpoint.formats import FLOAT_FORMATS, FORMATS, dequantize
from llmcl.checkpoint.tensors import RowView, StoredTensor, read_rows
from llmcl.errors import CheckpointError, shown


@dataclass(frozen=True)
class KeyRows:
    """Row h rank + c collects element c of the `nope` key rows in head h. stored: uint8 [n_heads rows per head,
    bytes].
    """

    stored: np.ndarray | RowView
    n_heads: int
    format: str
    nope: int
    rank: int

    def __len__(self) -> int:
        return self.n_heads * self.rank

    def __getitem__(self, rows: slice) -> np.ndarray:
        start, stop, _ = rows.indices(len(self))
        first, end = start // self.rank, -(-stop // self.rank)
        per_head = len(self.stored) // self.n_heads
        rows_of_heads = read_rows(self.stored, first * per_head, end * per_head)
        heads = rows_of_heads.reshape(end - first, per_head, -1)[:, : self.nope]
        if self.format in FLOAT_FORMATS:
            numbers = np.ascontiguousarray(heads).view(f"<u{FORMATS[self.format].nbytes}")
        else:
            stored = np.ascontiguousarray(heads).reshape(-1, heads.shape[2])
            numbers = dequantize(self.format, stored).reshape(*heads.shape[:2], -1)
        turned = np.ascontiguousarray(numbers.swapaxes(1, 2)).reshape(-1, self.nope)
        part: np.ndarray = np.ascontiguousarray(turned[start - first * self.rank :][: stop - start])
        return part.view(np.uint8)


@dataclass(frozen=True)
class ValueRows:
    """Stacks each head's rows from `nope` on. stored: as in `KeyRows`."""

    stored: np.ndarray | RowView
    n_heads: int
    nope: int

    def __len__(self) -> int:
        return len(self.stored) - self.n_heads * self.nope

    def __getitem__(self, rows: slice) -> np.ndarray:
        start, stop, _ = rows.indices(len(self))
        per_head = len(self.stored) // self.n_heads
        n_values = per_head - self.nope
        first, end = start // n_values, -(-stop // n_values)
        stored = read_rows(self.stored, first * per_head, end * per_head)
        values = stored.reshape(end - first, per_head, -1)[:, self.nope :].reshape(-1, stored.shape[1])
        part: np.ndarray = values[start - first * n_values :][: stop - start]
        return part


def split_latents(stored: Mapping[str, StoredTensor], config: ModelConfig) -> dict[str, StoredTensor]:
    """Returns a checkpoint's tensors with KEYS and VALUES instead of KEY_VALUE in each layer, all as matrices.

    Raises CheckpointError if a tensor's shape differs from the configuration.
    """
    tensors, latent, heads = {**stored}, config.latent, config.n_q_heads
    if latent is None:
        return tensors
    for i in range(config.n_layers):
        joined, keys, values = (layer_name(i, name) for name in (KEY_VALUE, KEYS, VALUES))
        for name, rows, columns in ((keys, latent.rank, latent.nope), (values, latent.value, latent.rank)):
            if name in tensors and tensors[name].shape == (heads, rows, columns):
                tensors[name] = replace(tensors[name], shape=(heads * rows, columns))
        tensor = tensors.pop(joined, None)
        if tensor is None or keys in tensors:
            continue
        shape = heads * (latent.nope + latent.value), latent.rank
        if tensor.shape != shape:
            raise CheckpointError(
                f"tensor {joined} has the shape {shown(list(tensor.shape))}, expected {list(shape)} by the "
                "configuration. The configuration belongs to another model, or the file is damaged."
            )
        both = tensor.data.reshape(shape[0], -1) if tensor.view is None else tensor.view
        exact = tensor.format if tensor.format in FLOAT_FORMATS else "F32"
        none = tensor.data[:0]
        tensors[keys] = StoredTensor(
            (heads * latent.rank, latent.nope),
            exact,
            none,
            KeyRows(both, heads, tensor.format, latent.nope, latent.rank),
        )
        tensors[values] = StoredTensor(
            (heads * latent.value, latent.rank), tensor.format, none, ValueRows(both, heads, latent.nope)
        )
    return tensors
