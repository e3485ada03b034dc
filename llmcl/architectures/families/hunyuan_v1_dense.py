"""Hunyuan, dense: norms on query and key heads after their rotation."""

from __future__ import annotations

from llmcl.architectures.families.blocks import Attention, GatedMlp, Layer
from llmcl.architectures.families.family import Family, LayerSettings


def layer(settings: LayerSettings) -> Layer:
    attention = Attention(
        bias=settings.bias, output_bias=settings.output_bias, head_norms=True, norms_after_rotation=True
    )
    return attention, GatedMlp()


FAMILY = Family(
    "HunYuanDenseV1ForCausalLM",
    "hunyuan-dense",
    layer,
    refused=("use_cla",),
    fixed={"use_qk_norm": True},
    biases=("attention_bias",),
    rope_alpha=True,
    modules={"self_attn.query_layernorm": "self_attn.q_norm", "self_attn.key_layernorm": "self_attn.k_norm"},
    defaults={"rms_norm_eps": 1e-5},
    models="Hunyuan 0.5B to 7B",
)
