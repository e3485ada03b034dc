"""EXAONE 4: norms on heads, and norms only after blocks. In the 32B only layers with a window rotate, three of four."""

from __future__ import annotations

from llmcl.architectures.families import olmo2
from llmcl.architectures.families.blocks import Attention, GatedMlp, Layer
from llmcl.architectures.families.family import Family, LayerSettings


def layer(settings: LayerSettings) -> Layer:
    return (
        Attention(
            None,
            post_norm="post_attention_layernorm",
            head_norms=True,
            rotation=settings.rotation,
            window=settings.window,
        ),
        GatedMlp(None, post_norm="post_feedforward_layernorm"),
    )


FAMILY = Family(
    "Exaone4ForCausalLM",
    "exaone4",
    layer,
    windows=4,
    unrotated_full=True,
    gguf_modules=olmo2.FAMILY.gguf_modules,
    defaults={
        "num_key_value_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
    },
    models="EXAONE 4 1.2B, 32B",
)
