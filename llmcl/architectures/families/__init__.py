"""The supported model families, each in a file named after config.json's `model_type` and declaring `FAMILY`.

`blocks.py`, `encoder.py`, `latent.py`, `normalize.py`, `parallel.py`, `plain_mlp.py` and `recurrent.py` define blocks
for layers, `family.py` the declaration.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import NamedTuple

from llmcl.architectures.families.family import Family

_NO_FAMILIES = ("blocks", "encoder", "family", "latent", "normalize", "parallel", "plain_mlp", "recurrent")

FAMILIES: dict[str, Family] = {
    name: import_module(f"{__name__}.{name}").FAMILY
    for _, name, _ in iter_modules(__path__)
    if name not in _NO_FAMILIES
}


class TextPart(NamedTuple):
    """A multimodal model whose text part llmcl runs."""

    hf_class: str  # name in config.json's `architectures`
    family: str  # the text part's family if missing in text_config
    tied: bool  # whether the output head is the embedding if config.json does not say
    flat: bool = False  # older files have no text_config: the values lie beside vision_config


# Keyed by model_type.
TEXT_PARTS: dict[str, TextPart] = {
    "gemma3": TextPart("Gemma3ForConditionalGeneration", "gemma3_text", tied=True),
    "gemma4": TextPart("Gemma4ForConditionalGeneration", "gemma4_text", tied=True),
    "gemma4_unified": TextPart("Gemma4UnifiedForConditionalGeneration", "gemma4_unified_text", tied=True),
    "llama4": TextPart("Llama4ForConditionalGeneration", "llama4_text", tied=False),
    "muse_glimmer": TextPart("MuseGlimmerForConditionalGeneration", "muse_glimmer_text", tied=False),
    "qwen2_vl": TextPart("Qwen2VLForConditionalGeneration", "qwen2_vl_text", tied=False, flat=True),
    "qwen2_5_vl": TextPart("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl_text", tied=False, flat=True),
    "qwen3_vl": TextPart("Qwen3VLForConditionalGeneration", "qwen3_vl_text", tied=False),
    "qwen3_vl_moe": TextPart("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe_text", tied=False),
    "qwen3_5": TextPart("Qwen3_5ForConditionalGeneration", "qwen3_5_text", tied=False),
    "qwen3_5_moe": TextPart("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe_text", tied=False),
    "idefics3": TextPart("Idefics3ForConditionalGeneration", "llama", tied=False),
    "smolvlm": TextPart("SmolVLMForConditionalGeneration", "llama", tied=False),
    "mistral3": TextPart("Mistral3ForConditionalGeneration", "mistral", tied=True),
}

# Keyed by GGUF's general.architecture.
GGUF_FAMILIES: dict[str, str] = {
    gguf_name: name
    for name, family in FAMILIES.items()
    for gguf_name in (family.gguf_name, family.gguf_name_with_experts)
    if gguf_name is not None
}
