"""Qwen3-VL with a mixture of experts, text part: Qwen 3 MoE."""

from __future__ import annotations

from dataclasses import replace

from llmcl.architectures.families import qwen3_moe, qwen3_vl_text
from llmcl.architectures.families.family import ExpertKeys

_GATE, _UP, _DOWN = (f"mlp.experts.{{}}.{name}_proj" for name in ("gate", "up", "down"))

FAMILY = replace(
    qwen3_moe.FAMILY,
    hf_class="Qwen3VLMoeTextModel",
    gguf_name="qwen3vlmoe",
    windows="none",
    rope_kinds=qwen3_vl_text.FAMILY.rope_kinds,
    rope_axes=qwen3_vl_text.FAMILY.rope_axes,
    experts=ExpertKeys("moe_intermediate_size"),
    transposed={"mlp.experts.gate_up_proj": (_GATE, _UP), "mlp.experts.down_proj": (_DOWN,)},
    defaults={
        "num_key_value_heads": 16,
        "max_position_embeddings": 128000,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "num_local_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
    },
    models="Qwen3-VL 30B-A3B, 235B-A22B",
)
