"""The experts of a configuration, and their weights as transformers holds them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcl.models.config import ModelConfig
from llmcl.models.families.blocks import Experts, layer_name


def experts_of(config: ModelConfig) -> dict[int, Experts]:
    """The mixture of experts of each layer that has one."""
    return {i: block for i, blocks in enumerate(config.layers) for block in blocks if isinstance(block, Experts)}


def stacked_experts(config: ModelConfig, weights: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """The weights as transformers has them: the experts of a layer in one tensor of gate and up, and one of down."""
    stacked = dict(weights)
    for i, block in experts_of(config).items():

        def experts(module: str, i: int = i, n: int = block.settings.n_experts) -> NDArray[Any]:
            return np.stack([stacked.pop(layer_name(i, f"{module.format(e)}.weight")) for e in range(n)])

        granite = config.architecture.startswith("granite")
        prefix = layer_name(i, "block_sparse_moe." if granite else "mlp.")
        stacked[f"{prefix}experts.gate_up_proj"] = np.concatenate([experts(block.gate), experts(block.up)], axis=1)
        stacked[f"{prefix}experts.down_proj"] = experts(block.down)
        router = stacked.pop(layer_name(i, f"{block.router}.weight"))
        stacked[f"{prefix}{'router' if granite else 'gate'}.weight"] = router
        if block.settings.shared_size:
            gate, up, down = (
                stacked.pop(layer_name(i, f"{block.shared}.{name}_proj.weight")) for name in ("gate", "up", "down")
            )
            stacked[layer_name(i, f"{block.shared}.input_linear.weight")] = np.concatenate([gate, up])
            stacked[layer_name(i, f"{block.shared}.output_linear.weight")] = down
    return stacked
