"""Reads key sharing between layers and per-layer token inputs, from either format."""

from __future__ import annotations

import numpy as np

from llmcl.architectures.config import limits
from llmcl.architectures.config.family_fields import Windows
from llmcl.architectures.config.reader import Reader, unsupported
from llmcl.architectures.families.family import Family

KeysOf = list[int | None]  # per layer, the layer whose keys it reads; None: its own


def keys_of_from_hf(read: Reader, family: Family, windows: Windows) -> KeysOf:
    n_shared = 0
    if family.own_heads:
        n_shared = read.size("num_kv_shared_layers", len(windows) - 1, default=0, minimum=0)
    return _keys_of(read, "num_kv_shared_layers", n_shared, windows)


def keys_of_from_gguf(read: Reader, arch: str, family: Family, windows: Windows) -> KeysOf:
    key, n_shared = f"{arch}.attention.shared_kv_layers", 0
    if family.own_heads:
        n_shared = read.size(key, len(windows) - 1, default=0, minimum=0)
    return _keys_of(read, key, n_shared, windows)


def _keys_of(read: Reader, key: str, n_shared: int, windows: Windows) -> KeysOf:
    """Lets each of the last n_shared layers read keys from the last earlier layer with an equal window (or none)."""
    first = len(windows) - n_shared
    last = {window: i for i, window in enumerate(windows[:first])}
    if not set(windows) <= set(last):
        read.fail(key, n_shared, "so few layers that those before them have windows as these")
    return [None] * first + [last[window] for window in windows[first:]]


def mlp_widths_from_hf(read: Reader, family: Family, keys_of: KeysOf) -> list[int]:
    """Returns MLP widths. Layers that read another layer's keys may have an MLP twice as wide."""
    doubles = family.own_heads and read.flag("use_double_wide_mlp", default=False)
    return [2 if doubles and source_layer is not None else 1 for source_layer in keys_of]


def mlp_widths_from_gguf(read: Reader, arch: str, family: Family, n_layers: int) -> tuple[int | None, list[int]]:
    """Returns the base MLP rows and each layer's multiple. None: the metadata has no list."""
    key = f"{arch}.feed_forward_length"
    rows = read.get(key)
    if isinstance(rows, np.ndarray) and family.single_blocks and rows.dtype.kind in "iu" and rows.any():
        return int(min(rows.max(), limits.MAX_INTERMEDIATE)), [1] * n_layers
    if not isinstance(rows, np.ndarray) or not family.own_heads:
        return None, [1] * n_layers
    listed = rows.tolist()
    least = min(listed, default=0)
    is_whole = rows.dtype.kind in "iu" and rows.shape == (n_layers,) and 1 <= least <= limits.MAX_INTERMEDIATE
    if not is_whole or any(n not in (least, 2 * least) for n in listed):
        read.fail(key, listed, f"the rows of {n_layers} layers, of each as many or twice as many")
    return least, [n // least for n in listed]


def input_size_from_hf(read: Reader, family: Family, vocab_size: int) -> int:
    """Returns the per-layer input size, or 0."""
    if not family.own_heads:
        return 0
    size = read.size("hidden_size_per_layer_input", limits.MAX_HIDDEN, default=0, minimum=0)
    if size and (n := read.size("vocab_size_per_layer_input", limits.MAX_VOCAB, default=vocab_size)) != vocab_size:
        unsupported(f"embeddings of layers for {n} tokens (vocab_size_per_layer_input) of {vocab_size}")
    return _checked(size, "hidden_size_per_layer_input")


def input_size_from_gguf(read: Reader, arch: str, family: Family) -> int:
    key = f"{arch}.embedding_length_per_layer_input"
    if not family.own_heads:
        return 0
    return _checked(read.size(key, limits.MAX_HIDDEN, default=0, minimum=0), key)


def _checked(size: int, key: str) -> int:
    if size % limits.SIZE_MULTIPLE:
        unsupported(f"{key} {size}", f"it must be a multiple of {limits.SIZE_MULTIPLE}")
    return size
