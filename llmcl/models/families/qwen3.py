"""Qwen 3: a norm of query and key heads, and heads of 128."""

from __future__ import annotations

from llmcl.models.families import qwen2
from llmcl.models.families.blocks import Attention, GatedMlp, Layer
from llmcl.models.families.family import Family, LayerSettings


def layer(settings: LayerSettings) -> Layer:
    return Attention(head_norms=True, window=settings.window), GatedMlp()


FAMILY = Family(
    "Qwen3ForCausalLM",
    "qwen3",
    layer,
    windows="late",
    defaults={**qwen2.FAMILY.defaults, "head_dim": 128},
)
