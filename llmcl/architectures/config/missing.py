"""Unsupported architectures, with the missing feature of each, for error messages."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import NoReturn

from llmcl.architectures.config.reader import unsupported
from llmcl.errors import UnsupportedModelError, shown

_MISSING = {
    "state-space layers (Mamba)": ("mamba mamba2 jamba bamba zamba zamba2 falcon_h1 falcon-h1 plamo2"),
    "recurrent layers of its kind": "rwkv rwkv6 rwkv7 arwkv7 recurrent_gemma xlstm kimi_linear kimi-linear minimax",
    "an encoder: it makes no text, or not alone": (
        "modernbert modern-bert nomic-bert nomic_bert roberta xlm-roberta xlm_roberta jina-bert-v2 deberta-v2 "
        "t5 mt5 t5encoder bart whisper neo-bert gemma-embedding"
    ),
    "an encoder of images or sound: the file is a projector (mmproj), which belongs beside a model": "clip",
    "no keys for its layers without rotation (take the safetensors)": "llama4",
    "sparse attention by an index": "deepseek_v32 deepseek32 glm_moe_dsa glm-dsa",
    "LayerNorm or a MLP without a gate": (
        "gpt2 gpt_neo gpt_neox gptneox gptj gpt-j bloom mpt opt phi phi2 falcon starcoder starcoder2 stablelm "
        "codeshell nemotron"
    ),
    "several streams of activations in each layer (AltUp)": "gemma3n gemma3n_text",
    "blocks of diffusion": "dream llada llada-moe",
}
_FILE_TYPES = {
    "adapter": "a LoRA adapter, not a model: name its model with -m, and the adapter with --lora",
    "imatrix": "an importance matrix for quantising, not a model",
    "mmproj": "an encoder of images or sound (mmproj), which belongs beside a model",
}
_WHAT = {name: what for what, names in _MISSING.items() for name in names.split()}


def check_file_type(kind: object) -> None:
    """Raises UnsupportedModelError for a GGUF file that is not a model. kind: general.type."""
    if isinstance(kind, str) and kind in _FILE_TYPES:
        raise UnsupportedModelError(f"the file is {_FILE_TYPES[kind]}. Give the GGUF file of the model.")


def refuse_architecture(name: str, what: str, known: Iterable[str]) -> NoReturn:
    """Raises UnsupportedModelError and names the missing feature if known.

    what: "the architecture", for the message. known: supported names, to suggest a near match.
    """
    needs = f", which has {_WHAT[name]}" if name in _WHAT else ""
    close = [] if name in _WHAT else get_close_matches(name, known, n=1, cutoff=0.85)
    near = f"the nearest it runs is {close[0]}; " if close else ""
    unsupported(f"{what} {shown(name)}{needs}", f"{near}choose one that `llmcl models` lists")
