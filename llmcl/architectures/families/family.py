"""Family: the declaration of an architecture and its checkpoint formats."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from llmcl.architectures.families.blocks import (
    Attention,
    ExpertSettings,
    GatedMlp,
    Heads,
    Layer,
    QueryScale,
    Rotation,
    Scoring,
)
from llmcl.architectures.families.latent import LatentSettings
from llmcl.architectures.families.recurrent import RecurrentSettings

# Which layers have a sliding window: none, all, or all but every n-th. With use_sliding_window: layers from
# max_window_layers on ("late"), all ("switched"), or layers without rotation ("unrotated"). A `layer_types` list in
# config.json takes precedence.
WindowPattern = Literal["none", "all", "late", "switched", "unrotated"] | int


@dataclass(frozen=True)
class LayerSettings:
    """A checkpoint's settings for one layer. Fields without a comment: see `Attention`."""

    window: int | None = None
    soft_cap: float | None = None
    query_scale: QueryScale | None = None
    rotation: Rotation = "main"
    bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False  # see `GatedMlp.bias`
    experts: ExpertSettings | None = None  # None: no mixture of experts
    part: Literal["both", "mixer", "mlp"] = "both"  # the layer's blocks, see `Family.single_blocks`
    recurrent: RecurrentSettings | None = None  # block in place of attention; None: attention
    chunk: int | None = None
    is_first: bool = False
    is_last: bool = False
    heads: Heads | None = None
    keys_as_values: bool = False
    head_norms: bool = False  # for families with `Family.optional_head_norms`
    latent: LatentSettings | None = None  # None: heads have separate keys and values
    keys_of: int | None = None
    mlp_width: int = 1  # see `GatedMlp.width`
    input_size: int = 0  # see `LayerInput.size`; 0: no per-layer input
    tanh: bool = False  # see `GeluMlp.tanh`


@dataclass(frozen=True)
class ExpertKeys:
    """How a family's checkpoints describe experts. Strings are keys in config.json."""

    size: str = "intermediate_size"  # rows of an expert's gate
    renormalize: str | bool = True  # flag for `ExpertSettings.renormalize`, or a fixed value
    gguf_renormalize: bool = True  # value for GGUF files without the flag
    shared_size: str | None = None  # rows of the shared expert's gate; None: no shared expert
    top_k: str = "num_experts_per_tok"  # experts per token
    enabled: str | None = None  # flag that enables experts; None: always enabled
    optional: bool = False  # the number of experts may be 0: no experts
    shared_count: str | None = None  # number of shared experts, `size` rows each, merged into one
    scoring: Scoring | None = None  # scoring if config.json does not say; None: largest logits
    dense_layers: str | None = None  # number of leading layers without experts
    corrected: bool | str | None = None  # `Scores.corrected`, or its flag in config.json; None: with sigmoid scores


def llama_layer(settings: LayerSettings) -> Layer:
    """Returns attention, with or without a window, then a SiLU-gated MLP, each after an RMS norm."""
    return (
        Attention(
            bias=settings.bias,
            output_bias=settings.output_bias,
            rotation=settings.rotation,
            window=settings.window,
            query_scale=settings.query_scale,
        ),
        GatedMlp(bias=settings.mlp_bias),
    )


