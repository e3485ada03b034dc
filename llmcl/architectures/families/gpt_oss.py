"""gpt-oss: sinks, a window in every other layer, and experts with biases and a clamped gate."""

from __future__ import annotations

from llmcl.architectures.families.blocks import Attention, Experts, ExpertSettings, Layer
from llmcl.architectures.families.family import ExpertKeys, Family, LayerSettings

_GATE, _UP, _DOWN = (f"mlp.experts.{{}}.{name}_proj" for name in ("gate", "up", "down"))
_ROUTER = "mlp.router"


def layer(settings: LayerSettings) -> Layer:
    attention = Attention(
        bias=settings.bias,
        output_bias=settings.output_bias,
        window=settings.window,
        sinks=True,
    )
    experts = Experts(
        settings=settings.experts or ExpertSettings(),
        activation="clamped_swiglu",
        bias=True,
        router=_ROUTER,
    )
    return attention, experts


FAMILY = Family(
    "GptOssForCausalLM",
    "gpt-oss",
    layer,
    windows=2,
    biases=("attention_bias",),
    fixed={"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
    quant_methods=("mxfp4",),
    experts=ExpertKeys(),
    interleaved={"mlp.experts.gate_up_proj": (_GATE, _UP), "mlp.experts.down_proj": (_DOWN,)},
    gguf_yarn_truncates=False,
    gguf_modules={
        "post_attention_norm": "post_attention_layernorm",
        "ffn_gate_inp": _ROUTER,
    },
    gguf_tensors={"attn_sinks.weight": "self_attn.sinks"},
    defaults={
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "sliding_window": 128,
        "attention_bias": True,
    },
    models="gpt-oss 20b, 120b",
)
