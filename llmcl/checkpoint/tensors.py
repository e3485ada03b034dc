"""The tensors of a model, whatever file they come from: names, shapes, and views of their bytes."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from llmcl.checkpoint.files import read_view
from llmcl.checkpoint.formats import FLOAT_FORMATS, FORMATS, dequantize, row_bytes
from llmcl.errors import CheckpointError, UnsupportedModelError, counted, shown
from llmcl.models.config import ModelConfig
from llmcl.models.families import FAMILIES

# A tensor under one of these names belongs to what llmcl computes. If it is not one of the expected tensors,
# the model has a feature (a bias, a further norm, one more layer) that would silently be left out.
_COMPUTED_PARTS = (
    *("model.embed_tokens.", "model.layers.", "model.norm.", "lm_head."),
    *("model.embed_tokens_per_layer.", "model.per_layer_"),
)
_IGNORED_SUFFIX = "rotary_emb.inv_freq"  # a constant that old checkpoints carry along


class RowView(Protocol):
    """Rows that are put together from what is mapped when they are asked for: uint8 [rows, row_bytes]."""

    def __len__(self) -> int: ...
    def __getitem__(self, rows: slice) -> np.ndarray: ...


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as a file reader found it.

    shape: row-major; data: uint8 [n_bytes], a view of the mapped file; empty where there is a `view` of its rows.
    """

    shape: tuple[int, ...]
    format: str
    data: np.ndarray
    view: RowView | None = None


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of the model.

    name: as Hugging Face names it. shape: [out_features, in_features] for a matrix, [n] for a norm or a bias,
    which counts as one row. format: a key of `formats.FORMATS`. rope_interleaved: the rows of each head are
    stored so that rotary pairs are neighbours (2i, 2i+1), as GGUF has Llama's q_proj and k_proj, and not half a
    head apart.
    """

    name: str
    shape: tuple[int, ...]
    format: str
    row_bytes: int
    rope_interleaved: bool

    @property
    def n_rows(self) -> int:
        return self.shape[0] if len(self.shape) == 2 else 1

    @property
    def n_bytes(self) -> int:
        return self.n_rows * self.row_bytes


class Checkpoint:
    """An open checkpoint: its configuration and its tensors, mapped from disk.

    name: what the user asked for. path: the folder (Hugging Face) or the file (GGUF). config: `config.dtype`
    is the dtype of the stored matrices. tensors: exactly the tensors that the model uses, all checked.
    gguf_metadata: None for a folder, whose tokenizer files lie under `path`; for a GGUF file all of its
    metadata, the keys `tokenizer.*` included: numbers, bools and strings as Python has them, string arrays as
    list[str], numeric arrays as NumPy arrays, arrays of arrays as lists of these.
    """

    def __init__(
        self,
        name: str,
        path: Path,
        config: ModelConfig,
        stored: Mapping[str, StoredTensor],
        gguf_metadata: dict[str, Any] | None = None,
    ):
        """Picks and checks the model's tensors among `stored`; raises as `select_tensors` does."""
        self.name = name
        self.path = path
        self.gguf_metadata = gguf_metadata
        self.tensors = select_tensors(stored, config, is_gguf=gguf_metadata is not None)
        self.config = dataclasses.replace(config, dtype=_stored_dtype(self.tensors))
        self._rows: dict[str, np.ndarray | RowView] = {}
        for tensor, info in self.tensors.items():
            data, view = stored[tensor].data, stored[tensor].view
            self._rows[tensor] = data.reshape(info.n_rows, info.row_bytes) if view is None else view

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows start..stop-1 as stored, uint8 [stop - start, row_bytes].

        Raises CheckpointError if the file has become shorter since it was opened.
        """
        rows = self._rows[name]
        if not 0 <= start <= stop <= len(rows):
            raise IndexError(f"rows {start}:{stop} of {name}, which has {len(rows)}")
        return read_view(rows[start:stop]) if isinstance(rows, np.ndarray) else rows[start:stop]

    def array(self, name: str) -> np.ndarray:
        """The whole tensor, float32 [shape], its rows in the order of Hugging Face (see `TensorInfo`).

        Meant for norms and for tests: NumPy decodes quantised formats slowly.
        """
        info = self.tensors[name]
        values = dequantize(info.format, self.rows(name, 0, info.n_rows)).reshape(info.shape)
        if info.rope_interleaved:
            pairs = values.reshape(-1, self.config.head_dim // 2, 2, *info.shape[1:])
            values = pairs.swapaxes(1, 2).reshape(info.shape)
        return values

    def close(self) -> None:
        """Lets go of the files."""
        self._rows = {}

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def select_tensors(stored: Mapping[str, StoredTensor], config: ModelConfig, is_gguf: bool) -> dict[str, TensorInfo]:
    """The tensors of the model among those of a file.

    Raises CheckpointError for one that is missing or has another shape than the configuration says, and
    UnsupportedModelError for a format that llmcl cannot read or a tensor that it would leave out of the
    computation.
    """
    expected = config.tensors()
    interleaves_rope = is_gguf and FAMILIES[config.architecture].gguf_interleaves_rope
    selected = {}
    for name, shape in expected.items():
        tensor = stored.get(name)
        if tensor is None:
            raise CheckpointError(
                f"tensor {name} is missing; the configuration asks for it. The checkpoint is incomplete; "
                "fetch it again."
            )
        if tensor.format not in FORMATS:
            raise UnsupportedModelError(
                f"tensor {name} has the format {tensor.format}; llmcl supports {', '.join(FORMATS)}."
            )
        if tensor.shape != shape:
            raise CheckpointError(
                f"tensor {name} has the shape {shown(list(tensor.shape))}, expected {list(shape)} by the "
                "configuration. The configuration belongs to another model, or the file is damaged."
            )
        if len(shape) == 1 and tensor.format not in FLOAT_FORMATS:
            raise UnsupportedModelError(
                f"tensor {name} has the format {tensor.format}; llmcl supports norms and biases in "
                f"{', '.join(FLOAT_FORMATS)}."
            )
        is_rotary = name.endswith((".q_proj.weight", ".k_proj.weight", ".q_proj.bias", ".k_proj.bias"))
        selected[name] = TensorInfo(
            name, shape, tensor.format, row_bytes(name, tensor.format, shape[-1]), interleaves_rope and is_rotary
        )
    unused = config.unused_tensors()
    for name in stored:
        is_copy_of_embeddings = name == "lm_head.weight" and config.tie_embeddings
        if name in expected or name in unused or is_copy_of_embeddings or name.endswith(_IGNORED_SUFFIX):
            continue
        if name.startswith(_COMPUTED_PARTS):
            raise UnsupportedModelError(
                f"tensor {shown(name)} is not part of the {config.architecture} architecture of "
                f"{counted(config.n_layers, 'layer')} that the configuration describes; llmcl would compute the model "
                "without it, so it refuses; use another model."
            )
    return selected


def _stored_dtype(tensors: Mapping[str, TensorInfo]) -> str:
    """What most bytes of the matrices are stored in; "quantized" as soon as one matrix is."""
    n_bytes: Counter[str] = Counter()
    for info in tensors.values():
        if len(info.shape) == 2:
            n_bytes[info.format] += math.prod(info.shape) * FORMATS[info.format].nbytes
    if any(format not in FLOAT_FORMATS for format in n_bytes):
        return "quantized"
    return FLOAT_FORMATS[n_bytes.most_common(1)[0][0]]
