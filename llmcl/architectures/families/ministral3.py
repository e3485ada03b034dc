"""Ministral 3: Mistral with YaRN, and scores that grow with the query's position. GGUF files call it mistral3."""

from __future__ import annotations

from llmcl.architectures.families.family import Family

FAMILY = Family(
    "Ministral3ForCausalLM",
    "mistral3",
    query_scale=True,
    windows="all",
    gguf_interleaves_rope=True,
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1000000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    models="Ministral 3 3B, 8B, 14B",
)
