"""Models with latent attention as transformers and llama.cpp's converter have them: weights and sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from expert_weights import experts_of
from numpy.typing import NDArray

from llmcl.architectures.config import ModelConfig
from llmcl.architectures.families.blocks import layer_name
from llmcl.architectures.families.latent import KEY_VALUE, KEYS, VALUES

if TYPE_CHECKING:
    from gguf import GGUFWriter

MSCALE = 0.707  # mscale and mscale_all_dim of those with YaRN


def with_joined_heads(config: ModelConfig, weights: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """The weights with keys and values of each head in one matrix, as transformers and older GGUF files have them."""
    found, of, heads = dict(weights), config.latent, config.n_q_heads
    for i in range(config.n_layers if of is not None else 0):
        assert of is not None
        keys = found.pop(layer_name(i, KEYS)).reshape(heads, of.rank, of.nope).swapaxes(1, 2)
        values = found.pop(layer_name(i, VALUES)).reshape(heads, of.value, of.rank)
        found[layer_name(i, KEY_VALUE)] = np.concatenate([keys, values], axis=1).reshape(-1, of.rank)
    return found


def latent_options(config: ModelConfig) -> dict[str, Any]:
    """Keys of transformers' configuration; {} for a model without latent attention."""
    if (of := config.latent) is None:
        return {}
    mixtures = experts_of(config)
    experts = next(iter(mixtures.values())).settings
    options: dict[str, Any] = {
        "num_key_value_heads": config.n_q_heads,
        "head_dim": of.rope,
        "kv_lora_rank": of.rank,
        "q_lora_rank": of.query_rank or None,
        "qk_rope_head_dim": of.rope,
        "qk_nope_head_dim": of.nope,
        "v_head_dim": of.value,
        "rope_interleave": of.interleaved,
        "n_routed_experts": experts.n_experts,
        "n_shared_experts": experts.shared_size // experts.size,
        "norm_topk_prob": experts.renormalize,
    }
    n_dense = min(mixtures)
    if config.architecture == "mistral4":
        options["head_dim"] = of.query  # of which the rotated share is
    if config.architecture == "glm4_moe_lite":
        options["mlp_layer_types"] = ["dense" if i < n_dense else "sparse" for i in range(config.n_layers)]
    else:
        options["first_k_dense_replace"] = n_dense
    if (scores := experts.scores) is not None:
        options |= {"n_group": scores.n_groups, "topk_group": scores.top_groups, "routed_scaling_factor": scores.scale}
    if config.architecture == "deepseek_v2":
        in_groups = scores is not None and scores.n_groups > 1
        options["topk_method"] = "group_limited_greedy" if in_groups else "greedy"
    return options


def write_latent(writer: GGUFWriter, config: ModelConfig, *, joined: bool) -> None:
    """What llama.cpp's converter writes beside what it does of every model. joined: as its older versions did."""
    import gguf

    of, mixtures = config.latent, experts_of(config)
    assert of is not None
    experts = next(iter(mixtures.values())).settings
    writer.add_kv_lora_rank(of.rank)
    if of.query_rank:
        writer.add_q_lora_rank(of.query_rank)
    writer.add_key_length(of.query if joined else of.width)
    writer.add_value_length(of.value if joined else of.rank)
    if not joined:
        writer.add_key_length_mla(of.query)
        writer.add_value_length_mla(of.value)
    if config.rope_scaling is not None:
        writer.add_rope_scaling_yarn_log_mul(0.1 * MSCALE)
    writer.add_leading_dense_block_count(min(mixtures))
    writer.add_expert_shared_count(experts.shared_size // experts.size)
    if experts.renormalize:
        writer.add_expert_weights_norm(True)
    if (scores := experts.scores) is not None:
        kind = gguf.ExpertGatingFuncType.SIGMOID if scores.scoring == "sigmoid" else gguf.ExpertGatingFuncType.SOFTMAX
        writer.add_expert_gating_func(kind)
        writer.add_expert_weights_scale(scores.scale)
        writer.add_expert_group_count(scores.n_groups)
        writer.add_expert_group_used_count(scores.top_groups)


def latent_in_gguf(
    config: ModelConfig, weights: Mapping[str, NDArray[Any]], *, joined: bool
) -> dict[str, NDArray[Any]]:
    """The weights as llama.cpp's converter holds them."""
    if (of := config.latent) is None:
        return dict(weights)
    found = with_joined_heads(config, weights) if joined else dict(weights)
    for name in [*found]:
        if name.endswith((KEYS, VALUES)):
            rows = of.rank if name.endswith(KEYS) else of.value
            found[name] = found[name].reshape(config.n_q_heads, rows, -1)
    return found
