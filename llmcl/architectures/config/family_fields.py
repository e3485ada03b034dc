"""ModelConfig fields that follow from the family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from llmcl.architectures.config.limits import MAX_SCALE, MAX_SOFT_CAP
from llmcl.architectures.config.reader import Reader, unsupported
from llmcl.architectures.families.blocks import Rotation
from llmcl.architectures.families.family import Family, LayerSettings, WindowPattern
from llmcl.errors import shown

Windows = tuple[int | None, ...]  # per layer; None: no window
SWITCHED = ("late", "switched", "unrotated")  # patterns that use_sliding_window turns on


def family_fields(
    read: Reader,
    family: Family,
    prefix: str,
    hidden_size: int,
    settings: Sequence[LayerSettings],
    attention_scale: float | None,
) -> dict[str, Any]:
    """Returns the fields that follow from the family, and fields with the same key in both formats.

    prefix: of GGUF metadata keys, "" for config.json. settings: per layer, without the fields read here.
    attention_scale: used unless a multiplier is read.
    """

    def soft_cap(key: str) -> float | None:
        if not family.soft_caps or read.get(prefix + key) is None:
            return None
        return read.number(prefix + key, 0.0, MAX_SOFT_CAP)

    for key in family.refused:
        if read.get(prefix + key) not in (None, False):
            unsupported(f"{prefix}{key} {shown(read.get(prefix + key))} in this architecture")
    cap = soft_cap("attn_logit_softcapping")
    fields = {
        "layers": tuple(family.layer(replace(layer, soft_cap=cap)) for layer in settings),
        "embedding_scale": float(np.sqrt(np.float32(hidden_size))) if family.scaled_embedding else 1.0,
        "logit_soft_cap": soft_cap("final_logit_softcapping"),
        "attention_scale": attention_scale,
    }
    if family.output_multiplier:
        fields["logit_scale"] = read.number("output_multiplier", 0.0, MAX_SCALE)
        fields["post_norm_eps"] = read.number("post_norm_eps", 0.0, 1.0)
    if family.logit_scale:
        fields["logit_scale"] = read.number(f"{prefix}logit_scale", 0.0, MAX_SCALE)
    return fields | (_multipliers(read, prefix) if family.multipliers else {})


def _multipliers(read: Reader, prefix: str) -> dict[str, float | None]:
    keys = "embedding_scale", "residual_scale", "attention.scale", "logit_scale"
    if not prefix:
        keys = "embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"
    embedding, residual, attention, logits = (prefix + key for key in keys)

    def scale(key: str) -> float:
        return read.number(key, 1.0 / MAX_SCALE, MAX_SCALE, default=1.0)

    is_usual = prefix and read.get(attention) is None  # scores are then divided by sqrt(head_dim), the GGUF default
    return {
        "embedding_scale": scale(embedding),
        "residual_scale": scale(residual),
        "attention_scale": None if is_usual else scale(attention),
        "logit_scale": 1.0 / scale(logits),
    }


def ends_of(n_layers: int) -> list[dict[str, Any]]:
    """Returns, per layer, the fields of `LayerSettings` for the first and the last layer."""
    return [{"is_first": i == 0, "is_last": i == n_layers - 1} for i in range(n_layers)]


def rotations_by_interval(interval: int, n_layers: int) -> list[Rotation]:
    """Returns rotations in which every interval-th layer does not rotate."""
    return ["none" if (layer + 1) % interval == 0 else "main" for layer in range(n_layers)]


def rotations_by_window(family: Family, windows: Windows) -> list[Rotation]:
    """Returns the rotations of layers that differ by having a window."""
    full: Rotation = "none" if family.unrotated_full else "main"
    windowed: Rotation = "local" if family.local_rope else "main"
    return [full if window is None else windowed for window in windows]


def windows_by_pattern(pattern: WindowPattern, window: int | None, n_layers: int, first: int) -> Windows:
    """Returns the windows of all layers. first: the first windowed layer for the pattern "late"."""
    every = range(n_layers)
    if isinstance(pattern, int):
        layers = {layer for layer in every if (layer + 1) % pattern}
    else:
        none = every[:0]
        layers = set({"none": none, "all": every, "switched": every, "late": every[first:], "unrotated": none}[pattern])
    return tuple(window if layer in layers else None for layer in every)
