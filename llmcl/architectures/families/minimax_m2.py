"""MiniMax M2: norms over all query heads and over all key heads, half of each head rotates, experts by sigmoids."""

from __future__ import annotations

from llmcl.architectures.families import mixtral
from llmcl.architectures.families.blocks import Attention, Experts, ExpertSettings, Layer
from llmcl.architectures.families.family import ExpertKeys, Family, LayerSettings

_EXPERT = "block_sparse_moe.experts.{}"
_CORRECTION = "block_sparse_moe.e_score_correction_bias"


def layer(settings: LayerSettings) -> Layer:
    experts = Experts(
        settings=settings.experts or ExpertSettings(),
        router="block_sparse_moe.gate",
        gate=f"{_EXPERT}.w1",
        up=f"{_EXPERT}.w3",
        down=f"{_EXPERT}.w2",
        correction=_CORRECTION,
    )
    return Attention(row_norms=True), experts


FAMILY = Family(
    "MiniMaxM2ForCausalLM",
    "minimax-m2",
    layer,
    partial_rotation=True,
    fixed={"scoring_func": "sigmoid"},
    experts=ExpertKeys(scoring="sigmoid"),
    gguf_modules=mixtral.FAMILY.gguf_modules,
    gguf_tensors={"exp_probs_b.bias": _CORRECTION},
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 196608,
        "rope_theta": 5000000.0,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
    },
    models="MiniMax M2",
)
