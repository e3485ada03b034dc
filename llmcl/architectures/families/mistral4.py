"""Mistral 4: DeepSeek's latent attention with scores that grow with the query's position, experts by softmax."""

from __future__ import annotations

from dataclasses import replace

from llmcl.architectures.families import deepseek_v3

_V3 = deepseek_v3.FAMILY
assert _V3.experts is not None

FAMILY = replace(
    _V3,
    hf_class="Mistral4ForCausalLM",
    gguf_name="mistral4",
    fixed={"n_group": 1},
    experts=replace(_V3.experts, scoring="softmax"),
    drafting_layers=False,
    defaults={
        **_V3.defaults,
        "kv_lora_rank": 256,
        "q_lora_rank": 1024,
        "qk_nope_head_dim": 64,
        "n_routed_experts": 128,
        "num_experts_per_tok": 4,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 0,
        "max_position_embeddings": 1048576,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 128.0,
            "original_max_position_embeddings": 8192,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    models="Mistral 4",
)
