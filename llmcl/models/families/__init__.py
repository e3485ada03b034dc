"""The supported model families: a file each, whose name is config.json's `model_type` and which declares `FAMILY`.

`blocks.py`, `latent.py` and `recurrent.py` have what a layer can be made of, `family.py` what a family declares.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from llmcl.models.families.family import Family

_NO_FAMILIES = ("blocks", "family", "latent", "recurrent")

FAMILIES: dict[str, Family] = {
    name: import_module(f"{__name__}.{name}").FAMILY
    for _, name, _ in iter_modules(__path__)
    if name not in _NO_FAMILIES
}

# Models of text and images whose text part is one of these: their model_type, their class in config.json's
# `architectures`, and the family of the text part where text_config does not name it.
TEXT_PARTS: dict[str, tuple[str, str]] = {
    "gemma3": ("Gemma3ForConditionalGeneration", "gemma3_text"),
    "gemma4": ("Gemma4ForConditionalGeneration", "gemma4_text"),
    "gemma4_unified": ("Gemma4UnifiedForConditionalGeneration", "gemma4_unified_text"),
    "qwen3_5": ("Qwen3_5ForConditionalGeneration", "qwen3_5_text"),
    "qwen3_5_moe": ("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe_text"),
    "mistral3": ("Mistral3ForConditionalGeneration", "mistral"),
}

# By GGUF's general.architecture.
GGUF_FAMILIES: dict[str, str] = {
    family.gguf_name: name for name, family in FAMILIES.items() if family.gguf_name is not None
}
