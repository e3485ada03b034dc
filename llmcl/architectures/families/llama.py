"""Llama 1 to 3.2, and models with the same architecture: SmolLM2, TinyLlama."""

from __future__ import annotations

from llmcl.architectures.families.family import Family

FAMILY = Family(
    "LlamaForCausalLM",
    "llama",
    biases=("attention_bias", "mlp_bias"),
    gguf_experts="mixtral",
    gguf_interleaves_rope=True,
    models="Llama 1 to 3.3, SmolLM2, TinyLlama",
)
