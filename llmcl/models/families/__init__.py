"""The supported model families: a file each, whose name is config.json's `model_type` and which declares `FAMILY`.

`blocks.py`, `latent.py` and `recurrent.py` have what a layer can be made of, `family.py` what a family declares.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import NamedTuple

from llmcl.models.families.family import Family

_NO_FAMILIES = ("blocks", "family", "latent", "recurrent")

FAMILIES: dict[str, Family] = {
    name: import_module(f"{__name__}.{name}").FAMILY
    for _, name, _ in iter_modules(__path__)
    if name not in _NO_FAMILIES
}


class TextPart(NamedTuple):
    """A model of text and images, of which llmcl runs the text part."""

    hf_class: str  # in config.json's `architectures`
    family: str  # of the text part, where text_config does not name it
    tied: bool  # whether the output head is the embedding, where config.json does not say it


# By model_type.
TEXT_PARTS: dict[str, TextPart] = {
    "gemma3": TextPart("Gemma3ForConditionalGeneration", "gemma3_text", tied=True),
    "gemma4": TextPart("Gemma4ForConditionalGeneration", "gemma4_text", tied=True),
    "gemma4_unified": TextPart("Gemma4UnifiedForConditionalGeneration", "gemma4_unified_text", tied=True),
    "qwen3_5": TextPart("Qwen3_5ForConditionalGeneration", "qwen3_5_text", tied=False),
    "qwen3_5_moe": TextPart("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe_text", tied=False),
    "mistral3": TextPart("Mistral3ForConditionalGeneration", "mistral", tied=True),
}

# By GGUF's general.architecture.
GGUF_FAMILIES: dict[str, str] = {
    family.gguf_name: name for name, family in FAMILIES.items() if family.gguf_name is not None
}
