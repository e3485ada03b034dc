"""The experts of a configuration, and their weights as transformers holds them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from llmcl.architectures.config import ModelConfig
from llmcl.architectures.families.blocks import Experts, layer_name

if TYPE_CHECKING:
    from gguf import GGUFWriter


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

        if block.gate is None:
            for name, module in (("up", block.up), ("down", block.down)):
                stacked[layer_name(i, f"mixer.experts.{name}_proj")] = experts(module)
            continue
        granite = config.architecture.startswith("granite")
        usual = "feed_forward." if config.architecture == "lfm2_moe" else "mlp."
        prefix = layer_name(i, "block_sparse_moe." if granite else "" if block.own_norms else usual)
        stacked[f"{prefix}experts.gate_up_proj"] = np.concatenate([experts(block.gate), experts(block.up)], axis=1)
        stacked[f"{prefix}experts.down_proj"] = experts(block.down)
        router = stacked.pop(layer_name(i, f"{block.router}.weight"))
        module = "router" if granite else block.router if block.own_norms else "gate"
        module += ".wg" if config.architecture == "hunyuan_v1_moe" else ""
        stacked[f"{prefix}{module}.weight"] = router
        if block.settings.shared_size and granite:
            gate, up, down = (
                stacked.pop(layer_name(i, f"{block.shared}.{name}_proj.weight")) for name in ("gate", "up", "down")
            )
            stacked[layer_name(i, "shared_mlp.input_linear.weight")] = np.concatenate([gate, up])
            stacked[layer_name(i, "shared_mlp.output_linear.weight")] = down
    for i in range(config.n_layers if config.architecture == "granitemoehybrid" and not experts_of(config) else 0):
        gate, up, down = (stacked.pop(layer_name(i, f"mlp.{name}_proj.weight")) for name in ("gate", "up", "down"))
        stacked[layer_name(i, "shared_mlp.input_linear.weight")] = np.concatenate([gate, up])
        stacked[layer_name(i, "shared_mlp.output_linear.weight")] = down
    for name in [name for name in stacked if name.endswith("e_score_correction_bias")]:
        if config.architecture == "minimax_m2":
            stacked[name.replace("block_sparse_moe", "mlp")] = stacked.pop(name)
        if config.architecture == "ernie4_5_moe":
            stacked[name.replace("mlp.", "mlp.gate.")] = stacked.pop(name)[np.newaxis]
    return stacked


def expert_options(config: ModelConfig) -> dict[str, Any]:
    """Keys of transformers' configuration for experts that are chosen by scores; {} for other models."""
    mixtures = experts_of(config)
    if not mixtures or (scores := next(iter(mixtures.values())).settings.scores) is None:
        return {}
    experts, n_dense = next(iter(mixtures.values())).settings, min(mixtures)
    n_shared = experts.shared_size // experts.size
    if config.architecture == "ernie4_5_moe":
        shared = {"moe_num_shared_experts": n_shared, "moe_layer_start_index": n_dense}
        return {"moe_num_experts": experts.n_experts, **shared}
    if config.architecture == "glm4_moe":
        groups = {"n_group": scores.n_groups, "topk_group": scores.top_groups, "routed_scaling_factor": scores.scale}
        return {"n_routed_experts": experts.n_experts, "n_shared_experts": n_shared, **groups} | {
            "first_k_dense_replace": n_dense,
            "norm_topk_prob": experts.renormalize,
        }
    return {}


def write_scores(writer: GGUFWriter, config: ModelConfig) -> None:
    """What llama.cpp's converters write of a router that chooses by scores, in models without latents."""
    import gguf

    mixtures = experts_of(config)
    experts = next(iter(mixtures.values())).settings
    assert experts.scores is not None
    if config.architecture != "ernie4_5_moe":  # whose config.json does not name the function
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if config.architecture == "minimax_m2":
        return
    writer.add_leading_dense_block_count(min(mixtures))
    if config.architecture == "lfm2_moe":
        return
    writer.add_expert_shared_count(experts.shared_size // experts.size)
    if config.architecture == "ernie4_5_moe":
        writer.add_interleave_moe_layer_step(1)
        return
    writer.add_expert_weights_scale(experts.scores.scale)
    writer.add_expert_weights_norm(experts.renormalize)
    writer.add_expert_group_count(experts.scores.n_groups)
    writer.add_expert_group_used_count(experts.scores.top_groups)
    writer.add_nextn_predict_layers(0)


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
