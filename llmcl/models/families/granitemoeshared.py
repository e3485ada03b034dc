"""Granite 3 with a mixture of experts and one that every token goes to. GGUF files name it granitemoe."""

from __future__ import annotations

from dataclasses import replace

from llmcl.models.families import granitemoe

FAMILY = replace(granitemoe.FAMILY, hf_class="GraniteMoeSharedForCausalLM", gguf_name=None)
