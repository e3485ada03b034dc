"""Qwen2.5-VL, text part: Qwen 2."""

from __future__ import annotations

from dataclasses import replace

from llmcl.architectures.families import qwen2, qwen3_vl_text

FAMILY = replace(
    qwen2.FAMILY,
    hf_class="Qwen2_5_VLTextModel",
    gguf_name="qwen2vl",
    rope_kinds=qwen3_vl_text.FAMILY.rope_kinds,
    rope_axes="chunks",
    defaults={
        **qwen2.FAMILY.defaults,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "max_window_layers": 80,
    },
    models="Qwen2.5-VL 3B to 72B",
)