@dataclass(frozen=True)
class Family:
    """The declaration of an architecture."""

    hf_class: str  # name in config.json's `architectures`
    gguf_name: str | None  # general.architecture in GGUF files; None if GGUF uses another family's name
    layer: Callable[[LayerSettings], Layer] = llama_layer  # makes the blocks of a layer
    norm_offset: float = 0.0  # added to norm weights from safetensors (GGUF files hold the sum)
    scaled_embedding: bool = False  # embeddings times sqrt(hidden_size)
    layer_norms: bool = False  # norms subtract the mean (`Center`); reads layer_norm_eps
    output_multiplier: bool = False  # reads output_multiplier, qk_scale_factor and post_norm_eps
    logit_scale: bool = False  # reads logit_scale, a factor on the logits
    soft_caps: bool = False  # reads attn_logit_softcapping and final_logit_softcapping
    query_pre_attn_scalar: bool = False  # reads query_pre_attn_scalar n: scores times n^-1/2
    attention_scale: float | None = None  # factor on all scores; None: the default
    refused: tuple[str, ...] = ()  # keys that must be absent, null, false or 0
    fixed: Mapping[str, Any] = field(default_factory=dict)  # keys with only one supported value
    quant_methods: tuple[str, ...] = ()  # supported quantisation methods in safetensors
    # keys (attention_bias, attention_out_bias, mlp_bias) that may be true; without attention_out_bias the output
    # projection follows attention_bias
    biases: tuple[str, ...] = ()
    # reads embedding_multiplier, residual_multiplier, attention_multiplier and logits_scaling
    multipliers: bool = False
    query_scale: bool = False  # reads llama_4_scaling_beta from the rotary settings
    bidirectional: bool = False  # reads use_bidirectional_attention: tokens see the whole text, and make no text
    unrotated_layers: bool = False  # some layers do not rotate (no_rope_layers, no_rope_layer_interval)
    chunks: bool = False  # reads attention_chunk_size, attn_temperature_tuning, attn_scale and floor_scale
    unrotated_full: bool = False  # beside layers with a window, layers without one do not rotate
    optional_head_norms: bool = False  # reads use_qk_norm; GGUF files say it by their tensors
    # "optional": queries and keys rotate only if position_embedding_type is "rope" (GGUF: rope.scaling.finetuned)
    rotates: Literal["always", "optional", "never"] = "always"
    partial_rotation: bool = False  # reads partial_rotary_factor
    # rotary scaling names in config.json with an unusual meaning
    rope_kinds: Mapping[str, str] = field(default_factory=dict)
    # three positions per token, time, row and column: how mrope_section spreads the axes over the pairs of a head
    rope_axes: Literal["chunks", "interleaved"] | None = None
    rope_alpha: bool = False  # dynamic rotary scaling with an alpha raises theta once, for texts of any length
    windows: WindowPattern = "none"
    # windowed layers have unscaled rotary frequencies, with theta rope_local_base_freq if given
    local_rope: bool = False
    # layers without a window may have different heads (global_head_dim, num_global_key_value_heads) and use keys as
    # values (attention_k_eq_v)
    own_heads: bool = False
    experts: ExpertKeys | None = None  # None: no experts
    # safetensors modules that stack several modules' tensors, and all experts' if a name has {} for the expert number
    stacked: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    latent: bool = False  # latent attention (`families/latent.py`)
    # name of recurrent layers in `layer_types`; None: no recurrent layers
    recurrent: Literal["conv", "linear_attention", "mamba"] | None = None
    single_blocks: bool = False  # a layer is a mixer, or an MLP or experts
    joined_inputs: tuple[str, ...] = ()  # see `DeltaSettings.joined`, for safetensors
    # safetensors module names that differ from Llama's, with llmcl's names
    modules: Mapping[str, str] = field(default_factory=dict)
    # like stacked, for expert rows that alternate (`llmcl/checkpoint/interleaved.py`)
    interleaved: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    shifted_norms: tuple[str, ...] = ()  # modules of norms that safetensors hold without the 1; see also norm_offset
    # ends of norm weights that safetensors lack, with their value
    constants: Mapping[str, float] = field(default_factory=dict)
    # like stacked, for transposed tensors: the columns of an expert are the rows of its parts
    transposed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    gguf_windowed: str | None = None  # family of GGUF files with the same name and a window
    gguf_name_with_experts: str | None = None  # general.architecture of GGUF files with experts if not gguf_name
    gguf_experts: str | None = None  # family of GGUF files with the same name and experts
    # layer count of the size whose scores are divided by sqrt(hidden_size / heads); GGUF has no key for it
    gguf_wide_scale: int | None = None
    interleaves_rope: bool = False  # safetensors store the rotary pairs of q and k next to each other
    gguf_interleaves_rope: bool = False  # same, for GGUF files
    gguf_yarn_truncates: bool = True  # see `RopeScaling.truncate`; GGUF has no key for it
    gguf_modules: Mapping[str, str] = field(default_factory=dict)  # GGUF module names that differ from Llama's
    # GGUF layer tensors that are not a module's weight or bias
    gguf_tensors: Mapping[str, str] = field(default_factory=dict)
    # GGUF metadata with a number per layer that safetensors hold in tensors: key, without the architecture, and tensor
    gguf_values: Mapping[str, str] = field(default_factory=dict)
    gguf_drafting_layers: bool = False  # GGUF files may have extra layers for drafting tokens, which llmcl skips
    drafting_layers: bool = False  # same, for safetensors
    defaults: Mapping[str, Any] = field(default_factory=dict)  # defaults for missing config.json keys if not Llama's
    judges: bool = False  # there are rerankers of the family, see `JudgingHead`
    models: str = ""  # published models, for `llmcl models` and docs/models.md
