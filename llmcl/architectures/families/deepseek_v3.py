"""DeepSeek-V3 and R1: latent attention, and experts chosen by corrected sigmoids in groups, beside a shared one."""

from __future__ import annotations

from llmcl.architectures.families.blocks import Experts, GatedMlp, Layer
from llmcl.architectures.families.family import ExpertKeys, Family, LayerSettings
from llmcl.architectures.families.latent import LatentAttention, LatentSettings

_GATE, _UP, _DOWN = (f"mlp.experts.{{}}.{name}_proj" for name in ("gate", "up", "down"))
_SHARED = "mlp.shared_experts"


def layer(settings: LayerSettings) -> Layer:
    latent = settings.latent or LatentSettings()
    attention = LatentAttention(settings=latent, bias=settings.bias, query_scale=settings.query_scale)
    if settings.experts is None:
        return attention, GatedMlp()
    return attention, Experts(settings=settings.experts, shared=_SHARED)


FAMILY = Family(
    "DeepseekV3ForCausalLM",
    "deepseek2",
    layer,
    latent=True,
    query_scale=True,  # in GGUF files of Mistral Large 3
    biases=("attention_bias",),
    fixed={"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    experts=ExpertKeys(
        "moe_intermediate_size",
        "norm_topk_prob",
        gguf_renormalize=False,
        shared_count="n_shared_experts",
        scoring="sigmoid",
        dense_layers="first_k_dense_replace",
    ),
    stacked={"mlp.experts.gate_up_proj": (_GATE, _UP), "mlp.experts.down_proj": (_DOWN,)},
    drafting_layers=True,
    gguf_drafting_layers=True,
    gguf_modules={
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_kv_b": "self_attn.kv_b_proj",
        "attn_k_b": "self_attn.k_b_proj",
        "attn_v_b": "self_attn.v_b_proj",
        "ffn_gate_shexp": f"{_SHARED}.gate_proj",
        "ffn_up_shexp": f"{_SHARED}.up_proj",
        "ffn_down_shexp": f"{_SHARED}.down_proj",
    },
    gguf_tensors={"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"},
    defaults={
        "q_lora_rank": 1536,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "max_position_embeddings": 4096,
    },
    models="DeepSeek-V3, R1",
)
