"""Gemma 2: norms after attention and MLP, soft caps, windows in every other layer, a scaled embedding."""

from __future__ import annotations

from llmcl.architectures.families.blocks import Attention, GatedMlp
from llmcl.architectures.families.family import Family, LayerSettings


def layer(settings: LayerSettings) -> tuple[Attention, GatedMlp]:
    return (
        Attention(
            post_norm="post_attention_layernorm",
            bias=settings.bias,
            output_bias=settings.output_bias,
            window=settings.window,
            soft_cap=settings.soft_cap,
        ),
        GatedMlp("pre_feedforward_layernorm", post_norm="post_feedforward_layernorm", activation="gelu_tanh"),
    )


FAMILY = Family(
    "Gemma2ForCausalLM",
    "gemma2",
    layer,
    biases=("attention_bias",),
    norm_offset=1.0,
    scaled_embedding=True,
    soft_caps=True,
    query_pre_attn_scalar=True,
    windows=2,
    gguf_wide_scale=46,
    gguf_modules={
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    defaults={
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
    models="Gemma 2 2B, 9B, 27B",
)
