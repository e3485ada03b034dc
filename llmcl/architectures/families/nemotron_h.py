"""Nemotron-H and Nemotron 3: Mamba-2, attention, an MLP or experts, one of them in each layer."""

from __future__ import annotations

from llmcl.architectures.families.blocks import Attention, Block, Experts, Layer
from llmcl.architectures.families.family import ExpertKeys, Family, LayerSettings
from llmcl.architectures.families.plain_mlp import PlainMlp
from llmcl.architectures.families.recurrent import Mamba, MambaSettings

_UP, _DOWN = (f"mixer.experts.{{}}.{name}_proj" for name in ("up", "down"))
_SHARED, _NORM = "mixer.shared_experts", "input_layernorm"


def layer(settings: LayerSettings) -> Layer:
    mixer: Block = Attention(rotation="none")
    if isinstance(settings.recurrent, MambaSettings):
        mixer = Mamba(settings=settings.recurrent)
    mlp: Block = PlainMlp(_NORM, curved=False)
    if settings.experts is not None:
        mlp = Experts(
            _NORM, settings=settings.experts, activation="relu2", gate=None, up=_UP, down=_DOWN, shared=_SHARED
        )
    return {"both": (mixer, mlp), "mixer": (mixer,), "mlp": (mlp,)}[settings.part]


FAMILY = Family(
    "NemotronHForCausalLM",
    "nemotron_h",
    layer,
    gguf_name_with_experts="nemotron_h_moe",
    recurrent="mamba",
    rotates="never",
    single_blocks=True,
    refused=("use_bias", "moe_latent_size"),
    fixed={"mamba_hidden_act": "silu"},
    experts=ExpertKeys(
        "moe_intermediate_size",
        "norm_topk_prob",
        shared_size="moe_shared_expert_intermediate_size",
        scoring="sigmoid",
        optional=True,
    ),
    stacked={"mixer.experts.up_proj": (_UP,), "mixer.experts.down_proj": (_DOWN,)},
    modules={
        "model.embeddings": "model.embed_tokens",
        "model.norm_f": "model.norm",
        "mixer.norm": "mamba.norm",
        "mixer.in_proj": "mamba.in_proj",
        "mixer.conv1d": "mamba.conv1d",
        "mixer.out_proj": "mamba.out_proj",
        "mixer.q_proj": "self_attn.q_proj",
        "mixer.k_proj": "self_attn.k_proj",
        "mixer.v_proj": "self_attn.v_proj",
        "mixer.o_proj": "self_attn.o_proj",
        "mixer.up_proj": "mlp.up_proj",
        "mixer.down_proj": "mlp.down_proj",
        "mixer.gate": "mlp.gate",
        "mixer": "mamba",
        "norm": _NORM,
    },
    drafting_layers=True,
    gguf_drafting_layers=True,
    gguf_interleaves_rope=True,
    gguf_modules={
        "ssm_in": "mamba.in_proj",
        "ssm_conv1d": "mamba.conv1d",
        "ssm_norm": "mamba.norm",
        "ssm_out": "mamba.out_proj",
        "ffn_up_exps": _UP,
        "ffn_down_exps": _DOWN,
        "ffn_up_shexp": f"{_SHARED}.up_proj",
        "ffn_down_shexp": f"{_SHARED}.down_proj",
    },
    gguf_tensors={
        "ssm_a": "mamba.A",
        "ssm_d": "mamba.D",
        "ssm_dt.bias": "mamba.dt_bias",
        "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    },
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "layer_norm_epsilon": 1e-5,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "ssm_state_size": 128,
        "conv_kernel": 4,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
    },
    models="Nemotron-H, Nemotron Nano 2, Nemotron 3 Nano",
)
