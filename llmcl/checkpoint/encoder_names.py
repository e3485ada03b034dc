"""Names of an encoder's tensors in safetensors files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")

_MODEL = re.compile(r"(?:bert\.)?(?:encoder\.(?P<layers>layer\.\d+\.)|(?=embeddings\.|pooler\.))")
_OLD_NORM = {".gamma": ".weight", ".beta": ".bias"}  # in files converted from TensorFlow


def encoder_names(stored: Mapping[str, T]) -> dict[str, T]:
    """Returns the tensors with layers as model.layers.N and with embeddings as model.embeddings. Tensors of the heads
    for pretraining (cls.) and position_ids are left out.
    """
    named: dict[str, T] = {}
    for name, tensor in stored.items():
        if name.startswith("cls.") or name.endswith(".position_ids"):
            continue
        if match := _MODEL.match(name):
            layers = match["layers"]
            name = f"model.{'' if layers is None else layers.replace('layer', 'layers', 1)}{name[match.end() :]}"
        for old, new in _OLD_NORM.items():
            name = name.removesuffix(old) + new if name.endswith(old) else name
        named[name] = tensor
    return named
