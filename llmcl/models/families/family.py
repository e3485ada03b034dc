"""Family: what an architecture is made of, and how its checkpoints say so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from llmcl.models.families.blocks import (
    Attention,
    ExpertSettings,
    GatedMlp,
    Heads,
    Layer,
    QueryScale,
    Rotation,
    Scoring,
)
from llmcl.models.families.latent import LatentSettings
from llmcl.models.families.recurrent import RecurrentSettings

# Which layers see only a sliding window: none, all, all but every n-th, or, if use_sliding_window is set, those from
# max_window_layers on ("late") or all ("switched"). A list `layer_types` in config.json goes before it.
WindowPattern = Literal["none", "all", "late", "switched"] | int


@dataclass(frozen=True)
class LayerSettings:
    """What a checkpoint says of one layer. mlp_bias: `GatedMlp.bias`; mlp_width: `GatedMlp.width`; experts: of its
    mixture, None for a layer without; recurrent: of the block that it has in place of attention, None for a layer with
    attention; latent: of its attention, None where heads have keys and values of their own; input_size:
    `LayerInput.size`, 0 for a layer without; the others: see `Attention`.
    """

    window: int | None = None
    soft_cap: float | None = None
    query_scale: QueryScale | None = None
    rotation: Rotation = "main"
    bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    experts: ExpertSettings | None = None
    recurrent: RecurrentSettings | None = None
    heads: Heads | None = None
    keys_as_values: bool = False
    latent: LatentSettings | None = None
    keys_of: int | None = None
    mlp_width: int = 1
    input_size: int = 0


@dataclass(frozen=True)
class ExpertKeys:
    """How checkpoints of a family say what its experts are.

    size: the key of the rows of an expert's gate in config.json. renormalize: the key of the flag
    `ExpertSettings.renormalize`, or its value where no key counts. gguf_renormalize: what GGUF files without that flag
    mean.
    shared_size: the key of the rows of the shared expert's gate; None: there is none. top_k: the key of how many a
    token goes to. enabled: the flag without which there are no experts; None: there always are. shared_count: the key
    of how many experts together are the shared one, each of `size` rows. scoring: how the router chooses where
    config.json does not say it; None: by the largest logits. dense_layers: the key of how many layers, the first ones,
    have no experts.
    """

    size: str = "intermediate_size"
    renormalize: str | bool = True
    gguf_renormalize: bool = True
    shared_size: str | None = None
    top_k: str = "num_experts_per_tok"
    enabled: str | None = None
    shared_count: str | None = None
    scoring: Scoring | None = None
    dense_layers: str | None = None


def llama_layer(settings: LayerSettings) -> Layer:
    """Attention over the whole text or a window of it, then a gate with SiLU; an RMS norm before each."""
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
    """What an architecture is made of.

    hf_class: its name in config.json's `architectures`. gguf_name: its general.architecture in GGUF files; None where
    they name another family. layer: the blocks of a layer.

    norm_offset: what the model adds to the norm weights of safetensors (GGUF files hold the sum). scaled_embedding:
    embeddings times sqrt(hidden_size). soft_caps: attn_logit_softcapping and final_logit_softcapping are read.
    query_pre_attn_scalar: config.json has this key, n for scores times n^-1/2. attention_scale: of all scores; None:
    the usual one. multipliers: embedding_multiplier, residual_multiplier, attention_multiplier and logits_scaling are
    read. query_scale: llama_4_scaling_beta among the rotary settings is. biases: keys of config.json (attention_bias,
    mlp_bias) that may be true. refused: keys that must be absent, null, false or 0. fixed: keys that can have one value
    alone. quant_methods: of safetensors that llmcl reads.

    windows: see WindowPattern. local_rope: layers with a window have rotary frequencies of their own, without scaling
    and, if config.json has rope_local_base_freq, of that theta. unrotated_layers: some layers do not rotate, as
    no_rope_layers and no_rope_layer_interval say. own_heads: layers without a window may have heads of their own
    (global_head_dim, num_global_key_value_heads), and take their keys for values (attention_k_eq_v).
    partial_rotation: partial_rotary_factor is read. rope_kinds: what config.json's names of rotary scalings mean, where
    they are not the usual ones.

    experts: how checkpoints say what the experts are; None: there are none. stacked: modules of safetensors that hold
    the tensors of several modules, one below the other, and of all experts where these have a {} for the expert's
    number. interleaved: the same of experts whose rows are in turn (`llmcl/checkpoint/interleaved.py`).

    latent: attention is that of `families/latent.py`.

    recurrent: the name in config.json's `layer_types` of layers that have a recurrent block in place of attention;
    None: there are none. joined_inputs: `DeltaSettings.joined` of safetensors. modules: modules whose names in
    safetensors are not Llama's, and what they are here.

    gguf_windowed: the family of GGUF files of this name that have a window; gguf_experts: that have experts.
    gguf_wide_scale: the number of layers of the size whose scores are divided by sqrt(hidden_size / heads), for which
    GGUF has no key. gguf_interleaves_rope: GGUF files store the rotary pairs of q and k next to each other.
    gguf_yarn_truncates: as `RopeScaling.truncate`, for which GGUF has no key.
    gguf_modules: names of modules in GGUF files where they are not Llama's; gguf_tensors: of a layer's
    tensors there that are not a module's weight or bias. gguf_drafting_layers: layers behind the last may draft tokens;
    they are left out; drafting_layers: the same in safetensors. defaults: values of keys that
    config.json may leave out, where they are not Llama's.
    """

    hf_class: str
    gguf_name: str | None
    layer: Callable[[LayerSettings], Layer] = llama_layer
    norm_offset: float = 0.0
    scaled_embedding: bool = False
    soft_caps: bool = False
    query_pre_attn_scalar: bool = False
    attention_scale: float | None = None
    refused: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    quant_methods: tuple[str, ...] = ()
    biases: tuple[str, ...] = ()
    multipliers: bool = False
    query_scale: bool = False
    unrotated_layers: bool = False
    partial_rotation: bool = False
    rope_kinds: Mapping[str, str] = field(default_factory=dict)
    windows: WindowPattern = "none"
    local_rope: bool = False
    own_heads: bool = False
    experts: ExpertKeys | None = None
    stacked: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    latent: bool = False
    recurrent: Literal["conv", "linear_attention"] | None = None
    joined_inputs: tuple[str, ...] = ()
    modules: Mapping[str, str] = field(default_factory=dict)
    interleaved: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    gguf_windowed: str | None = None
    gguf_experts: str | None = None
    gguf_wide_scale: int | None = None
    gguf_interleaves_rope: bool = False
    gguf_yarn_truncates: bool = True
    gguf_modules: Mapping[str, str] = field(default_factory=dict)
    gguf_tensors: Mapping[str, str] = field(default_factory=dict)
    gguf_drafting_layers: bool = False
    drafting_layers: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
