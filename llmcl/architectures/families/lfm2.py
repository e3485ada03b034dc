"""LFM2: short convolutions in most layers, attention with head norms in the rest."""

from __future__ import annotations

from llmcl.architectures.families.blocks import Attention, GatedMlp, Layer
from llmcl.architectures.families.family import Family, LayerSettings
from llmcl.architectures.families.recurrent import ShortConv, ShortConvSettings


def layer(settings: LayerSettings) -> Layer:
    if isinstance(settings.recurrent, ShortConvSettings):
        return ShortConv(settings=settings.recurrent), GatedMlp()
    return Attention(head_norms=True), GatedMlp()


FAMILY = Family(
    "Lfm2ForCausalLM",
    "lfm2",
    layer,
    recurrent="conv",
    modules={
        "self_attn.out_proj": "self_attn.o_proj",
        "self_attn.q_layernorm": "self_attn.q_norm",
        "self_attn.k_layernorm": "self_attn.k_norm",
        "feed_forward.w1": "mlp.gate_proj",
        "feed_forward.w3": "mlp.up_proj",
        "feed_forward.w2": "mlp.down_proj",
        "operator_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "model.embedding_norm": "model.norm",
    },
    gguf_modules={
        "token_embd_norm": "model.norm",
        "shortconv.in_proj": "conv.in_proj",
        "shortconv.conv": "conv.conv",
        "shortconv.out_proj": "conv.out_proj",
    },
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 128000,
        "rope_theta": 1000000.0,
        "norm_eps": 1e-5,
        "conv_L_cache": 3,
        "block_auto_adjust_ff_dim": True,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
        "tie_word_embeddings": True,
    },
    models="LFM2, LFM2.5 350M to 2.6B",
)
