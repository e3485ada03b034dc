"""Qwen3-VL, text part: Qwen 3."""

from __future__ import annotations

from dataclasses import replace

from llmcl.architectures.families import qwen3

FAMILY = replace(
    qwen3.FAMILY,
    hf_class="Qwen3VLTextModel",
    gguf_name="qwen3vl",
    windows="none",
    rope_kinds={"mrope": "default"},
    rope_axes="interleaved",
    defaults={
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 128000,
        "rope_theta": 500000.0,
    },
    models="Qwen3-VL 2B to 32B",
)
