"""Norm weights that a folder lacks, or holds without an offset of 1."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from llmcl.architectures.config import ModelConfig
from llmcl.architectures.families.family import Family
from llmcl.checkpoint.files import read_view
from llmcl.checkpoint.formats import FLOAT_FORMATS, dequantize
from llmcl.checkpoint.tensors import StoredTensor


def with_made_norms(stored: Mapping[str, StoredTensor], family: Family, config: ModelConfig) -> dict[str, StoredTensor]:
    """Returns a folder's tensors with `Family.constants` added, and 1 added to `Family.shifted_norms`."""
    tensors = dict(stored)
    shifted = tuple(f".{module}.weight" for module in family.shifted_norms)
    for name, tensor in stored.items() if shifted else ():
        if name.endswith(shifted) and tensor.format in FLOAT_FORMATS and len(tensor.shape) == 1:
            values = dequantize(tensor.format, read_view(tensor.data)[np.newaxis])[0] + np.float32(1.0)
            tensors[name] = replace(tensor, format="F32", data=_bytes(values))
    for name, shape in config.tensors().items() if family.constants else ():
        value = next((value for end, value in family.constants.items() if name.endswith(f".{end}")), None)
        if value is not None and name not in tensors:
            tensors[name] = StoredTensor(shape, "F32", _bytes(np.full(shape, value)))
    return tensors


def _bytes(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values, np.float32).view(np.uint8)
