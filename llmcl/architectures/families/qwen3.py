"""Qwen 3: norms on query and key heads, and head size 128."""

from __future__ import annotations

from llmcl.architectures.families import qwen2
from llmcl.architectures.families.blocks import Attention, GatedMlp, Layer
from llmcl.architectures.families.family import Family, LayerSettings


def layer(settings: LayerSettings) -> Layer:
    return (
        Attention(head_norms=True, bias=settings.bias, output_bias=settings.output_bias, window=settings.window),
        GatedMlp(),
    )


FAMILY = Family(
    "Qwen3ForCausalLM",
    "qwen3",
    layer,
    biases=("attention_bias",),
    windows="late",
    defaults={**qwen2.FAMILY.defaults, "head_dim": 128},
    judges=True,
    models="Qwen3 0.6B to 32B, Qwen3-Embedding",
)
