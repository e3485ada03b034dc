"""Granite 4: Mamba-2 in most layers, attention in the rest, an MLP or experts beside an MLP."""

from __future__ import annotations

from dataclasses import replace

from llmcl.architectures.families import granitemoe
from llmcl.architectures.families.blocks import Attention, Experts, GatedMlp, Layer
from llmcl.architectures.families.family import ExpertKeys, LayerSettings
from llmcl.architectures.families.recurrent import Mamba, MambaSettings

_MOE = granitemoe.FAMILY
_SHARED = "mlp"  # without experts it is all of the MLP


def layer(settings: LayerSettings) -> Layer:
    mixer: Attention | Mamba
    if isinstance(settings.recurrent, MambaSettings):
        mixer = Mamba(settings=settings.recurrent)
    else:
        mixer = Attention(bias=settings.bias, output_bias=settings.output_bias, rotation=settings.rotation)
    if settings.experts is None:
        return mixer, GatedMlp()
    _, experts = granitemoe.layer(settings)
    assert isinstance(experts, Experts)
    return mixer, replace(experts, shared=_SHARED)


FAMILY = replace(
    _MOE,
    hf_class="GraniteMoeHybridForCausalLM",
    gguf_name="granitehybrid",
    layer=layer,
    recurrent="mamba",
    rotates="optional",
    experts=ExpertKeys(shared_size="shared_intermediate_size", optional=True),
    stacked={
        **{stored: parts for stored, parts in _MOE.stacked.items() if stored.startswith("block_sparse_moe")},
        "shared_mlp.input_linear": (f"{_SHARED}.gate_proj", f"{_SHARED}.up_proj"),
        "shared_mlp.output_linear": (f"{_SHARED}.down_proj",),
    },
    gguf_modules={
        **_MOE.gguf_modules,
        "ffn_gate_shexp": f"{_SHARED}.gate_proj",
        "ffn_up_shexp": f"{_SHARED}.up_proj",
        "ffn_down_shexp": f"{_SHARED}.down_proj",
        "ssm_in": "mamba.in_proj",
        "ssm_conv1d": "mamba.conv1d",
        "ssm_norm": "mamba.norm",
        "ssm_out": "mamba.out_proj",
    },
    gguf_tensors={"ssm_a": "mamba.A", "ssm_d": "mamba.D", "ssm_dt.bias": "mamba.dt_bias"},
    defaults={
        **_MOE.defaults,
        "shared_intermediate_size": 1024,
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
    },
    models="Granite 4 H Micro, Tiny, Small, 350M, 1B",
)
