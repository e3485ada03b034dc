"""Qwen2-VL, text part: Qwen 2. GGUF files have one name for it and Qwen2.5-VL."""

from __future__ import annotations

from dataclasses import replace

from llmcl.architectures.families import qwen2_5_vl_text

FAMILY = replace(
    qwen2_5_vl_text.FAMILY,
    hf_class="Qwen2VLTextModel",
    gguf_name=None,
    models="Qwen2-VL 2B to 72B",
)
