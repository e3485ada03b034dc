"""Gemma 4, text part: layers without a window have larger heads and may use keys as values.

In the 26B-A4B each layer has a mixture of experts beside an MLP, declared here as the shared expert. In E2B and E4B
late layers read earlier layers' keys and values, and each layer has its own token embeddings.
"""

from __future__ import annotations

from dataclasses import replace

from llmcl.architectures.families import gemma2, gemma3_text
from llmcl.architectures.families.blocks import Experts, Factor, Layer, LayerInput, OwnNorms
from llmcl.architectures.families.family import ExpertKeys, Family, LayerSettings

_GATE, _UP, _DOWN = (f"experts.{{}}.{name}_proj" for name in ("gate", "up", "down"))
_AFTER_INPUT = "post_per_layer_input_norm"
_ROUTER, _BEFORE_CHOSEN = "router.proj", "pre_feedforward_layernorm_2"
_NORMS = OwnNorms(
    "router.scale", "pre_feedforward_layernorm", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2"
)


def layer(settings: LayerSettings) -> Layer:
    attention, mlp = gemma3_text.layer(settings)
    attention = replace(
        attention,
        heads=settings.heads,
        keys_as_values=settings.keys_as_values,
        value_norms=settings.keys_of is None,
        keys_of=settings.keys_of,
        soft_cap=None,
    )
    layer_input = (LayerInput(post_norm=_AFTER_INPUT, size=settings.input_size),) if settings.input_size else ()
    if settings.experts is None:
        return attention, replace(mlp, width=settings.mlp_width), *layer_input, Factor()
    experts = Experts(
        _BEFORE_CHOSEN,
        mlp.post_norm,
        settings.experts,
        mlp.activation,
        router=_ROUTER,
        gate=_GATE,
        up=_UP,
        down=_DOWN,
        shared="mlp",
        own_norms=_NORMS,
        scales="router.per_expert_scale",
    )
    return attention, experts, *layer_input, Factor()


FAMILY = Family(
    "Gemma4ForCausalLM",
    "gemma4",
    layer,
    scaled_embedding=True,
    soft_caps=True,
    attention_scale=1.0,
    refused=("attn_logit_softcapping",),
    windows=6,
    local_rope=True,
    own_heads=True,
    experts=ExpertKeys("moe_intermediate_size", True, True, "intermediate_size", "top_k_experts", "enable_moe_block"),
    stacked={"experts.gate_up_proj": (_GATE, _UP), "experts.down_proj": (_DOWN,)},
    gguf_modules={
        **gemma2.FAMILY.gguf_modules,
        "ffn_gate_inp": _ROUTER,
        "ffn_gate_exps": _GATE,
        "ffn_up_exps": _UP,
        "ffn_down_exps": _DOWN,
        "inp_gate": "per_layer_input_gate",
        "proj": "per_layer_projection",
        "post_norm": _AFTER_INPUT,
        "pre_ffw_norm_2": _BEFORE_CHOSEN,
        "post_ffw_norm_1": _NORMS.after_shared,
        "post_ffw_norm_2": _NORMS.after_chosen,
    },
    gguf_tensors={
        "layer_output_scale.weight": "layer_scalar",
        "ffn_gate_inp.scale": _NORMS.router,
        "ffn_down_exps.scale": "router.per_expert_scale",
    },
    defaults={
        "vocab_size": 262144,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "hidden_size_per_layer_input": 256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.25},
        },
        "sliding_window": 512,
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
    models="Gemma 4 31B, 26B-A4B, E2B, E4B",
)
