"""Reads each layer's key and value heads from config.json or GGUF metadata."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from llmcl.architectures.config import limits
from llmcl.architectures.config.family_fields import Windows
from llmcl.architectures.config.reader import Reader, unsupported
from llmcl.architectures.families.blocks import Heads
from llmcl.architectures.families.family import Family

OwnHeads = list[Heads | None]  # per layer; None: the model's heads


def heads_from_hf(read: Reader, family: Family, windows: Windows, usual: Heads) -> OwnHeads:
    """Reads per-layer heads from per_layer_config (transformers 5), or one setting for all layers without a window.
    usual: the model's heads.
    """
    layer_heads: OwnHeads = [None] * len(windows)
    table = read.table("per_layer_config")
    if not family.own_heads:
        if table is not None and table.values:
            unsupported("settings of single layers (per_layer_config) in this architecture")
        return layer_heads
    if table is None:
        n_kv = usual.n_kv
        if read.flag("attention_k_eq_v", default=False):
            n_kv = read.size("num_global_key_value_heads", limits.MAX_HEADS, default=n_kv)
        others = Heads(n_kv, read.size("global_head_dim", limits.MAX_HEAD_DIM))
        return [None if window is not None or others == usual else others for window in windows]
    for key in table.values:
        of_layer = table.table(key)
        if of_layer is None or not key.isdecimal() or int(key) >= len(windows):
            read.fail("per_layer_config", key, f"objects for layers 0 to {len(windows) - 1}")
        if unknown := sorted(set(of_layer.values) - {"head_dim", "num_key_value_heads"}):
            unsupported(f"{', '.join(unknown)} of single layers (per_layer_config)")
        heads = Heads(
            of_layer.size("num_key_value_heads", limits.MAX_HEADS, default=usual.n_kv),
            of_layer.size("head_dim", limits.MAX_HEAD_DIM, default=usual.size),
        )
        layer_heads[int(key)] = None if heads == usual else heads
    return layer_heads


def keys_as_values_from_hf(read: Reader, family: Family, windows: Windows) -> list[bool]:
    """Returns, per layer, whether keys serve as values."""
    has_any = family.own_heads and read.flag("attention_k_eq_v", default=False)
    return [has_any and window is None for window in windows]


def heads_from_gguf(
    read: Reader, arch: str, family: Family, windows: Windows, n_kv: list[int], size: int
) -> tuple[Heads, OwnHeads]:
    """Returns the model's heads and the per-layer heads. n_kv: per layer. size: head size without a window."""
    if not family.own_heads:
        return Heads(max(n_kv), size), [None] * len(windows)
    windowed = read.size(f"{arch}.attention.key_length_swa", limits.MAX_HEAD_DIM, default=size)
    for key in (f"{arch}.attention.value_length_swa", f"{arch}.rope.dimension_count_swa"):
        if (unwindowed := read.size(key, limits.MAX_HEAD_DIM, default=windowed)) != windowed:
            unsupported(f"{key} {unwindowed} beside keys of {windowed}")
    each = [Heads(n, windowed if window is not None else size) for n, window in zip(n_kv, windows, strict=True)]
    usual = next((heads for heads, window in zip(each, windows, strict=True) if window is not None), each[0])
    return usual, [None if heads == usual else heads for heads in each]


def kv_heads_from_gguf(read: Reader, arch: str, family: Family, n_layers: int) -> list[int]:
    """Returns key and value heads per layer: the same number for all attention layers, 0 for recurrent layers. Some
    families allow different numbers.
    """
    key = f"{arch}.attention.head_count_kv"
    heads = read.get(key)
    if not isinstance(heads, np.ndarray):
        default = read.size(f"{arch}.attention.head_count", limits.MAX_HEADS)
        return [read.size(key, limits.MAX_HEADS, default=default)] * n_layers
    if family.gguf_drafting_layers:
        heads = heads[:n_layers]
    listed = heads.tolist()
    numbers = {*listed} - ({0} if family.recurrent is not None else set())
    is_whole = heads.dtype.kind in "iu" and heads.shape == (n_layers,) and len(numbers) > 0
    is_alike = len(numbers) == 1 or family.own_heads
    if not is_whole or not is_alike or not 1 <= min(numbers) <= max(numbers) <= limits.MAX_HEADS:
        or_none = ", or 0," if family.recurrent is not None else ""
        what = "numbers" if family.own_heads else "one number"
        read.fail(key, listed, f"{what} of heads{or_none} for each of {n_layers} layers")
    return [int(count) for count in listed]


def keys_as_values_from_gguf(family: Family, n_layers: int, tensor_names: Collection[str]) -> list[bool]:
    """Returns, per layer, whether keys serve as values: then the file has no value tensor."""
    return [family.own_heads and f"blk.{i}.attn_v.weight" not in tensor_names for i in range(n_layers)]
