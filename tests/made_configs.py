"""What config.json and GGUF metadata of a small Llama say, and the configurations that changes of them give."""

from __future__ import annotations

from typing import Any

from llmcl.architectures.config import ModelConfig, config_from_gguf, config_from_hf

HF_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "rope_scaling": None,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GGUF_METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 30,
    "llama.context_length": 8192,
    "llama.embedding_length": 576,
    "llama.feed_forward_length": 1536,
    "llama.attention.head_count": 9,
    "llama.attention.head_count_kv": 3,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 100000.0,
    "llama.rope.dimension_count": 64,
    "llama.vocab_size": 49152,
    "tokenizer.ggml.tokens": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}
LLAMA3_SCALING = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def hf(**changes: Any) -> ModelConfig:
    return config_from_hf({**HF_CONFIG, **changes})


def from_gguf(changes: dict[str, Any] | None = None, **kwargs: Any) -> ModelConfig:
    return config_from_gguf({**GGUF_METADATA, **(changes or {})}, ["token_embd.weight"], **kwargs)


def gguf_of(architecture: str, **changes: Any) -> dict[str, Any]:
    metadata = {key.replace("llama.", f"{architecture}."): value for key, value in GGUF_METADATA.items()}
    return {**metadata, "general.architecture": architecture, **changes}
