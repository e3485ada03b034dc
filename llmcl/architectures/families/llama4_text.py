"""Llama 4, text part: chunked attention in layers that rotate, and one expert per token beside a shared one."""

from __future__ import annotations

from llmcl.architectures.families.blocks import Attention, Experts, GatedMlp, Layer
from llmcl.architectures.families.family import ExpertKeys, Family, LayerSettings

_GATE, _UP, _DOWN = (f"feed_forward.experts.{{}}.{name}_proj" for name in ("gate", "up", "down"))


def layer(settings: LayerSettings) -> Layer:
    rotates = settings.rotation != "none"
    attention = Attention(
        bias=settings.bias,
        output_bias=settings.output_bias,
        head_norms=settings.head_norms and rotates,
        rotation=settings.rotation,
        chunk=settings.chunk if rotates else None,
        query_scale=None if rotates else settings.query_scale,
    )
    if settings.experts is None:
        return attention, GatedMlp()
    experts = Experts(
        settings=settings.experts,
        router="feed_forward.router",
        gate=_GATE,
        up=_UP,
        down=_DOWN,
        shared="feed_forward.shared_expert",
        scaled_inputs=True,
    )
    return attention, experts


FAMILY = Family(
    "Llama4ForCausalLM",
    gguf_name=None,
    layer=layer,
    biases=("attention_bias",),
    fixed={"num_experts_per_tok": 1},
    interleaves_rope=True,
    unrotated_layers=True,
    optional_head_norms=True,
    chunks=True,
    experts=ExpertKeys(
        "moe_intermediate_size", False, shared_size="moe_intermediate_size", scoring="sigmoid", corrected=False
    ),
    transposed={"feed_forward.experts.gate_up_proj": (_GATE, _UP), "feed_forward.experts.down_proj": (_DOWN,)},
    constants={"self_attn.q_norm.weight": 1.0, "self_attn.k_norm.weight": 1.0},
    modules={f"feed_forward.{name}_proj": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
    defaults={
        "intermediate_size_mlp": 16384,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1,
        "use_qk_norm": True,
        "no_rope_layer_interval": 4,
        "attention_chunk_size": 8192,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
    },
    models="Llama 4 Scout, Maverick",
)
