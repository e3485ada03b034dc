"""ModelConfig: the sizes and constants of a model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from llmcl.errors import CheckpointError
from llmcl.models.config.limits import MAX_INTERMEDIATE
from llmcl.models.config.reader import unsupported
from llmcl.models.config.rope import RopeScaling, inverse_frequencies
from llmcl.models.families.family import Activation

# Kernels read rows in vectors of 16.
_SIZE_MULTIPLE = 16


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and constants of a decoder; `config_from_hf` and `config_from_gguf` check every field.

    max_position: trained context length in tokens. dtype: what the checkpoint stores, one of "float32", "float16",
    "bfloat16", "quantized". bos_token_id and eos_token_ids lie within the vocabulary.

    The fields with defaults are what Llama does not have. qkv_bias, qk_norm, post_norms, activation, norm_offset: see
    `families.Family`. embedding_scale: factor of the embeddings. attention_scale: factor of the scores, None for
    1/sqrt(head_dim). attention_soft_cap, logit_soft_cap: c in c tanh(x / c), of scores and of logits. windows: tokens
    that each layer sees back, itself included, None for all; () where no layer has a window.
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_q_heads: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_embeddings: bool
    dtype: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    qkv_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    activation: Activation = "silu"
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    attention_scale: float | None = None
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    windows: tuple[int | None, ...] = ()

    def inv_freq(self) -> np.ndarray:
        """Rotary frequencies in radians per position, float32 [head_dim / 2]."""
        return inverse_frequencies(self.head_dim, self.rope_theta, self.rope_scaling)

    def window(self, layer: int) -> int | None:
        """Tokens that a layer's queries see back, themselves included; None for all."""
        return self.windows[layer] if self.windows else None

    def n_parameters(self) -> int:
        """Number of weights, embeddings included; tied embeddings count once."""
        q_size, kv_size = self.n_q_heads * self.head_dim, self.n_kv_heads * self.head_dim
        attention = self.hidden_size * (2 * q_size + 2 * kv_size)
        attention += (q_size + 2 * kv_size) * self.qkv_bias + 2 * self.head_dim * self.qk_norm
        mlp = 3 * self.hidden_size * self.intermediate_size
        layer = attention + mlp + (4 if self.post_norms else 2) * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return embeddings + self.n_layers * layer + self.hidden_size


def checked(config: ModelConfig, source: str) -> ModelConfig:
    """Refuses sizes that each make sense but not together, or that the kernels cannot handle."""
    if config.n_q_heads % config.n_kv_heads:
        raise CheckpointError(
            f"{source}: {config.n_q_heads} attention heads cannot share {config.n_kv_heads} key/value heads "
            "evenly. The checkpoint is damaged or not what it claims to be; fetch or convert it again."
        )
    for name in ("hidden_size", "intermediate_size", "head_dim"):
        if (value := getattr(config, name)) % _SIZE_MULTIPLE:
            unsupported(f"{name} {value}", f"it must be a multiple of {_SIZE_MULTIPLE}")
    # Together with the limits of each this keeps every byte count far from 2**63.
    if config.n_q_heads * config.head_dim > MAX_INTERMEDIATE:
        unsupported(
            f"{config.n_q_heads} heads of {config.head_dim}",
            f"their product must be at most {MAX_INTERMEDIATE}",
        )
    return config
