"""ERNIE 4.5 with experts, chosen by a corrected softmax beside shared ones, in all layers but the first ones."""

from __future__ import annotations

from dataclasses import replace

from llmcl.architectures.families import ernie4_5
from llmcl.architectures.families.blocks import Attention, Experts, GatedMlp, Layer
from llmcl.architectures.families.family import ExpertKeys, LayerSettings

_CORRECTION = "mlp.moe_statics.e_score_correction_bias"
_SHARED = "mlp.shared_experts"


def layer(settings: LayerSettings) -> Layer:
    if settings.experts is None:
        return Attention(), GatedMlp()
    return Attention(), Experts(settings=settings.experts, shared=_SHARED, correction=_CORRECTION)


FAMILY = replace(
    ernie4_5.FAMILY,
    hf_class="Ernie4_5_MoeForCausalLM",
    gguf_name="ernie4_5-moe",
    layer=layer,
    fixed={"moe_layer_interval": 1},
    experts=ExpertKeys(
        "moe_intermediate_size",
        top_k="moe_k",
        shared_count="moe_num_shared_experts",
        scoring="softmax",
        corrected=True,
        dense_layers="moe_layer_start_index",
    ),
    gguf_modules={f"ffn_{name}_shexp": f"{_SHARED}.{name}_proj" for name in ("gate", "up", "down")},
    gguf_tensors={"exp_probs_b.bias": _CORRECTION},
    defaults={
        **{key: value for key, value in ernie4_5.FAMILY.defaults.items() if key != "head_dim"},
        "num_key_value_heads": 4,
        "moe_num_experts": 64,
        "moe_k": 6,
        "moe_intermediate_size": 1536,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
    },
    models="ERNIE 4.5 21B-A3B, 300B-A47B",
)
