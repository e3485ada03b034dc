"""Collects the content of `llmcl models` from the declarations: families, features, formats and limits."""

from __future__ import annotations

from dataclasses import fields
from importlib import import_module
from typing import Any

from llmcl.architectures import families
from llmcl.architectures.config import limits
from llmcl.architectures.config.quantization import METHODS
from llmcl.architectures.config.rope import KINDS
from llmcl.architectures.families import FAMILIES, TEXT_PARTS
from llmcl.architectures.families.blocks import (
    Attention,
    Block,
    Experts,
    ExpertSettings,
    Factor,
    GatedMlp,
    QueryScale,
    Scores,
)
from llmcl.architectures.families.family import Family, LayerSettings
from llmcl.architectures.families.parallel import ParallelAttention
from llmcl.architectures.families.plain_mlp import PlainMlp
from llmcl.checkpoint.formats import FLOAT_FORMATS, FORMATS
from llmcl.checkpoint.pre_tokenizers import PRE_TOKENIZERS
from llmcl.checkpoint.quantize import QUANTIZE_FORMATS
from llmcl.kernels.common.dtype import KV_DTYPES
from llmcl.models.random_shapes import RANDOM_SHAPES, random_shape_config

# Descriptions of block fields, in listing order.
_ATTENTION = {
    "bias": "biases of q, k, v",
    "output_bias": "a bias of attention's output",
    "head_norms": "norms of heads",
    "norms_after_rotation": "norms after rotation",
    "value_norms": "norms of values",
    "row_norms": "norms of all heads together",
    "post_norm": "norms after blocks",
    "soft_cap": "soft caps of scores",
    "query_scale": "scores that grow with the position",
    "sinks": "sinks",
    "gated": "an output gate",
    "gate_module": "an output gate of its own",
}
_RECURRENT = {"conv": "short convolutions", "linear_attention": "gated delta nets", "mamba": "Mamba-2"}
_WINDOWS = {"none": "", "all": "a window", "switched": "a window", "late": "a window in late layers"}
_WINDOWS["unrotated"] = "a window in layers without rotation"
# Families of which a published model was opened and its answers compared. The others were tested with random weights,
# in folders as transformers writes them and in GGUF files with the keys of llama.cpp's converter.
_PUBLISHED = ("llama", "bert")


def supported_models() -> dict[str, Any]:
    """Returns the whole list as a JSON-compatible object."""
    examples = _examples()
    return {
        "families": [_described(name, family, examples.get(name, [])) for name, family in FAMILIES.items()],
        "text_parts": {name: part.family for name, part in TEXT_PARTS.items()},
        "formats": {
            "safetensors": list(FLOAT_FORMATS),
            "quant_methods": list(METHODS),
            "gguf": list(FORMATS),
            "quantize": list(QUANTIZE_FORMATS),
            "kv_cache": list(KV_DTYPES),
        },
        "rotary_scalings": ["default", *KINDS],
        "gguf_pre_tokenizers": list(PRE_TOKENIZERS),
        "limits": {
            "size_multiple": limits.SIZE_MULTIPLE,
            "hidden_size": limits.MAX_HIDDEN,
            "intermediate_size": limits.MAX_INTERMEDIATE,
            "layers": limits.MAX_LAYERS,
            "heads": limits.MAX_HEADS,
            "head_dim": limits.MAX_HEAD_DIM,
            "experts": limits.MAX_EXPERTS,
            "vocab_size": limits.MAX_VOCAB,
            "context": limits.MAX_POSITION,
        },
    }


def _described(name: str, family: Family, examples: list[dict[str, Any]]) -> dict[str, Any]:
    """Describes a family. about: the first line of the module's docstring."""
    about = (import_module(f"{families.__name__}.{name}").__doc__ or "").partition("\n")[0]
    return {
        "model_type": name,
        "class": family.hf_class,
        "gguf": family.gguf_name,
        "models": family.models,
        "about": about,
        "examples": examples,
        "tested_with": "a published model" if name in _PUBLISHED else "random weights",
        "features": _features(family),
        "safetensors": [*FLOAT_FORMATS, *(method.upper() for method in family.quant_methods or METHODS)],
    }


