"""A model's tensors, from any file format: names, shapes, and views of their bytes."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from llmcl.architectures.config import ModelConfig
from llmcl.architectures.families import FAMILIES
from llmcl.checkpoint.files import read_view
from llmcl.checkpoint.formats import FLOAT_FORMATS, FORMATS, dequantize, row_bytes
from llmcl.errors import CheckpointError, UnsupportedModelError, counted, shown

# llmcl computes with tensors under these names. An unexpected name means a feature (a bias, a further norm, one more
# layer) that would silently be left out.
_COMPUTED_PARTS = ("model.embed_", "model.layers.", "model.norm.", "lm_head.", "model.per_layer_")
JUDGING_TENSORS = "score.weight", "cls.output.weight"  # of a reranker that is a decoder: folder, GGUF
_IGNORED_SUFFIX = "rotary_emb.inv_freq"  # a constant in old checkpoints


class RowView(Protocol):
    """Rows assembled from mapped data on access: uint8 [rows, row_bytes]."""

    def __len__(self) -> int: ...
    def __getitem__(self, rows: slice) -> np.ndarray: ...


@dataclass(frozen=True)
class StoredTensor:
    """A tensor from a file reader."""

    shape: tuple[int, ...]  # row-major
    format: str
    data: np.ndarray  # uint8 [n_bytes], a view of the mapped file; empty if `view` is set
    view: RowView | None = None  # assembles the rows


def read_rows(rows: np.ndarray | RowView, start: int, stop: int) -> np.ndarray:
    """Reads rows that are mapped or assembled."""
    return read_view(rows[start:stop]) if isinstance(rows, np.ndarray) else rows[start:stop]


@dataclass(frozen=True)
class TensorInfo:
    """A tensor in the model."""

    name: str  # Hugging Face name
    # [out_features, in_features] for a matrix, [n] for a norm or a bias, which counts as one row
    shape: tuple[int, ...]
    format: str  # a key in `formats.FORMATS`
    row_bytes: int
    # rotary pairs are neighbouring rows (2i, 2i+1) in each head, as in GGUF's q_proj and k_proj for Llama; False: half
    # a head apart
    rope_interleaved: bool

    @property
    def n_rows(self) -> int:
        return self.shape[0] if len(self.shape) == 2 else 1

    @property
    def n_bytes(self) -> int:
        return self.n_rows * self.row_bytes


class Checkpoint:
    """An open checkpoint: configuration and tensors, mapped from disk.

    name: the user's name for the model. path: the folder (Hugging Face) or the file (GGUF). tensors: exactly the
    tensors in the model, all checked. gguf_metadata: all metadata of a GGUF file, `tokenizer.*` keys included, with
    numbers, bools and strings as Python values, string arrays as list[str], numeric arrays as NumPy arrays, nested
    arrays as lists; None for a folder, whose tokenizer files lie under `path`.

    `config.dtype` is the dtype of the stored matrices.
    """

    def __init__(
        self,
        name: str,
        path: Path,
        config: ModelConfig,
        stored: Mapping[str, StoredTensor],
        gguf_metadata: dict[str, Any] | None = None,
    ):
        """Selects and checks the model's tensors in `stored`. Raises the errors of `select_tensors`."""
        self.name = name
        self.path = path
        self.gguf_metadata = gguf_metadata
        self.tensors = select_tensors(stored, config, is_gguf=gguf_metadata is not None)
        self.config = dataclasses.replace(config, dtype=_stored_dtype(self.tensors))
        # a reranker's last matrix [labels, hidden], if it is a decoder with one
        self.judging = next((stored[tensor] for tensor in JUDGING_TENSORS if tensor in stored), None)
        self._rows: dict[str, np.ndarray | RowView] = {}
        for tensor, info in self.tensors.items():
            data, view = stored[tensor].data, stored[tensor].view
            self._rows[tensor] = data.reshape(info.n_rows, info.row_bytes) if view is None else view

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Returns rows start..stop-1 as stored, uint8 [stop - start, row_bytes].

        Raises CheckpointError if the file has become shorter since it was opened.
        """
        rows = self._rows[name]
        if not 0 <= start <= stop <= len(rows):
            raise IndexError(f"rows {start}:{stop} of {name}, which has {len(rows)}")
        return read_rows(rows, start, stop)

    def array(self, name: str) -> np.ndarray:
        """Returns the whole tensor, float32 [shape], with rotary pairs half a head apart (see `TensorInfo`).

        Meant for norms and tests, because NumPy decodes quantised formats slowly.
        """
        info = self.tensors[name]
        values = dequantize(info.format, self.rows(name, 0, info.n_rows)).reshape(info.shape)
        if info.rope_interleaved:
            pairs = values.reshape(-1, self.config.head_dim // 2, 2, *info.shape[1:])
            values = pairs.swapaxes(1, 2).reshape(info.shape)
        return values

    def replace_rows(self, info: TensorInfo, view: Callable[[np.ndarray | RowView], RowView]) -> None:
        """Replaces a tensor's rows by a view of them. info: describes the new rows."""
        self._rows[info.name] = view(self._rows[info.name])
        self.tensors[info.name] = info

    def close(self) -> None:
        """Releases the files."""
        self._rows, self.judging = {}, None

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def select_tensors(stored: Mapping[str, StoredTensor], config: ModelConfig, is_gguf: bool) -> dict[str, TensorInfo]:
    """Selects the model's tensors from a file.

    Raises CheckpointError for a missing tensor or a shape that differs from the configuration, and
    UnsupportedModelError for an unknown format or a tensor that llmcl would leave out of the computation.
    """
    expected = config.tensors()
    family = FAMILIES[config.architecture]
    interleaves_rope = family.gguf_interleaves_rope if is_gguf else family.interleaves_rope
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
    """Returns the format of most matrix bytes, or "quantized" if any matrix is quantised."""
    n_bytes: Counter[str] = Counter()
    for info in tensors.values():
        if len(info.shape) == 2:
            n_bytes[info.format] += math.prod(info.shape) * FORMATS[info.format].nbytes
    if any(format not in FLOAT_FORMATS for format in n_bytes):
        return "quantized"
    return FLOAT_FORMATS[n_bytes.most_common(1)[0][0]]
