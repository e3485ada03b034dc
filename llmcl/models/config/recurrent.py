"""The recurrent blocks of each layer, read from config.json or from GGUF metadata."""

from __future__ import annotations

import numpy as np

from llmcl.models.config import limits
from llmcl.models.config.reader import Reader
from llmcl.models.families.family import Family
from llmcl.models.families.recurrent import RecurrentSettings, ShortConvSettings

Recurrent = list[RecurrentSettings | None]  # of each layer, None for one with attention


def recurrent_from_hf(read: Reader, family: Family, n_layers: int) -> Recurrent:
    """By `layer_types`, or where that is missing by the list of the layers with attention."""
    if family.recurrent is None:
        return [None] * n_layers
    kinds = read.get("layer_types")
    if kinds is None:
        attends = read.get("full_attn_idxs", [*range(n_layers)])
        if not isinstance(attends, list) or any(type(i) is not int for i in attends):
            read.fail("full_attn_idxs", attends, "a list of layers")
        kinds = ["full_attention" if i in attends else family.recurrent for i in range(n_layers)]
    if not isinstance(kinds, list) or len(kinds) != n_layers:
        read.fail("layer_types", kinds, f"the types of {n_layers} layers")
    settings = ShortConvSettings(read.size("conv_L_cache", limits.MAX_CONV_LENGTH, minimum=2))
    return [settings if kind == family.recurrent else None for kind in kinds]


def recurrent_from_gguf(read: Reader, arch: str, family: Family, n_layers: int) -> Recurrent:
    """Layers without heads of keys and values are recurrent."""
    if family.recurrent is None:
        return [None] * n_layers
    settings = ShortConvSettings(read.size(f"{arch}.shortconv.l_cache", limits.MAX_CONV_LENGTH, minimum=2))
    return [None if heads else settings for heads in kv_heads_from_gguf(read, arch, family, n_layers)]


def kv_heads_from_gguf(read: Reader, arch: str, family: Family, n_layers: int) -> list[int]:
    """Heads of keys and values of each layer: the same number for all with attention, 0 for recurrent ones."""
    key = f"{arch}.attention.head_count_kv"
    heads = read.get(key)
    if not isinstance(heads, np.ndarray):
        default = read.size(f"{arch}.attention.head_count", limits.MAX_HEADS)
        return [read.size(key, limits.MAX_HEADS, default=default)] * n_layers
    listed = heads.tolist()
    numbers = {*listed} - ({0} if family.recurrent is not None else set())
    is_whole = heads.dtype.kind in "iu" and heads.shape == (n_layers,)
    if not is_whole or len(numbers) != 1 or not 1 <= max(numbers) <= limits.MAX_HEADS:
        or_none = ", or 0," if family.recurrent is not None else ""
        read.fail(key, listed, f"one number of heads{or_none} for each of {n_layers} layers")
    return [int(count) for count in listed]
