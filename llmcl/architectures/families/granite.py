"""Granite 3: Llama with scale factors on embeddings, scores, block outputs and logits."""

from __future__ import annotations

from llmcl.architectures.families.family import Family

FAMILY = Family(
    "GraniteForCausalLM",
    "granite",
    biases=("attention_bias", "mlp_bias"),
    multipliers=True,
    gguf_interleaves_rope=True,
    models="Granite 3, Granite 4 without Mamba",
)
