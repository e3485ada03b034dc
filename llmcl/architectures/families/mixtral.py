"""Mixtral: Mistral with experts instead of the MLP. GGUF files call it Llama."""

from __future__ import annotations

from llmcl.architectures.families.blocks import Attention, Experts, ExpertSettings, Layer
from llmcl.architectures.families.family import ExpertKeys, Family, LayerSettings

_EXPERT = "block_sparse_moe.experts.{}"


def layer(settings: LayerSettings) -> Layer:
    experts = Experts(
        settings=settings.experts or ExpertSettings(),
        router="block_sparse_moe.gate",
        gate=f"{_EXPERT}.w1",
        up=f"{_EXPERT}.w3",
        down=f"{_EXPERT}.w2",
    )
    return Attention(window=settings.window), experts


FAMILY = Family(
    "MixtralForCausalLM",
    gguf_name=None,
    layer=layer,
    windows="all",
    experts=ExpertKeys(),
    gguf_interleaves_rope=True,
    gguf_modules={
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate_exps": f"{_EXPERT}.w1",
        "ffn_up_exps": f"{_EXPERT}.w3",
        "ffn_down_exps": f"{_EXPERT}.w2",
    },
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    models="Mixtral 8x7B, 8x22B",
)
