"""Gemma 3, text part: head norms, and a window with separate rotary frequencies in five layers out of six."""

from __future__ import annotations

from dataclasses import replace

from llmcl.architectures.families import gemma2
from llmcl.architectures.families.blocks import Attention, GatedMlp
from llmcl.architectures.families.family import Family, LayerSettings


def layer(settings: LayerSettings) -> tuple[Attention, GatedMlp]:
    attention, mlp = gemma2.layer(settings)
    return replace(attention, head_norms=True, rotation=settings.rotation), mlp


FAMILY = Family(
    "Gemma3ForCausalLM",
    "gemma3",
    layer,
    biases=("attention_bias",),
    norm_offset=1.0,
    scaled_embedding=True,
    soft_caps=True,
    query_pre_attn_scalar=True,
    refused=("attn_logit_softcapping",),
    windows=6,
    local_rope=True,
    bidirectional=True,
    gguf_wide_scale=62,
    gguf_modules=gemma2.FAMILY.gguf_modules,
    defaults={
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
    models="Gemma 3 270M to 27B, EmbeddingGemma",
)
