"""OLMo 2: norms only after attention and MLP, and norms over all query heads and over all key heads."""

from __future__ import annotations

from llmcl.architectures.families.blocks import Attention, GatedMlp, Layer
from llmcl.architectures.families.family import Family, LayerSettings


def layer(settings: LayerSettings) -> Layer:
    return (
        Attention(
            None,
            post_norm="post_attention_layernorm",
            bias=settings.bias,
            output_bias=settings.output_bias,
            row_norms=True,
            rotation=settings.rotation,
            window=settings.window,
        ),
        GatedMlp(None, post_norm="post_feedforward_layernorm"),
    )


FAMILY = Family(
    "Olmo2ForCausalLM",
    "olmo2",
    layer,
    biases=("attention_bias",),
    gguf_windowed="olmo3",
    gguf_modules={"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"},
    defaults={"rms_norm_eps": 1e-5},
    models="OLMo 2 1B to 32B",
)
