"""Qwen 2 and 2.5: a bias of queries, keys and values."""

from __future__ import annotations

from llmcl.models.families.family import Family

FAMILY = Family(
    "Qwen2ForCausalLM",
    "qwen2",
    qkv_bias=True,
    windows="late",
    defaults={
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
)