def _examples() -> dict[str, list[dict[str, Any]]]:
    """Returns example models by family, with parameters and the bytes of the weights in two formats."""
    examples: dict[str, list[dict[str, Any]]] = {}
    for shape in RANDOM_SHAPES:
        config = random_shape_config(shape)
        n = config.n_parameters()
        sizes = {"name": shape, "parameters": n, "bf16_bytes": 2 * n, "q4_bytes": n * 18 // 32}  # 18 bytes: 32 weights
        examples.setdefault(config.architecture, []).append(sizes)
    return examples


def _features(family: Family) -> list[str]:
    """Lists a family's features beyond Llama, including optional features."""
    experts = None
    if family.experts is not None:
        has_shared = family.experts.shared_size or family.experts.shared_count
        scores = Scores() if family.experts.scoring == "sigmoid" else None
        experts = ExpertSettings(shared_size=16 if has_shared else 0, scores=scores)
    blocks = family.layer(
        LayerSettings(
            soft_cap=1.0 if family.soft_caps else None,
            query_scale=QueryScale(1.0, 1) if family.query_scale else None,
            experts=experts,
            bias="attention_bias" in family.biases,
            output_bias="attention_bias" in family.biases,
            mlp_bias="mlp_bias" in family.biases,
        )
    )
    features = ["latent attention" if family.latent else "", "layer norms" if family.layer_norms else ""]
    features.append("an MLP beside attention" if isinstance(blocks[-1], ParallelAttention) else "")
    features += [text for key, text in _ATTENTION.items() if any(_is_set(block, key) for block in blocks)]
    if isinstance(family.windows, int):
        features.append(f"a window in {family.windows - 1} of {family.windows} layers")
    else:
        features.append(_WINDOWS[family.windows])
    features.append("rotary frequencies of their own in layers with a window" if family.local_rope else "")
    if family.own_heads:
        features += ["larger heads in layers without a window", "late layers that read keys of others"]
        features.append("embeddings of each layer")
    features.append("attention in chunks" if family.chunks else "")
    features.append("layers without rotation" if family.unrotated_layers else "")
    features.append(
        "" if family.recurrent is None else f"{_RECURRENT[family.recurrent]} in place of attention in some layers"
    )
    features.append("rotation if config.json says so" if family.rotates == "optional" else "")
    features.append("partial rotation" if family.partial_rotation else "")
    features.append("multipliers" if family.multipliers else "")
    features.append("a factor of each layer" if any(isinstance(block, Factor) for block in blocks) else "")
    for block in blocks:
        if isinstance(block, PlainMlp):
            features.append("xIELU without a gate" if block.curved else "a squared ReLU without a gate")
        if isinstance(block, GatedMlp):
            features.append("biases of the MLP" if block.bias else "")
        features.append("experts without a gate" if isinstance(block, Experts) and block.gate is None else "")
        if isinstance(block, (GatedMlp, Experts)):
            features.append(
                {"silu": "", "gelu_tanh": "GELU", "clamped_swiglu": "a clamped gate"}.get(block.activation, "")
            )
        if isinstance(block, Experts):
            features.append("experts with biases" if block.bias else "experts")
            features.append("experts chosen by scores" if block.settings.scores else "")
            beside = "an MLP beside the experts" if block.own_norms else "a shared expert"
            features.append(beside if block.settings.shared_size else "")
            features.append("a gate of the shared expert" if block.has_shared_gate else "")
    return [text for text in features if text]


def _is_set(block: Block, key: str) -> bool:
    value = getattr(block, key, None)
    return isinstance(block, (Attention, GatedMlp)) and key in {f.name for f in fields(block)} and bool(value)
