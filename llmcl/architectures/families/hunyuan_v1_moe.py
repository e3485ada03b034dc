"""Hunyuan with a mixture of experts beside a shared expert (A13B)."""

from __future__ import annotations

from dataclasses import replace

from llmcl.architectures.families import hunyuan_v1_dense
from llmcl.architectures.families.blocks import Experts, ExpertSettings, Layer
from llmcl.architectures.families.family import ExpertKeys, LayerSettings

_ROUTER, _SHARED = "mlp.gate.wg", "mlp.shared_mlp"


def layer(settings: LayerSettings) -> Layer:
    attention, _ = hunyuan_v1_dense.layer(settings)
    return attention, Experts(settings=settings.experts or ExpertSettings(), router=_ROUTER, shared=_SHARED)


FAMILY = replace(
    hunyuan_v1_dense.FAMILY,
    hf_class="HunYuanMoEV1ForCausalLM",
    gguf_name="hunyuan-moe",
    layer=layer,
    fixed={"use_qk_norm": True, "num_shared_expert": 1, "moe_layer_num_skipped": 0},
    experts=ExpertKeys(shared_size="intermediate_size", top_k="moe_topk"),
    gguf_modules={"ffn_gate_inp": _ROUTER}
    | {f"ffn_{name}_shexp": f"{_SHARED}.{name}_proj" for name in ("gate", "up", "down")},
    defaults={"rms_norm_eps": 1e-5, "num_experts": 1, "moe_topk": 1},
    models="Hunyuan A13B",
)
