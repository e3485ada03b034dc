"""OLMoE: a mixture of experts, and norms over all query heads and over all key heads."""

from __future__ import annotations

from llmcl.architectures.families.blocks import Attention, Experts, ExpertSettings, Layer
from llmcl.architectures.families.family import ExpertKeys, Family, LayerSettings


def layer(settings: LayerSettings) -> Layer:
    attention = Attention(row_norms=True, bias=settings.bias, output_bias=settings.output_bias)
    return attention, Experts(settings=settings.experts or ExpertSettings())


FAMILY = Family(
    "OlmoeForCausalLM",
    "olmoe",
    layer,
    refused=("clip_qkv", "attention.clamp_kqv"),
    biases=("attention_bias",),
    experts=ExpertKeys(renormalize="norm_topk_prob", gguf_renormalize=False),
    defaults={
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "num_local_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    },
    models="OLMoE 1B-7B",
)
