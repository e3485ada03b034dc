"""Family: what an architecture has in place of, or beyond, what Llama has.

Llama itself is an RMS norm before attention and before the MLP, projections without bias, rotary embeddings, a gate
with SiLU, and causal attention over the whole text with the scale 1/sqrt(head_dim).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Activation = Literal["silu", "gelu_tanh"]
# Which layers see only a sliding window: none, all, every other one from the first on, or (if use_sliding_window is
# set) those from max_window_layers on. A list `layer_types` in config.json goes before it.
WindowPattern = Literal["none", "all", "even", "late"]


@dataclass(frozen=True)
class Family:
    """What an architecture has in place of, or beyond, what Llama has.

    hf_class: its name in config.json's `architectures`. gguf_name: its general.architecture in GGUF files; None where
    they name another family. qkv_bias: the query, key and value projections add a bias.
    qk_norm: an RMS norm of every query and key head before the rotation. post_norms: a norm of what attention and MLP
    give, before it is added to the residual. activation: of the gate. norm_offset: what the model adds to the norm
    weights of safetensors (GGUF files hold the sum). scaled_embedding: embeddings times sqrt(hidden_size).
    soft_caps: attn_logit_softcapping, final_logit_softcapping and query_pre_attn_scalar are read. windows: see
    WindowPattern. gguf_interleaves_rope: GGUF files store the rotary pairs of q and k next to each other.
    defaults: values of keys that config.json may leave out, where they are not Llama's.
    """

    hf_class: str
    gguf_name: str | None
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
