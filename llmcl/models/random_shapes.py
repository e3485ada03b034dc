"""Model shapes, from published config.json files, for speed tests without a download."""

from __future__ import annotations

import os
from os import PathLike
from pathlib import Path
from typing import Any

from llmcl.architectures.config.hf import config_from_hf
from llmcl.architectures.config.model_config import ModelConfig
from llmcl.errors import CheckpointError, UsageError, one_line, shown

_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
)


def _shape(model_type: str, *sizes: float, **others: Any) -> dict[str, Any]:
    """Returns the config.json contents for a model with these sizes, in the order of _SIZES."""
    return {"model_type": model_type, "torch_dtype": "bfloat16", **dict(zip(_SIZES, sizes, strict=True)), **others}


def _llama3(*sizes: float, head_dim: int, tied: bool, rope_factor: float) -> dict[str, Any]:
    scaling = {
        "rope_type": "llama3",
        "factor": rope_factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    rope = {"rope_theta": 500000.0, "rope_scaling": scaling}
    others = {"head_dim": head_dim, "tie_word_embeddings": tied, "eos_token_id": 128001, **rope}
    return _shape("llama", *sizes, 128256, 131072, 1e-5, **others)


_QWEN: dict[str, Any] = {"rope_theta": 1000000.0, "tie_word_embeddings": True}
_QWEN3: dict[str, Any] = {**_QWEN, "head_dim": 128, "eos_token_id": 151645}
_QWEN3_MOE: dict[str, Any] = {
    **_QWEN3,
    "tie_word_embeddings": False,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}
_GEMMA3: dict[str, Any] = {
    "head_dim": 256,
    "sliding_window": 1024,
    "query_pre_attn_scalar": 256,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}
_GRANITE: dict[str, Any] = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.015625,
    "logits_scaling": 8.0,
    "rope_theta": 10000000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
}
_QWEN3_5: dict[str, Any] = {
    "head_dim": 256,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_theta": 1e7, "rope_type": "default"},
    "eos_token_id": 248044,
}
_LFM2: dict[str, Any] = {
    "norm_eps": 1e-5,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "block_ff_dim": 12288,
    "rope_theta": 1000000.0,
    "eos_token_id": 7,
}
_GLM_FLASH: dict[str, Any] = {
    "moe_intermediate_size": 1536,
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "tie_word_embeddings": False,
    "rope_theta": 1000000.0,
    "eos_token_id": 154820,
}
RANDOM_SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": _llama3(2048, 8192, 16, 32, 8, head_dim=64, tied=True, rope_factor=32.0),
    "llama-3.1-8b": _llama3(4096, 14336, 32, 32, 8, head_dim=128, tied=False, rope_factor=8.0),
    "smollm2-135m": _shape(
        "llama", 576, 1536, 30, 9, 3, 49152, 8192, 1e-5, rope_theta=100000.0, tie_word_embeddings=True, eos_token_id=2
    ),
    "smollm3-3b": _shape(
        "smollm3",
        *(2048, 11008, 36, 16, 4, 128256, 65536, 1e-6),
        rope_theta=5000000.0,
        tie_word_embeddings=True,
        eos_token_id=128012,
    ),
    "mistral-7b": _shape(
        "mistral", 4096, 14336, 32, 32, 8, 32000, 32768, 1e-5, sliding_window=4096, rope_theta=10000.0, eos_token_id=2
    ),
    # The long factor lists of the rotary scaling are left out.
    "phi-4-mini": _shape(
        "phi3",
        *(3072, 8192, 32, 24, 8, 200064, 131072, 1e-5),
        partial_rotary_factor=0.75,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        eos_token_id=199999,
    ),
    "granite-3.3-2b": _shape("granite", 2048, 8192, 40, 32, 8, 49159, 131072, 1e-5, **_GRANITE),
    "olmo-2-7b": _shape("olmo2", 4096, 11008, 32, 32, 32, 100352, 4096, 1e-6, rope_theta=500000.0, eos_token_id=100257),
    "olmoe-1b-7b": _shape(
        "olmoe",
        *(2048, 1024, 16, 16, 16, 50304, 4096, 1e-5),
        num_experts=64,
        num_experts_per_tok=8,
        norm_topk_prob=False,
        eos_token_id=50279,
    ),
    "qwen2.5-0.5b": _shape("qwen2", 896, 4864, 24, 14, 2, 151936, 32768, 1e-6, **_QWEN, eos_token_id=151643),
    "qwen2.5-7b": _shape(
        "qwen2", 3584, 18944, 28, 28, 4, 152064, 32768, 1e-6, rope_theta=1000000.0, eos_token_id=151645
    ),
    "qwen3-0.6b": _shape("qwen3", 1024, 3072, 28, 16, 8, 151936, 40960, 1e-6, **_QWEN3),
    "qwen3-4b": _shape("qwen3", 2560, 9728, 36, 32, 8, 151936, 40960, 1e-6, **_QWEN3),
    "qwen3-30b-a3b": _shape("qwen3_moe", 2048, 6144, 48, 32, 4, 151936, 40960, 1e-6, **_QWEN3_MOE),
    "qwen3.5-9b": _shape("qwen3_5_text", 4096, 12288, 32, 16, 4, 248320, 262144, 1e-6, **_QWEN3_5),
    "gpt-oss-20b": _shape(
        "gpt_oss", 2880, 2880, 24, 64, 8, 201088, 131072, 1e-5, eos_token_id=200002, num_local_experts=32
    ),
    "gemma-2-2b": _shape("gemma2", 2304, 9216, 26, 8, 4, 256000, 8192, 1e-6, head_dim=256),
    "gemma-3-4b": _shape("gemma3_text", 2560, 10240, 34, 8, 4, 262208, 131072, 1e-6, **_GEMMA3),
    "gemma-3-12b": _shape("gemma3_text", 3840, 15360, 48, 16, 8, 262208, 131072, 1e-6, **_GEMMA3),
    "lfm2-1.2b": _shape("lfm2", 2048, 12288, 16, 32, 8, 65536, 128000, 1e-5, **_LFM2),
    "glm-4.7-flash": _shape("glm4_moe_lite", 2048, 10240, 47, 20, 20, 154880, 202752, 1e-5, **_GLM_FLASH),
}


def random_shape_config(shape: str) -> ModelConfig:
    """Returns the configuration for a name in RANDOM_SHAPES or a path to a config.json. Raises UsageError for anything
    else.
    """
    return config_from_hf(random_shape_json(shape))


def random_shape_json(shape: str) -> dict[str, Any]:
    """Returns the JSON object from the shape's config.json."""
    if not isinstance(shape, (str, PathLike)):
        raise UsageError(f"shape is {shown(shape)}; expected the name of a shape, or the path of a config.json")
    if shape in RANDOM_SHAPES:
        return RANDOM_SHAPES[shape]
    from llmcl.checkpoint.files import read_json

    try:
        os.stat(shape)
        return read_json(Path(shape))
    except FileNotFoundError:
        reason = "there is no such file"
    except OSError as error:  # a name too long, or an unreadable folder
        reason = f"it cannot be read: {error.strerror}"
    except (CheckpointError, ValueError) as error:
        reason = one_line(error)
    raise UsageError(
        f"random shape {shown(shape)} is neither one of {', '.join(RANDOM_SHAPES)} nor a readable config.json "
        f"({reason})"
    )
