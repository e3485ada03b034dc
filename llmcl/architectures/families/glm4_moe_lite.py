"""GLM-4.7-Flash: latent attention, and experts chosen by corrected sigmoids beside a shared one."""

from __future__ import annotations

from dataclasses import replace

from llmcl.architectures.families import deepseek_v3

_V3 = deepseek_v3.FAMILY

FAMILY = replace(  # GGUF files use DeepSeek's name
    _V3,
    hf_class="Glm4MoeLiteForCausalLM",
    gguf_name=None,
    defaults={
        **_V3.defaults,
        "q_lora_rank": 768,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1536,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.8,
        "first_k_dense_replace": 1,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
    },
    models="GLM-4.7-Flash",
)
