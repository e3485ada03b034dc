"""Muse Glimmer, text part: normalised embeddings, gated attention, norms after blocks; layers with a window rotate."""

from __future__ import annotations

from llmcl.architectures.families import normalize
from llmcl.architectures.families.blocks import Attention, GatedMlp, Layer
from llmcl.architectures.families.family import Family, LayerSettings

_NORMS = "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"


def layer(settings: LayerSettings) -> Layer:
    before, after, before_mlp, after_mlp = _NORMS
    attention = Attention(
        before,
        post_norm=after,
        gate_module="self_attn.gate_proj",
        bias=settings.bias,
        output_bias=settings.output_bias,
        head_norms=True,
        rotation=settings.rotation,
        window=settings.window,
    )
    mlp = GatedMlp(before_mlp, post_norm=after_mlp)
    return (normalize.Normalize(), attention, mlp) if settings.is_first else (attention, mlp)


FAMILY = Family(
    "MuseGlimmerTextModel",
    gguf_name=None,
    layer=layer,
    biases=("attention_bias",),
    fixed={"hidden_activation": "silu"},
    soft_caps=True,
    refused=("attn_logit_softcapping",),
    output_multiplier=True,
    windows=4,
    unrotated_layers=True,
    shifted_norms=_NORMS,
    constants={
        normalize.WEIGHTS: 1.0,
        "self_attn.q_norm.weight": 1.0,
        "self_attn.k_norm.weight": 1.0,
    },
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "post_norm_eps": 1e-8,
        "sliding_window": 2048,
        "final_logit_softcapping": 20.0,
        "qk_scale_factor": 3.87,
        "output_multiplier": 0.19611613513818404,
    },
    models="Muse Glimmer",
)
