"""GLM-4.5 to 4.7, Air too: half of each head rotates, and experts chosen by corrected sigmoids beside a shared one."""

from __future__ import annotations

from llmcl.architectures.families import deepseek_v3
from llmcl.architectures.families.blocks import Attention, Experts, GatedMlp, Layer
from llmcl.architectures.families.family import Family, LayerSettings

_V3 = deepseek_v3.FAMILY


def layer(settings: LayerSettings) -> Layer:
    attention = Attention(bias=settings.bias, head_norms=settings.head_norms)
    if settings.experts is None:
        return attention, GatedMlp()
    return attention, Experts(settings=settings.experts, shared="mlp.shared_experts")


FAMILY = Family(
    "Glm4MoeForCausalLM",
    "glm4moe",
    layer,
    biases=("attention_bias",),
    optional_head_norms=True,
    partial_rotation=True,
    experts=_V3.experts,
    stacked=_V3.stacked,
    drafting_layers=True,
    gguf_drafting_layers=True,
    gguf_modules={**_V3.gguf_modules, "post_attention_norm": "post_attention_layernorm"},
    gguf_tensors=_V3.gguf_tensors,
    defaults={
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1,
    },
    models="GLM-4.5, 4.6, 4.7, GLM-4.5-Air",
)
