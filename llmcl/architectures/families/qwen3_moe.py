"""Qwen 3 with experts instead of the MLP, in all or some layers."""

from __future__ import annotations

from llmcl.architectures.families import qwen2
from llmcl.architectures.families.blocks import Attention, Experts, GatedMlp, Layer
from llmcl.architectures.families.family import ExpertKeys, Family, LayerSettings


def layer(settings: LayerSettings) -> Layer:
    attention = Attention(head_norms=True, bias=settings.bias, output_bias=settings.output_bias, window=settings.window)
    return attention, GatedMlp() if settings.experts is None else Experts(settings=settings.experts)


FAMILY = Family(
    "Qwen3MoeForCausalLM",
    "qwen3moe",
    layer,
    biases=("attention_bias",),
    windows="switched",
    experts=ExpertKeys("moe_intermediate_size", renormalize="norm_topk_prob"),
    defaults={
        **qwen2.FAMILY.defaults,
        "num_key_value_heads": 4,
        "num_local_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
    },
    models="Qwen3 30B-A3B, 235B-A22B, Qwen3-Coder",
)
