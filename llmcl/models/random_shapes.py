"""Shapes of models for speed tests without a download, as their published config.json states them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmcl.errors import CheckpointError, UsageError, shown
from llmcl.models.config.hf import config_from_hf
from llmcl.models.config.model_config import ModelConfig


def _llama3(rope_factor: float, **sizes: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": rope_factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "torch_dtype": "bfloat16",
        "eos_token_id": 128001,
        **sizes,
    }


RANDOM_SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": _llama3(
        32.0,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        tie_word_embeddings=True,
    ),
    "llama-3.1-8b": _llama3(
        8.0,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=False,
    ),
    "smollm2-135m": {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "torch_dtype": "bfloat16",
        "eos_token_id": 2,
    },
    "mistral-7b": {
        "model_type": "mistral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "vocab_size": 32000,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "torch_dtype": "bfloat16",
        "eos_token_id": 2,
    },
    "qwen2.5-0.5b": {
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "torch_dtype": "bfloat16",
        "eos_token_id": 151643,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "torch_dtype": "bfloat16",
        "eos_token_id": 151645,
    },
    "gemma-2-2b": {
        "model_type": "gemma2",
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 256000,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "torch_dtype": "bfloat16",
    },
}


def random_shape_config(shape: str) -> ModelConfig:
    """The configuration of a name in RANDOM_SHAPES or of a config.json; raises UsageError for anything else."""
    return config_from_hf(random_shape_json(shape))


def random_shape_json(shape: str) -> dict[str, Any]:
    """What `random_shape_config` reads: the object of the shape's config.json."""
    if shape in RANDOM_SHAPES:
        return RANDOM_SHAPES[shape]
    from llmcl.checkpoint.files import read_json

    try:
        return read_json(Path(shape))
    except (CheckpointError, ValueError) as error:
        raise UsageError(
            f"random shape {shown(shape)} is neither one of {', '.join(RANDOM_SHAPES)} nor a readable config.json "
            f"({error})"
        ) from error
