"""DeepSeek-V2, Lite too: latent attention, and experts chosen by softmax, some in groups, beside shared ones."""

from __future__ import annotations

from dataclasses import replace

from llmcl.architectures.families import deepseek_v3

_V3 = deepseek_v3.FAMILY
assert _V3.experts is not None

FAMILY = replace(  # GGUF files share V3's name and state the router's scoring
    _V3,
    hf_class="DeepseekV2ForCausalLM",
    gguf_name=None,
    fixed={"moe_layer_freq": 1, "scoring_func": "softmax"},
    # like transformers, which ignores norm_topk_prob
    experts=replace(_V3.experts, scoring="softmax", renormalize=False),
    drafting_layers=False,
    defaults={
        **_V3.defaults,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1407,
        "n_shared_experts": 2,
        "n_group": None,
        "topk_group": None,
        "topk_method": "greedy",
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 0,
        "max_position_embeddings": 2048,
    },
    models="DeepSeek-V2, V2-Lite, Coder-V2",
)
