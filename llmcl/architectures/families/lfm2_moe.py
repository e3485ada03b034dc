"""LFM2 with experts in all layers but the first ones, chosen by sigmoids with a bias per expert."""

from __future__ import annotations

from dataclasses import replace

from llmcl.architectures.families import lfm2
from llmcl.architectures.families.blocks import Experts, Layer
from llmcl.architectures.families.family import ExpertKeys, LayerSettings

_GATE, _UP, _DOWN = (f"feed_forward.experts.{{}}.{name}" for name in ("w1", "w3", "w2"))
_ROUTER, _BIAS = "feed_forward.gate", "feed_forward.expert_bias"


def layer(settings: LayerSettings) -> Layer:
    mixer, mlp = lfm2.layer(settings)
    if settings.experts is None:
        return mixer, mlp
    experts = Experts(settings=settings.experts, router=_ROUTER, gate=_GATE, up=_UP, down=_DOWN, correction=_BIAS)
    return mixer, experts


FAMILY = replace(
    lfm2.FAMILY,
    hf_class="Lfm2MoeForCausalLM",
    gguf_name="lfm2moe",
    layer=layer,
    experts=ExpertKeys(
        "moe_intermediate_size",
        "norm_topk_prob",
        scoring="sigmoid",
        corrected="use_expert_bias",
        dense_layers="num_dense_layers",
    ),
    stacked={"feed_forward.experts.gate_up_proj": (_GATE, _UP), "feed_forward.experts.down_proj": (_DOWN,)},
    gguf_modules={
        **lfm2.FAMILY.gguf_modules,
        "ffn_gate_inp": _ROUTER,
        "ffn_gate_exps": _GATE,
        "ffn_up_exps": _UP,
        "ffn_down_exps": _DOWN,
    },
    gguf_tensors={"exp_probs_b.bias": _BIAS},
    defaults={
        **lfm2.FAMILY.defaults,
        "block_auto_adjust_ff_dim": False,
        "moe_intermediate_size": 1792,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "num_dense_layers": 2,
    },
    models="LFM2 8B-A1B",
)
