"""A small configuration of each supported family: what sets it apart.

Most have the sizes of `small_config`, of GROUPED or of APART, and of experts 6, 9 or 5, so that they share compiled
kernels: a family with sizes of its own takes 3 to 10 s of CPU to compile.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from family_files import WINDOW
from helpers import LINEAR_SCALING, LLAMA3_SCALING, gemma2_config, small_config
from latent_weights import MSCALE

from llmcl.architectures.config import ModelConfig, RopeScaling
from llmcl.architectures.config.latent import latent_scale
from llmcl.architectures.config.rope import longrope_amplitude, yarn_amplitude
from llmcl.architectures.families import FAMILIES as FAMILIES_OF_CHECKPOINTS
from llmcl.architectures.families.blocks import ExpertSettings, Heads, QueryScale, Scores
from llmcl.architectures.families.family import LayerSettings
from llmcl.architectures.families.latent import LatentSettings
from llmcl.architectures.families.recurrent import DeltaSettings, MambaSettings, ShortConvSettings

N_TOKENS = 90

YARN = RopeScaling("yarn", 4.0, original_max_position=128, beta_fast=8.0, amplitude=yarn_amplitude(4.0))
UNTRUNCATED_YARN = dataclasses.replace(YARN, truncate=False)
LONGROPE = RopeScaling(
    "longrope",
    original_max_position=64,  # less than the texts and the answers after a part of them
    factors=tuple(1.0 + 0.1 * i for i in range(12)),
    long_factors=tuple(1.0 + 0.7 * i for i in range(12)),
    amplitude=longrope_amplitude(512 / 64, 64),
)

# Other sizes than those of `small_config`: their hidden size is that of all heads together.
GROUPED: dict[str, Any] = {"n_q_heads": 6, "n_kv_heads": 1, "head_dim": 16, "hidden_size": 96}
APART: dict[str, Any] = {"n_q_heads": 3, "n_kv_heads": 3, "head_dim": 32, "hidden_size": 96}

SHORT = ShortConvSettings()
DELTA = DeltaSettings(n_k=2, n_v=4, d_k=32, d_v=32)
WIDE = DeltaSettings(n_k=2, n_v=2, d_k=128, d_v=128, length=3)
ODD = DeltaSettings(n_k=1, n_v=3, d_k=32, d_v=16, length=2)
MAMBA = MambaSettings(n_heads=4, d_head=32, n_groups=1, d_state=32)
MAMBA_GROUPS = MambaSettings(n_heads=6, d_head=32, n_groups=2, d_state=48, length=3, conv_bias=False)
GRANITE: dict[str, Any] = {
    "embedding_scale": 12.0,
    "residual_scale": 0.22,
    "attention_scale": 0.25,
    "logit_scale": 0.125,
    "rms_norm_eps": 1e-2,
}
DELTA_JOINED, WIDE_JOINED, ODD_JOINED = (dataclasses.replace(of, joined=("qkvz", "ba")) for of in (DELTA, WIDE, ODD))


def gemma4_config(
    heads: Heads, *, keys_as_values: bool = True, experts: ExpertSettings | None = None, **changes: Any
) -> ModelConfig:
    """Layers with and without a window in turn, the last without; heads: of those without."""
    in_turn = (
        LayerSettings(WINDOW, rotation="local", experts=experts),
        LayerSettings(heads=heads, keys_as_values=keys_as_values, experts=experts),
    )
    n_pairs = heads.size // 2
    hidden = changes.setdefault("hidden_size", 64)
    values: dict[str, Any] = {
        "settings": [*in_turn, *in_turn],
        "tie_embeddings": True,
        "embedding_scale": float(np.sqrt(np.float32(hidden))),
        "attention_scale": 1.0,
        "logit_soft_cap": 3.0,
        "rope_theta": 1e4,
        "rope_scaling": RopeScaling("factors", factors=(1.0,) * (n_pairs // 4) + (np.inf,) * (n_pairs - n_pairs // 4)),
        "local_rope_theta": 500.0,
    }
    return small_config(**({"architecture": "gemma4_text"} | values | changes))


def gemma4_late_config(n_late: int, input_size: int, width: int, **changes: Any) -> ModelConfig:
    """As `gemma4_config` with 2 + n_late layers, of which n_late read the keys of the others and have MLPs of so many
    times the rows. input_size: of what each layer is given.
    """
    own = [
        LayerSettings(WINDOW, rotation="local", input_size=input_size),
        LayerSettings(heads=Heads(2, 64), input_size=input_size),
    ]
    late = [dataclasses.replace(own[i % 2], keys_of=i % 2, mlp_width=width) for i in range(n_late)]
    sizes = {"layer_input_size": input_size, "settings": [*own, *late]}
    return gemma4_config(Heads(2, 64), **sizes, **changes)


def gpt_oss_config(experts: ExpertSettings, *, biased: bool = True, **changes: Any) -> ModelConfig:
    """Layers with and without a window in turn."""
    biases = {"bias": biased, "output_bias": biased}
    settings = [LayerSettings(window, experts=experts, **biases) for window in (WINDOW, None, WINDOW)]
    return small_config("gpt_oss", settings=settings, intermediate_size=experts.size, **changes)


LATENT = LatentSettings(rank=32, rope=16, nope=48, value=32, query_rank=48)
PLAIN_LATENT = LatentSettings(rank=64, rope=32, nope=16, value=64)  # queries of the input itself, wide values
ODD_LATENT = LatentSettings(rank=48, rope=16, nope=80, value=16, query_rank=32, interleaved=False)


def latent_config(
    architecture: str,
    of: LatentSettings,
    experts: ExpertSettings,
    *,
    n_dense: int = 1,
    n_layers: int = 3,
    query_scale: QueryScale | None = None,
    **changes: Any,
) -> ModelConfig:
    """The first n_dense layers have no experts. transformers has the norms of latents with this eps alone."""
    common = LayerSettings(latent=of, query_scale=query_scale)
    settings = [dataclasses.replace(common, experts=None if i < n_dense else experts) for i in range(n_layers)]
    sizes = {"n_kv_heads": 1, "head_dim": of.width, "rotary_dim": of.rope, "rms_norm_eps": 1e-6}
    scale = latent_scale(of, changes.get("rope_scaling"), MSCALE)
    return small_config(architecture, settings=settings, attention_scale=scale, **sizes, **changes)


DEEPSEEK_YARN = dataclasses.replace(YARN, amplitude=1.0)
SHORT_YARN = dataclasses.replace(DEEPSEEK_YARN, original_max_position=64)  # the texts are longer
BY_SIGMOIDS, IN_GROUPS = Scores(scale=1.8), Scores(n_groups=4, top_groups=2, scale=2.5)
IN_THREE = dataclasses.replace(IN_GROUPS, n_groups=3)
BY_SOFTMAX = Scores("softmax", n_groups=3, top_groups=2, scale=2.0, corrected=False)
SCALED_SOFTMAX = Scores("softmax", scale=2.0, corrected=False)
UNGATED = ExpertSettings(6, 2, 48, shared_size=64, scores=Scores(scale=2.5))
UNGATED_GROUPS = ExpertSettings(9, 4, 32, renormalize=False, shared_size=32, scores=IN_THREE)
BY_BIASES = ExpertSettings(6, 2, 48, scores=Scores())
BY_PLAIN_SIGMOIDS = ExpertSettings(9, 4, 32, renormalize=False, scores=Scores(scale=1.5, corrected=False))

BY_CORRECTED_SOFTMAX = Scores("softmax")


def glm4_moe_config(
    experts: ExpertSettings, *, bias: bool = False, head_norms: bool = False, **changes: Any
) -> ModelConfig:
    """The first layer has no experts; half of each head rotates."""
    of_all = {"bias": bias, "head_norms": head_norms}
    settings = [LayerSettings(**of_all), LayerSettings(experts=experts, **of_all)]
    return small_config("glm4_moe", settings=settings, rotary_dim=16, **changes)


FAMILIES: dict[str, ModelConfig] = {
    "llama-biases": small_config(settings=[LayerSettings(bias=True, output_bias=True, mlp_bias=True)] * 2),
    "smollm3": small_config(
        architecture="smollm3",
        settings=[LayerSettings(rotation="none" if i == 3 else "main") for i in range(5)],
        tie_embeddings=True,
    ),
    "smollm3-biases": small_config(
        architecture="smollm3",
        settings=[LayerSettings(rotation=name, bias=True, output_bias=True) for name in ("none", "main")],
    ),
    "granite": small_config(
        architecture="granite",
        embedding_scale=12.0,
        residual_scale=0.22,
        attention_scale=0.25,
        logit_scale=0.125,
        rms_norm_eps=1e-2,  # counts beside activations of the order of one
        tie_embeddings=True,
    ),
    "llama-yarn": small_config(rope_scaling=YARN),
    "phi3": small_config(architecture="phi3", rotary_dim=24, windows=(WINDOW, WINDOW), tie_embeddings=True),
    "phi3-long": small_config(architecture="phi3", rotary_dim=24, rope_scaling=LONGROPE, **APART),
    "olmo2": small_config(architecture="olmo2"),
    "olmo2-biases": small_config(architecture="olmo2", settings=[LayerSettings(bias=True, output_bias=True)] * 2),
    "olmo3": small_config(
        architecture="olmo3",
        settings=[LayerSettings(WINDOW, rotation="local")] * 3 + [LayerSettings()],
        rope_theta=500000.0,
        rope_scaling=YARN,
        local_rope_theta=500000.0,
        tie_embeddings=True,
    ),
    "ministral3": small_config(
        architecture="ministral3",
        settings=[LayerSettings(query_scale=QueryScale(0.5, 16))] * 2,
        rope_theta=1e6,
        rope_scaling=RopeScaling("yarn", 32.0, original_max_position=16),
    ),
    "mistral": small_config(architecture="mistral", windows=(WINDOW, WINDOW)),
    "qwen2": small_config(architecture="qwen2", tie_embeddings=True),
    "qwen2-windows": small_config(architecture="qwen2", windows=(None, WINDOW, WINDOW)),
    "qwen3": small_config(architecture="qwen3"),
    "qwen3_moe": small_config(
        architecture="qwen3_moe",
        settings=[LayerSettings(experts=ExpertSettings(6, 2, 48))] * 2,
    ),
    "qwen3_moe-some": small_config(  # one layer without experts, and weights that do not add up to 1
        architecture="qwen3_moe",
        settings=[LayerSettings(experts=ExpertSettings(9, 4, 32, renormalize=False)), LayerSettings()],
        tie_embeddings=True,
    ),
    "mixtral": small_config(
        architecture="mixtral",
        settings=[LayerSettings(WINDOW, experts=ExpertSettings(6, 2, 48))] * 2,
        intermediate_size=48,
        rope_theta=1e6,
    ),
    "olmoe": small_config(
        architecture="olmoe",
        settings=[LayerSettings(experts=ExpertSettings(9, 4, 32, renormalize=False))] * 2,
        intermediate_size=32,
        head_dim=16,  # transformers has no other than the hidden size over the heads
    ),
    "granitemoe": small_config(
        architecture="granitemoe",
        settings=[LayerSettings(experts=ExpertSettings(9, 4, 32))] * 2,
        intermediate_size=32,
        embedding_scale=12.0,
        residual_scale=0.22,
        attention_scale=0.25,
        logit_scale=0.125,
        rms_norm_eps=1e-2,
        tie_embeddings=True,
    ),
    "granitemoeshared": small_config(
        architecture="granitemoeshared",
        settings=[LayerSettings(experts=ExpertSettings(6, 2, 48, shared_size=64))] * 2,
        intermediate_size=48,
        residual_scale=0.22,
        attention_scale=0.25,
        rms_norm_eps=1e-2,
    ),
    "granitemoehybrid": small_config(  # ends with Mamba
        architecture="granitemoehybrid",
        settings=[
            LayerSettings(recurrent=mixer, rotation="none", experts=ExpertSettings(6, 2, 48, shared_size=64))
            for mixer in (MAMBA, MAMBA, None, MAMBA)
        ],
        intermediate_size=48,
        tie_embeddings=True,
        **GRANITE,
    ),
    "granitemoehybrid-dense": small_config(  # in groups of heads, without a bias of the convolution
        architecture="granitemoehybrid",
        settings=[LayerSettings(recurrent=mixer, rotation="none") for mixer in (MAMBA_GROUPS, None)],
        **GROUPED,
        **{**GRANITE, "attention_scale": 0.4},
    ),
    "granitemoehybrid-rotated": small_config(
        architecture="granitemoehybrid",
        settings=[
            LayerSettings(recurrent=mixer, experts=ExpertSettings(9, 4, 32, shared_size=32)) for mixer in (None, MAMBA)
        ],
        intermediate_size=32,
        tie_embeddings=True,
        **GRANITE,
    ),
    "nemotron_h": small_config(
        architecture="nemotron_h",
        settings=[
            LayerSettings(recurrent=MAMBA, part="mixer"),
            LayerSettings(part="mlp"),
            LayerSettings(part="mixer"),
            LayerSettings(recurrent=MAMBA, part="mixer"),
            LayerSettings(part="mlp"),
        ],
    ),
    "nemotron_h-experts": small_config(  # ends with attention
        architecture="nemotron_h",
        settings=[
            LayerSettings(recurrent=MAMBA_GROUPS, part="mixer"),
            LayerSettings(experts=UNGATED, part="mlp"),
            LayerSettings(part="mixer"),
        ],
        intermediate_size=48,
        **GROUPED,
    ),
    "nemotron_h-groups": small_config(  # experts in groups, MLPs beside them; ends with experts
        architecture="nemotron_h",
        settings=[
            LayerSettings(part="mixer"),
            LayerSettings(recurrent=MAMBA, part="mixer"),
            LayerSettings(part="mlp"),
            LayerSettings(experts=UNGATED_GROUPS, part="mlp"),
        ],
        **APART,
    ),
    "lfm2": small_config(  # ends with a short convolution
        architecture="lfm2",
        settings=[LayerSettings(recurrent=length) for length in (SHORT, None, SHORT, None, SHORT)],
        tie_embeddings=True,
    ),
    "lfm2-wide": small_config(
        architecture="lfm2",
        settings=[LayerSettings(recurrent=length) for length in (SHORT, SHORT, None)],
        **GROUPED,
    ),
    "lfm2-long": small_config(
        architecture="lfm2",
        settings=[LayerSettings(recurrent=length) for length in (None, ShortConvSettings(5), ShortConvSettings(5))],
    ),
    "lfm2-biases": small_config(
        architecture="lfm2",
        settings=[LayerSettings(recurrent=length) for length in (ShortConvSettings(3, bias=True), None)],
    ),
    "lfm2_moe": small_config(
        architecture="lfm2_moe",
        settings=[
            LayerSettings(recurrent=length, experts=experts)
            for length, experts in ((SHORT, None), (None, BY_BIASES), (SHORT, BY_BIASES))
        ],
        tie_embeddings=True,
    ),
    "lfm2_moe-plain": small_config(  # without a bias, and weights that do not add up to 1
        architecture="lfm2_moe",
        settings=[LayerSettings(recurrent=length, experts=BY_PLAIN_SIGMOIDS) for length in (SHORT, None)],
        **GROUPED,
        tie_embeddings=True,
    ),
    "qwen3_5_text": small_config(
        architecture="qwen3_5_text",
        settings=[LayerSettings(recurrent=mixer) for mixer in (DELTA, DELTA, DELTA, None)],
        rotary_dim=8,
        norm_offset=1.0,
        rope_theta=1e7,
    ),
    "qwen3_5_text-wide": small_config(  # ends with a delta net; as many key heads as value heads
        architecture="qwen3_5_text",
        settings=[LayerSettings(recurrent=mixer) for mixer in (WIDE, None, WIDE, None, WIDE)],
        **GROUPED,
        rotary_dim=8,
        norm_offset=1.0,
        tie_embeddings=True,
    ),
    "qwen3_5_text-odd": small_config(  # three value heads a key head, rows that are no whole tiles
        architecture="qwen3_5_text",
        settings=[LayerSettings(recurrent=mixer) for mixer in (ODD, None)],
        **APART,
        rotary_dim=12,
        norm_offset=1.0,
    ),
    "qwen3_5_moe_text": small_config(
        architecture="qwen3_5_moe_text",
        settings=[
            LayerSettings(recurrent=mixer, experts=ExpertSettings(6, 2, 48, shared_size=64))
            for mixer in (DELTA, DELTA, DELTA, None)
        ],
        intermediate_size=48,
        rotary_dim=8,
        norm_offset=1.0,
        rope_theta=1e7,
    ),
    "qwen3_5_moe_text-wide": small_config(
        architecture="qwen3_5_moe_text",
        settings=[
            LayerSettings(recurrent=mixer, experts=ExpertSettings(9, 4, 32, shared_size=32))
            for mixer in (WIDE, None, WIDE)
        ],
        intermediate_size=32,
        **GROUPED,
        rotary_dim=8,
        norm_offset=1.0,
        tie_embeddings=True,
    ),
    "qwen3_5_moe_text-odd": small_config(
        architecture="qwen3_5_moe_text",
        settings=[
            LayerSettings(recurrent=mixer, experts=ExpertSettings(5, 1, 16, shared_size=80)) for mixer in (ODD, None)
        ],
        intermediate_size=16,
        **APART,
        rotary_dim=12,
        norm_offset=1.0,
    ),
    "qwen3_next": small_config(
        architecture="qwen3_next",
        settings=[
            LayerSettings(
                recurrent=mixer,
                experts=ExpertSettings(6, 2, 48, shared_size=64),
            )
            for mixer in (DELTA_JOINED, DELTA_JOINED, DELTA_JOINED, None)
        ],
        intermediate_size=48,
        rotary_dim=8,
        norm_offset=1.0,
    ),
    "qwen3_next-some": small_config(  # one layer without experts, and weights that do not add up to 1
        architecture="qwen3_next",
        settings=[
            LayerSettings(recurrent=WIDE_JOINED, experts=ExpertSettings(9, 4, 32, False, shared_size=32)),
            LayerSettings(),
        ],
        **GROUPED,
        rotary_dim=8,
        norm_offset=1.0,
        tie_embeddings=True,
    ),
    "qwen3_next-odd": small_config(
        architecture="qwen3_next",
        settings=[
            LayerSettings(recurrent=mixer, experts=ExpertSettings(5, 1, 16, shared_size=80))
            for mixer in (ODD_JOINED, None)
        ],
        intermediate_size=16,
        **APART,
        rotary_dim=12,
        norm_offset=1.0,
    ),
    "glm4_moe_lite": latent_config(
        "glm4_moe_lite", LATENT, ExpertSettings(6, 2, 48, shared_size=96, scores=BY_SIGMOIDS), rope_theta=1e6
    ),
    "glm4_moe_lite-grouped": latent_config(
        "glm4_moe_lite",
        PLAIN_LATENT,
        ExpertSettings(8, 3, 32, renormalize=False, shared_size=64, scores=IN_GROUPS),
        n_dense=2,
        n_q_heads=6,
        hidden_size=96,
        tie_embeddings=True,
    ),
    "glm4_moe_lite-odd": latent_config(
        "glm4_moe_lite",
        ODD_LATENT,
        ExpertSettings(5, 1, 16, shared_size=16, scores=BY_SIGMOIDS),
        n_dense=0,
        n_layers=2,
        n_q_heads=3,
        hidden_size=96,
    ),
    "deepseek_v3": latent_config(
        "deepseek_v3", LATENT, ExpertSettings(9, 4, 32, shared_size=64, scores=IN_THREE), rope_scaling=DEEPSEEK_YARN
    ),
    "deepseek_v3-plain": latent_config(
        "deepseek_v3",
        PLAIN_LATENT,
        ExpertSettings(6, 2, 48, shared_size=96, scores=BY_SIGMOIDS),
        n_dense=0,
        n_layers=2,
        n_q_heads=6,
        hidden_size=96,
    ),
    "deepseek_v3-odd": latent_config(
        "deepseek_v3",
        ODD_LATENT,
        ExpertSettings(12, 4, 16, renormalize=False, shared_size=16, scores=IN_GROUPS),
        n_q_heads=3,
        hidden_size=96,
        tie_embeddings=True,
    ),
    "deepseek_v2": latent_config(
        "deepseek_v2",
        LATENT,
        ExpertSettings(9, 4, 32, renormalize=False, shared_size=64, scores=BY_SOFTMAX),
        rope_scaling=DEEPSEEK_YARN,
    ),
    "deepseek_v2-lite": latent_config(
        "deepseek_v2",
        PLAIN_LATENT,
        ExpertSettings(6, 2, 48, renormalize=False, shared_size=96),
        n_q_heads=6,
        hidden_size=96,
        rope_scaling=DEEPSEEK_YARN,
    ),
    "deepseek_v2-odd": latent_config(
        "deepseek_v2",
        dataclasses.replace(ODD_LATENT, interleaved=True),
        ExpertSettings(5, 1, 16, renormalize=False, shared_size=32, scores=SCALED_SOFTMAX),
        n_dense=0,
        n_layers=2,
        n_q_heads=3,
        hidden_size=96,
        tie_embeddings=True,
    ),
    "gemma3_text": small_config(
        architecture="gemma3_text",
        settings=[LayerSettings(WINDOW, rotation="local"), LayerSettings()] * 2,
        tie_embeddings=True,
        norm_offset=1.0,
        embedding_scale=8.0,
        attention_scale=40.0**-0.5,
        logit_soft_cap=3.0,
        rope_theta=1e6,
        rope_scaling=LINEAR_SCALING,
        local_rope_theta=500.0,
    ),
    "gemma4_text": gemma4_config(Heads(1, 64)),
    "gemma4_text-wide": gemma4_config(Heads(1, 512), n_q_heads=2, n_kv_heads=2, head_dim=256),
    "gemma4_text-apart": gemma4_config(  # values of their own, as many KV heads as query heads
        Heads(3, 48), keys_as_values=False, n_q_heads=3, n_kv_heads=3, head_dim=16, hidden_size=96, tie_embeddings=False
    ),
    "gemma4_text-experts": gemma4_config(Heads(1, 64), experts=ExpertSettings(6, 2, 48, shared_size=96)),
    "gemma4_text-many": gemma4_config(  # a size of the experts that is the MLP's, too
        Heads(3, 48),
        experts=ExpertSettings(9, 4, 32, shared_size=32),
        intermediate_size=32,
        n_q_heads=3,
        n_kv_heads=3,
        hidden_size=96,
    ),
    "gemma4_unified_text": gemma4_config(Heads(1, 64), architecture="gemma4_unified_text"),
    # late layers that read the keys of others, embeddings of each layer
    "gemma4_text-given": gemma4_late_config(2, 16, 2, tie_embeddings=False),
    "gemma4_text-late": gemma4_late_config(4, 48, 1, n_q_heads=6, hidden_size=96),
    "gemma2": gemma2_config(windows=(WINDOW, None, WINDOW)),
    "glm4_moe": glm4_moe_config(ExpertSettings(6, 2, 48, shared_size=48, scores=BY_SIGMOIDS), head_norms=True),
    "glm4_moe-biases": glm4_moe_config(
        ExpertSettings(9, 4, 32, renormalize=False, shared_size=64, scores=IN_THREE), bias=True, tie_embeddings=True
    ),
    "seed_oss": small_config("seed_oss", settings=[LayerSettings(bias=True)] * 2),
    "seed_oss-biases": small_config(
        "seed_oss", settings=[LayerSettings(bias=True, output_bias=True, mlp_bias=True)] * 2, tie_embeddings=True
    ),
    "exaone4": small_config("exaone4"),
    "exaone4-windows": small_config(
        "exaone4", settings=[LayerSettings(WINDOW)] * 3 + [LayerSettings(rotation="none")], tie_embeddings=True
    ),
    "ernie4_5": small_config("ernie4_5", rope_theta=500000.0, tie_embeddings=True),
    "ernie4_5_moe": small_config(
        "ernie4_5_moe",
        settings=[
            LayerSettings(),
            LayerSettings(experts=ExpertSettings(6, 2, 48, shared_size=96, scores=BY_CORRECTED_SOFTMAX)),
        ],
        head_dim=16,  # transformers has no other than the hidden size over the heads
        tie_embeddings=True,
    ),
    "mistral4": latent_config(
        "mistral4",
        LATENT,
        ExpertSettings(6, 2, 48, shared_size=96),
        n_dense=0,
        n_layers=2,
        query_scale=QueryScale(0.5, 64),
        rope_scaling=SHORT_YARN,
    ),
    "mistral4-plain": latent_config(
        "mistral4",
        PLAIN_LATENT,
        ExpertSettings(8, 3, 32, renormalize=False, shared_size=64, scores=SCALED_SOFTMAX),
        query_scale=QueryScale(0.5, 64),
        rope_scaling=SHORT_YARN,
        n_q_heads=6,
        hidden_size=96,
        tie_embeddings=True,
    ),
    "mistral4-odd": latent_config(
        "mistral4",
        dataclasses.replace(ODD_LATENT, interleaved=True),
        ExpertSettings(5, 1, 16, shared_size=16),
        n_layers=2,
        query_scale=QueryScale(0.5, 64),
        rope_scaling=SHORT_YARN,
        n_q_heads=3,
        hidden_size=96,
    ),
    "apertus": small_config("apertus", rope_scaling=LLAMA3_SCALING, rope_theta=12e6),
    "apertus-biases": small_config(
        "apertus", settings=[LayerSettings(bias=True, output_bias=True)] * 2, tie_embeddings=True
    ),
    "hunyuan_v1_dense": small_config("hunyuan_v1_dense"),
    "hunyuan_v1_dense-biases": small_config(
        "hunyuan_v1_dense", settings=[LayerSettings(bias=True, output_bias=True)] * 2, tie_embeddings=True
    ),
    "hunyuan_v1_moe": small_config(
        "hunyuan_v1_moe",
        settings=[LayerSettings(experts=ExpertSettings(6, 2, 96, shared_size=96))] * 2,
    ),
    "cohere2": small_config(
        "cohere2",
        settings=[LayerSettings(WINDOW)] * 3 + [LayerSettings(rotation="none", is_last=True)],
        head_dim=16,  # transformers has no other than the hidden size over the heads
        logit_scale=0.25,
        tie_embeddings=True,
    ),
    "cohere": small_config(
        "cohere",
        settings=[LayerSettings(), LayerSettings(is_last=True)],
        head_dim=16,
        logit_scale=0.0625,
        tie_embeddings=True,
    ),
    "minimax_m2": small_config(
        "minimax_m2",
        settings=[LayerSettings(experts=ExpertSettings(6, 2, 48, scores=Scores()))] * 2,
        intermediate_size=48,
        rotary_dim=16,
        rope_theta=5e6,
    ),
    "gpt_oss": gpt_oss_config(ExpertSettings(6, 4, 64), rope_scaling=UNTRUNCATED_YARN),
    "gpt_oss-grouped": gpt_oss_config(ExpertSettings(9, 4, 32), rope_scaling=UNTRUNCATED_YARN, **GROUPED),
    "gpt_oss-tied": gpt_oss_config(ExpertSettings(6, 4, 64), biased=False, tie_embeddings=True),
}
# Sizes in which each family is tested that has fewer shapes above.
SIZES = {"grouped": GROUPED, "apart": APART}


def in_other_sizes(config: ModelConfig, sizes: dict[str, int]) -> ModelConfig:
    """The configuration with these sizes, what depends on them, and tied embeddings where it has untied ones.

    The scores of a Gemma are scaled as GGUF files have it, so that a file computes with the programs of a folder.
    """
    headless = ("gemma2", "cohere", "cohere2")  # whose files have no head
    tied = config.architecture in headless or not config.tie_embeddings
    changed = dataclasses.replace(config, tie_embeddings=tied, **sizes)
    rotary_dim = None if config.rotary_dim is None else config.rotary_dim * changed.head_dim // config.head_dim
    scale = config.embedding_scale
    if FAMILIES_OF_CHECKPOINTS[config.architecture].scaled_embedding:
        scale = float(np.sqrt(np.float32(changed.hidden_size)))
    if FAMILIES_OF_CHECKPOINTS[config.architecture].query_pre_attn_scalar:
        changed = dataclasses.replace(changed, attention_scale=changed.head_dim**-0.5)
    return dataclasses.replace(changed, rotary_dim=rotary_dim, embedding_scale=scale)


def _further_shapes() -> dict[str, ModelConfig]:
    """So many that each family has three."""
    found = {}
    for architecture in dict.fromkeys(config.architecture for config in FAMILIES.values()):
        own = [config for config in FAMILIES.values() if config.architecture == architecture]
        for name, sizes in [*SIZES.items()][: max(0, 3 - len(own))]:
            found[f"{architecture}-{name}"] = in_other_sizes(own[0], sizes)
    return found


FURTHER = _further_shapes()
MOST = "gemma2"  # has more of what sets families apart than any other
# Those that the format can say, but for what another of them shows as well.
NOT_IN_GGUF = (
    "glm4_moe_lite-odd",
    "deepseek_v3-odd",
    "smollm3-biases",
    "lfm2-biases",  # which no key or tensor of the format has
    "nemotron_h-groups",  # llama.cpp's converter does not write how many groups are used, nor layers of both kinds
    "lfm2_moe-plain",  # llama.cpp's converter writes neither of its settings
    "lfm2_moe-grouped",  # whose files have no output head
    "olmo2-biases",
    "qwen2-windows",
    "qwen3_moe-some",
    "qwen3_next-some",
)
IN_GGUF = [name for name in FAMILIES | FURTHER if name not in (*NOT_IN_GGUF, MOST)]


def ids_for(config: ModelConfig) -> list[int]:
    return np.random.default_rng(7).integers(0, config.vocab_size, N_TOKENS).tolist()
