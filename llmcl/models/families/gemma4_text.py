"""Gemma 4, its text part: layers without a window have larger heads, whose keys may be their values, too."""

from __future__ import annotations

from dataclasses import replace

from llmcl.models.families import gemma2, gemma3_text
from llmcl.models.families.blocks import Factor, Layer
from llmcl.models.families.family import Family, LayerSettings


def layer(settings: LayerSettings) -> Layer:
    attention, mlp = gemma3_text.layer(settings)
    attention = replace(
        attention, heads=settings.heads, keys_as_values=settings.keys_as_values, value_norms=True, soft_cap=None
    )
    return attention, mlp, Factor()


FAMILY = Family(
    "Gemma4ForCausalLM",
    "gemma4",
    layer,
    scaled_embedding=True,
    soft_caps=True,
    attention_scale=1.0,
    refused=(
        *("attn_logit_softcapping", "hidden_size_per_layer_input", "embedding_length_per_layer_input"),
        *("num_kv_shared_layers", "attention.shared_kv_layers", "enable_moe_block", "expert_count"),
    ),
    windows=6,
    local_rope=True,
    own_heads=True,
    gguf_modules=gemma2.FAMILY.gguf_modules,
    gguf_tensors={"layer_output_scale.weight": "layer_scalar"},
    defaults={
        "vocab_size": 262144,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "hidden_size_per_layer_input": 256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.25},
        },
        "sliding_window": 512,
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
)
