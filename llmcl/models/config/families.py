"""The supported architectures: one row each, saying how it differs from Llama.

Llama itself is an RMS norm before attention and before the MLP, projections without bias, rotary embeddings, a gate
with SiLU, and causal attention over the whole text with the scale 1/sqrt(head_dim).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from llmcl.models.config.limits import MAX_SOFT_CAP
from llmcl.models.config.reader import Reader

Activation = Literal["silu", "gelu_tanh"]
# Which layers see only a sliding window: none, all, every other one from the first on, or (if use_sliding_window is
# set) those from max_window_layers on. A list `layer_types` in config.json goes before it.
WindowPattern = Literal["none", "all", "even", "late"]


@dataclass(frozen=True)
class Family:
    """What an architecture has in place of, or beyond, what Llama has.

    hf_class: its name in config.json's `architectures`. qkv_bias: the query, key and value projections add a bias.
    qk_norm: an RMS norm of every query and key head before the rotation. post_norms: a norm of what attention and MLP
    give, before it is added to the residual. activation: of the gate. norm_offset: what the model adds to the norm
    weights of safetensors (GGUF files hold the sum). scaled_embedding: embeddings times sqrt(hidden_size).
    soft_caps: attn_logit_softcapping, final_logit_softcapping and query_pre_attn_scalar are read. windows: see
    WindowPattern. gguf_interleaves_rope: GGUF files store the rotary pairs of q and k next to each other.
    defaults: values of keys that config.json may leave out, where they are not Llama's.
    """

    hf_class: str
    qkv_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    activation: Activation = "silu"
    norm_offset: float = 0.0
    scaled_embedding: bool = False
    soft_caps: bool = False
    windows: WindowPattern = "none"
    gguf_interleaves_rope: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)


_QWEN_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}

# By config.json's model_type.
FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", gguf_interleaves_rope=True),
    "mistral": Family(
        "MistralForCausalLM",
        windows="all",
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    ),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True, windows="late", defaults=_QWEN_DEFAULTS),
    "qwen3": Family("Qwen3ForCausalLM", qk_norm=True, windows="late", defaults={**_QWEN_DEFAULTS, "head_dim": 128}),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        post_norms=True,
        activation="gelu_tanh",
        norm_offset=1.0,
        scaled_embedding=True,
        soft_caps=True,
        windows="even",
        defaults={
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
            "sliding_window": 4096,
            "query_pre_attn_scalar": 256,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "bos_token_id": 2,
            "eos_token_id": 1,
        },
    ),
}

# By GGUF's general.architecture. Mistral's files name Llama; a window in one is that of all layers.
GGUF_ARCHITECTURES: tuple[str, ...] = ("llama", "qwen2", "qwen3", "gemma2")


def family_fields(read: Reader, family: Family, prefix: str, hidden_size: int) -> dict[str, Any]:
    """The fields that follow from the family, and those that both formats state under the same key."""

    def soft_cap(key: str) -> float | None:
        if not family.soft_caps or read.get(prefix + key) is None:
            return None
        return read.number(prefix + key, 0.0, MAX_SOFT_CAP)

    return {
        "qkv_bias": family.qkv_bias,
        "qk_norm": family.qk_norm,
        "post_norms": family.post_norms,
        "activation": family.activation,
        "embedding_scale": float(np.sqrt(np.float32(hidden_size))) if family.scaled_embedding else 1.0,
        "attention_soft_cap": soft_cap("attn_logit_softcapping"),
        "logit_soft_cap": soft_cap("final_logit_softcapping"),
    }


def windows_by_pattern(pattern: WindowPattern, window: int | None, n_layers: int, first: int) -> tuple[int | None, ...]:
    """first: the first layer with a window, for the pattern "late"."""
    if window is None or pattern == "none":
        return ()
    layers = {"all": range(n_layers), "even": range(0, n_layers, 2), "late": range(first, n_layers)}[pattern]
    return tuple(window if layer in layers else None for layer in range(n_layers))
