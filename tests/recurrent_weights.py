"""Recurrent models as transformers has them: names and shapes of their weights, settings of their configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from llmcl.checkpoint.quantize import is_convolution
from llmcl.models.config import ModelConfig
from llmcl.models.families import FAMILIES
from llmcl.models.families.recurrent import RecurrentBlock, ShortConv


def recurrent_of(config: ModelConfig) -> dict[int, RecurrentBlock]:
    """The recurrent block of each layer that has one."""
    return {i: block for i, blocks in enumerate(config.layers) for block in blocks if isinstance(block, RecurrentBlock)}


def as_stored(config: ModelConfig, weights: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """The weights under the names that transformers has, convolutions as [channels, 1, length]."""
    modules = {own: stored for stored, own in FAMILIES[config.architecture].modules.items()}
    found = {}
    for name, values in weights.items():
        module, _, suffix = name.rpartition(".")
        own = next((own for own in modules if module == own or module.endswith(f".{own}")), None)
        if own is not None:
            name = f"{module.removesuffix(own)}{modules[own]}.{suffix}"
        found[name] = values[:, None] if is_convolution(name) else values
    return found


def recurrent_options(config: ModelConfig) -> dict[str, Any]:
    """Keys of transformers' configuration; the layers are in the order of `recurrent_of`."""
    blocks = recurrent_of(config)
    if not blocks:
        return {}
    kind = FAMILIES[config.architecture].recurrent
    kinds = [kind if i in blocks else "full_attention" for i in range(config.n_layers)]
    options: dict[str, Any] = {"layer_types": kinds}
    block = next(iter(blocks.values()))
    if isinstance(block, ShortConv):
        options |= {"conv_L_cache": block.settings.length, "block_auto_adjust_ff_dim": False}
        options |= {"norm_eps": config.rms_norm_eps}
    return options
