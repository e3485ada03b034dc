"""Qwen 2 and 2.5: biases on queries, keys and values."""

from __future__ import annotations

from llmcl.architectures.families.blocks import Attention, GatedMlp, Layer
from llmcl.architectures.families.family import Family, LayerSettings


def layer(settings: LayerSettings) -> Layer:
    return Attention(bias=True, window=settings.window), GatedMlp()


FAMILY = Family(
    "Qwen2ForCausalLM",
    "qwen2",
    layer,
    windows="late",
    defaults={
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    models="Qwen2, Qwen2.5, R1-Distill-Qwen",
)
