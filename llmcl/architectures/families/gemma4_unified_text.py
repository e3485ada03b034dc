"""Gemma 4 12B, text part: like the other dense model. GGUF files call it gemma4."""

from __future__ import annotations

from dataclasses import replace

from llmcl.architectures.families import gemma4_text

_NOT_THERE = ("hidden_size_per_layer_input",)

FAMILY = replace(
    gemma4_text.FAMILY,
    hf_class="Gemma4UnifiedForCausalLM",
    gguf_name=None,
    defaults={
        **{key: value for key, value in gemma4_text.FAMILY.defaults.items() if key not in _NOT_THERE},
        "max_position_embeddings": 262144,
        "sliding_window": 1024,
    },
    models="Gemma 4 12B",
)
