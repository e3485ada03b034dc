"""Mistral: Llama with a sliding window in all layers. GGUF files call it Llama; a window there covers all layers."""

from __future__ import annotations

from llmcl.architectures.families.family import Family

FAMILY = Family(
    "MistralForCausalLM",
    gguf_name=None,
    windows="all",
    defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    models="Mistral 7B, Nemo, Mistral Small 3, Devstral",
)
