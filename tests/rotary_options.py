"""How a model rotates queries and keys, in the words of transformers' configuration."""

from __future__ import annotations

from typing import Any

import numpy as np
from latent_weights import MSCALE

from llmcl.architectures.config import ModelConfig
from llmcl.architectures.families import FAMILIES


def rotary_options(config: ModelConfig) -> dict[str, Any]:
    """`rope_parameters`. Raises ValueError for a scaling that transformers does not have."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind == "linear":
        rope |= {"rope_type": "linear", "factor": scaling.factor}
    elif scaling is not None and scaling.kind == "llama3":
        rope |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position,
        }
    elif scaling is not None and scaling.kind in ("yarn", "longrope"):
        rope |= {"rope_type": scaling.kind, "original_max_position_embeddings": scaling.original_max_position}
        if scaling.kind == "yarn":
            rope |= {"factor": scaling.factor, "beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
            rope |= {} if scaling.truncate else {"truncate": False}
            rope |= {} if config.latent is None else {"mscale": MSCALE, "mscale_all_dim": MSCALE}
        else:
            assert scaling.factors is not None and scaling.long_factors is not None
            rope |= {"short_factor": [*scaling.factors], "long_factor": [*scaling.long_factors]}
    elif scaling is not None and scaling.factors is not None and np.isinf(scaling.factors).any():
        share = np.isfinite(scaling.factors).mean()
        rope |= {"rope_type": "proportional", "partial_rotary_factor": float(share)}
    elif scaling is not None:
        raise ValueError(f"transformers has no rope scaling of kind {scaling.kind!r}")
    if FAMILIES[config.architecture].local_rope:
        local = {"rope_type": "default", "rope_theta": config.local_rope_theta}
        rope = {"full_attention": rope, "sliding_attention": local}
    if (query_scale := config.attention(config.attention_layers[0]).query_scale) is not None:
        assert scaling is not None and scaling.original_max_position == query_scale.length
        rope |= {"llama_4_scaling_beta": query_scale.beta}
        rope |= {"mscale": 1.0, "mscale_all_dim": 1.0} if config.latent is None else {}
    if FAMILIES[config.architecture].partial_rotation:
        rope["partial_rotary_factor"] = (config.rotary_dim or config.head_dim) / config.head_dim
    return rope
