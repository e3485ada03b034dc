"""Qwen 3.5, text part: a gated delta net in three layers out of four, attention with an output gate in the fourth."""

from __future__ import annotations

from llmcl.architectures.families.blocks import Attention, GatedMlp, Layer
from llmcl.architectures.families.family import Family, LayerSettings
from llmcl.architectures.families.recurrent import DeltaNet, DeltaSettings


def layer(settings: LayerSettings) -> Layer:
    if isinstance(settings.recurrent, DeltaSettings):
        return DeltaNet(settings=settings.recurrent), GatedMlp()
    return Attention(gated=True, head_norms=True), GatedMlp()


FAMILY = Family(
    "Qwen3_5ForCausalLM",
    "qwen35",
    layer,
    norm_offset=1.0,
    partial_rotation=True,
    recurrent="linear_attention",
    gguf_modules={
        "post_attention_norm": "post_attention_layernorm",
        "attn_qkv": "linear_attn.in_proj_qkv",
        "attn_gate": "linear_attn.in_proj_z",
        "ssm_beta": "linear_attn.in_proj_b",
        "ssm_alpha": "linear_attn.in_proj_a",
        "ssm_conv1d": "linear_attn.conv1d",
        "ssm_norm": "linear_attn.norm",
        "ssm_out": "linear_attn.out_proj",
    },
    gguf_tensors={"ssm_a": "linear_attn.A", "ssm_dt.bias": "linear_attn.dt_bias"},
    gguf_drafting_layers=True,
    defaults={
        "num_key_value_heads": 4,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "max_position_embeddings": 32768,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    },
    models="Qwen 3.5 dense",
)
