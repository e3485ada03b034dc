"""ERNIE 4.5: Llama with its rotary pairs next to each other."""

from __future__ import annotations

from llmcl.architectures.families.family import Family

FAMILY = Family(
    "Ernie4_5ForCausalLM",
    "ernie4_5",
    refused=("use_bias",),
    interleaves_rope=True,
    gguf_interleaves_rope=True,
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    },
    models="ERNIE 4.5 0.3B",
)
