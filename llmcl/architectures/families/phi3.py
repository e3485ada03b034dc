"""Phi 3 and 4: fused tensors for q, k, v and for gate, up; partial rotation of each head."""

from __future__ import annotations

from llmcl.architectures.families.blocks import Attention, GatedMlp, Layer
from llmcl.architectures.families.family import Family, LayerSettings


def layer(settings: LayerSettings) -> Layer:
    return Attention(fused=True, window=settings.window), GatedMlp(fused=True)


FAMILY = Family(
    "Phi3ForCausalLM",
    "phi3",
    layer,
    partial_rotation=True,
    rope_kinds={"su": "longrope", "yarn": "longrope"},
    windows="all",
    gguf_modules={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    defaults={
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    },
    models="Phi-3, Phi-3.5-mini, Phi-4, Phi-4-mini",
)
