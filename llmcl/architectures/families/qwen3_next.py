"""Qwen3-Next: Qwen 3.5 with a mixture of experts, and delta nets with joined projections."""

from __future__ import annotations

from dataclasses import replace

from llmcl.architectures.families import qwen3_5_moe_text
from llmcl.architectures.families.family import ExpertKeys

_MOE = qwen3_5_moe_text.FAMILY

FAMILY = replace(
    _MOE,
    hf_class="Qwen3NextForCausalLM",
    gguf_name="qwen3next",
    joined_inputs=("qkvz", "ba"),
    experts=ExpertKeys("moe_intermediate_size", "norm_topk_prob", shared_size="shared_expert_intermediate_size"),
    gguf_modules={
        **_MOE.gguf_modules,
        "ssm_in": "linear_attn.in_proj_qkvz",
        "ssm_ba": "linear_attn.in_proj_ba",
    },
    defaults={**_MOE.defaults, "num_local_experts": 512, "num_experts_per_tok": 10, "norm_topk_prob": True},
    models="Qwen3-Next 80B-A3B",
)
