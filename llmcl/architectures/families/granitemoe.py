"""Granite 3 with experts instead of the MLP."""

from __future__ import annotations

from llmcl.architectures.families.blocks import Attention, Experts, ExpertSettings, Layer
from llmcl.architectures.families.family import ExpertKeys, Family, LayerSettings

_GATE, _UP, _DOWN = (f"block_sparse_moe.experts.{{}}.{name}_proj" for name in ("gate", "up", "down"))
_SHARED = "shared_mlp"


def layer(settings: LayerSettings) -> Layer:
    experts = Experts(
        settings=settings.experts or ExpertSettings(),
        router="block_sparse_moe.router.layer",
        gate=_GATE,
        up=_UP,
        down=_DOWN,
        shared=_SHARED,
    )
    return Attention(bias=settings.bias, output_bias=settings.output_bias), experts


FAMILY = Family(
    "GraniteMoeForCausalLM",
    "granitemoe",
    layer,
    biases=("attention_bias",),
    multipliers=True,
    experts=ExpertKeys(shared_size="shared_intermediate_size"),
    stacked={
        "block_sparse_moe.input_linear": (_GATE, _UP),
        "block_sparse_moe.output_linear": (_DOWN,),
        f"{_SHARED}.input_linear": (f"{_SHARED}.gate_proj", f"{_SHARED}.up_proj"),
        f"{_SHARED}.output_linear": (f"{_SHARED}.down_proj",),
    },
    gguf_interleaves_rope=True,
    gguf_modules={
        "ffn_gate_inp": "block_sparse_moe.router.layer",
        "ffn_gate_exps": _GATE,
        "ffn_up_exps": _UP,
        "ffn_down_exps": _DOWN,
        "ffn_gate_shexp": f"{_SHARED}.gate_proj",
        "ffn_up_shexp": f"{_SHARED}.up_proj",
        "ffn_down_shexp": f"{_SHARED}.down_proj",
    },
    defaults={"num_local_experts": 8, "num_experts_per_tok": 2},
    models="Granite 3 1B-A400M, 3B-A800M",
)
