"""Qwen 3.5 with a mixture of experts, text part. A gated shared expert serves every token."""

from __future__ import annotations

from dataclasses import replace

from llmcl.architectures.families import qwen3_5_text
from llmcl.architectures.families.blocks import Experts, Layer
from llmcl.architectures.families.family import ExpertKeys, LayerSettings

_GATE, _UP, _DOWN = (f"mlp.experts.{{}}.{name}_proj" for name in ("gate", "up", "down"))


def layer(settings: LayerSettings) -> Layer:
    mixer, mlp = qwen3_5_text.layer(settings)
    if settings.experts is None:
        return mixer, mlp
    return mixer, Experts(settings=settings.experts, shared_gate="mlp.shared_expert_gate")


FAMILY = replace(
    qwen3_5_text.FAMILY,
    hf_class="Qwen3_5MoeForCausalLM",
    gguf_name="qwen35moe",
    layer=layer,
    experts=ExpertKeys("moe_intermediate_size", shared_size="shared_expert_intermediate_size"),
    stacked={"mlp.experts.gate_up_proj": (_GATE, _UP), "mlp.experts.down_proj": (_DOWN,)},
    defaults={
        **qwen3_5_text.FAMILY.defaults,
        "num_key_value_heads": 2,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    models="Qwen 3.5 35B-A3B",
)
