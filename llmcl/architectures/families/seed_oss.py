"""Seed-OSS: Llama with biases on queries, keys and values, and head size 128."""

from __future__ import annotations

from llmcl.architectures.families.family import Family

FAMILY = Family(
    "SeedOssForCausalLM",
    "seed_oss",
    biases=("attention_bias", "attention_out_bias", "mlp_bias"),
    gguf_modules={"post_attention_norm": "post_attention_layernorm"},
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 524288,
        "attention_bias": True,
    },
    models="Seed-OSS 36B",
)
