"""The experts of a configuration, and their weights as transformers holds them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcl.architectures.config import ModelConfig
from llmcl.architectures.families.blocks import Experts, layer_name


def experts_of(config: ModelConfig) -> dict[int, Experts]:
    """The mixture of experts of each layer that has one."""
    return {i: block for i, blocks in enumerate(config.layers) for block in blocks if isinstance(block, Experts)}


def stacked_experts(config: ModelConfig, weights: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """The weights as transformers has them: the experts of a layer in one tensor of gate and up, and one of down."""
    stacked = dict(weights)
    if config.architecture == "gpt_oss":
        for i, block in experts_of(config).items():
            stacked |= _interleaved_experts(i, block, stacked)
        return stacked
    for i, block in experts_of(config).items():

        def experts(module: str, i: int = i, n: int = block.settings.n_experts) -> NDArray[Any]:
            return np.stack([stacked.pop(layer_name(i, f"{module.format(e)}.weight")) for e in range(n)])

        granite = config.architecture.startswith("granite")
        prefix = layer_name(i, "block_sparse_moe." if granite else "" if block.own_norms else "mlp.")
        stacked[f"{prefix}experts.gate_up_proj"] = np.concatenate([experts(block.gate), experts(block.up)], axis=1)
        stacked[f"{prefix}experts.down_proj"] = experts(block.down)
        router = stacked.pop(layer_name(i, f"{block.router}.weight"))
        module = "router" if granite else block.router if block.own_norms else "gate"
        stacked[f"{prefix}{module}.weight"] = router
        if block.settings.shared_size and granite:
            gate, up, down = (
                stacked.pop(layer_name(i, f"{block.shared}.{name}_proj.weight")) for name in ("gate", "up", "down")
            )
            stacked[layer_name(i, f"{block.shared}.input_linear.weight")] = np.concatenate([gate, up])
            stacked[layer_name(i, f"{block.shared}.output_linear.weight")] = down
    return stacked


def _interleaved_experts(i: int, block: Experts, weights: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Layer i's experts as gpt-oss has them: transposed, columns of gate and up in turn; taken out of `weights`."""
    found = {}
    for kind, suffix in (("weight", ""), ("bias", "_bias")):
        gate, up, down = (
            np.stack([weights.pop(layer_name(i, f"{m.format(e)}.{kind}")) for e in range(block.settings.n_experts)])
            for m in (block.gate, block.up, block.down)
        )
        pairs = np.stack([gate, up], axis=2).reshape(len(gate), -1, *gate.shape[2:])
        for name, values in (("gate_up", pairs), ("down", down)):
            stored = values if kind == "bias" else values.swapaxes(1, 2)
            found[layer_name(i, f"mlp.experts.{name}_proj{suffix}")] = np.ascontiguousarray(stored)
    return found
