"""SmolLM 3: Llama, but every fourth layer (by default) does not rotate queries and keys."""

from __future__ import annotations

from llmcl.architectures.families.family import Family

FAMILY = Family(
    "SmolLM3ForCausalLM",
    "smollm3",
    biases=("attention_bias", "mlp_bias"),
    windows="unrotated",
    unrotated_layers=True,
    gguf_interleaves_rope=True,
    defaults={
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rope_theta": 2000000.0,
        "tie_word_embeddings": True,
        "no_rope_layer_interval": 4,
    },
    models="SmolLM3 3B",
)
