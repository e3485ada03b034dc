"""Apertus: an MLP with xIELU instead of a gate, and norms on query and key heads."""

from __future__ import annotations

from llmcl.architectures.families.blocks import Attention, Layer
from llmcl.architectures.families.family import Family, LayerSettings
from llmcl.architectures.families.plain_mlp import CURVE, PlainMlp


def layer(settings: LayerSettings) -> Layer:
    return Attention(head_norms=True, bias=settings.bias, output_bias=settings.output_bias), PlainMlp()


FAMILY = Family(
    "ApertusForCausalLM",
    "apertus",
    layer,
    biases=("attention_bias",),
    modules={"attention_layernorm": "input_layernorm", "feedforward_layernorm": "post_attention_layernorm"},
    gguf_values={f"xielu.{name.rpartition('.')[2]}": name for name in CURVE},
    defaults={
        "max_position_embeddings": 65536,
        "rms_norm_eps": 1e-5,
        "rope_theta": 12000000.0,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 12000000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    },
    models="Apertus 8B, 70B",
)
