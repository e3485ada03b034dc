"""Granite 3 with experts and a shared expert. GGUF files call it granitemoe."""

from __future__ import annotations

from dataclasses import replace

from llmcl.architectures.families import granitemoe

FAMILY = replace(
    granitemoe.FAMILY,
    hf_class="GraniteMoeSharedForCausalLM",
    gguf_name=None,
    models="Granite 3 MoE with a shared expert",
)
