"""Reads a ModelConfig from a Hugging Face config.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from llmcl.architectures.config import limits
from llmcl.architectures.config.encoder import ENCODERS, encoder_from_hf
from llmcl.architectures.config.experts import experts_from_hf, hunyuan_keys
from llmcl.architectures.config.family_fields import (
    SWITCHED,
    Windows,
    ends_of,
    family_fields,
    rotations_by_interval,
    rotations_by_window,
    windows_by_pattern,
)
from llmcl.architectures.config.heads import heads_from_hf, keys_as_values_from_hf
from llmcl.architectures.config.latent import latent_from_hf, latent_scale, log_multiplier_from_hf
from llmcl.architectures.config.layer_inputs import input_size_from_hf, keys_of_from_hf, mlp_widths_from_hf
from llmcl.architectures.config.lfm2 import lfm2_keys
from llmcl.architectures.config.llama4 import chunk_from_hf, llama4_keys, temperature_from_hf
from llmcl.architectures.config.mamba import granite_hybrid_keys, nemotron_h_keys
from llmcl.architectures.config.missing import refuse_architecture
from llmcl.architectures.config.model_config import ModelConfig, checked
from llmcl.architectures.config.muse_glimmer import muse_keys
from llmcl.architectures.config.quantization import quantization_from_hf
from llmcl.architectures.config.reader import Reader, unsupported
from llmcl.architectures.config.recurrent import parts_from_hf, recurrent_from_hf
from llmcl.architectures.config.rope import query_scale_from_hf, rope_from_hf, rotary_dim_keys
from llmcl.architectures.families import FAMILIES, TEXT_PARTS, TextPart
from llmcl.architectures.families.blocks import Activation, Experts, GatedMlp, Heads, Rotation
from llmcl.architectures.families.family import Family, LayerSettings
from llmcl.architectures.families.plain_mlp import PlainMlp
from llmcl.errors import shown

_BESIDE_TEXT_CONFIG = (
    "dtype",
    "torch_dtype",
    "bos_token_id",
    "eos_token_id",
    "quantization_config",
)
_DTYPES = ("float32", "float16", "bfloat16")
# Families with unusual keys for Llama's values.
_OTHER_KEYS = {
    "granitemoehybrid": granite_hybrid_keys,
    "hunyuan_v1_moe": hunyuan_keys,
    "lfm2": lfm2_keys,
    "lfm2_moe": lfm2_keys,
    "llama4_text": llama4_keys,
    "minimax_m2": rotary_dim_keys,
    "muse_glimmer_text": muse_keys,
    "nemotron_h": nemotron_h_keys,
}
_ACTIVATIONS: dict[Activation, tuple[str, tuple[str, ...]]] = {
    "silu": ("hidden_act", ("silu", "swish")),
    "gelu_tanh": ("hidden_activation", ("gelu_pytorch_tanh",)),
    "clamped_swiglu": ("hidden_act", ("silu", "swish")),
    "xielu": ("hidden_act", ("xielu",)),
    "relu2": ("mlp_hidden_act", ("relu2",)),
}


def config_from_hf(config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> ModelConfig:
    """Returns the model described by config.json. generation_config.json names the end-of-text ids.

    For a multimodal model it is the text part (`TEXT_PARTS`). Raises CheckpointError for a missing or senseless value,
    and UnsupportedModelError for an unsupported feature. Both name the key.
    """
    model_type = Reader(config, "config.json").text("model_type")
    if model_type in TEXT_PARTS:
        config = _text_config(Reader(config, "config.json"), TEXT_PARTS[model_type])
        model_type = Reader(config, "config.json: text_config").text("model_type")
    if model_type not in FAMILIES:
        refuse_architecture(model_type, "the architecture", [*FAMILIES, *TEXT_PARTS])
    family = FAMILIES[model_type]
    if model_type in ENCODERS:
        return encoder_from_hf(config, _dtype(Reader(config, "config.json")))
    if config.get("rope_parameters") is None:  # null is as good as missing
        config = {key: value for key, value in config.items() if key != "rope_parameters"}
    read = Reader({**family.defaults, **config}, "config.json")
    if model_type in _OTHER_KEYS:
        read = Reader({**read.values, **_OTHER_KEYS[model_type](read)}, "config.json")
    _refuse_features(read, family)

    hidden_size = read.size("hidden_size", limits.MAX_HIDDEN)
    n_layers = read.size("num_hidden_layers", limits.MAX_LAYERS)
    n_q_heads = read.size("num_attention_heads", limits.MAX_HEADS)
    default_head_dim = max(hidden_size // n_q_heads, 1)
    max_position = read.size("max_position_embeddings", limits.MAX_POSITION, default=2048)
    vocab_size = read.size("vocab_size", limits.MAX_VOCAB)
    head_dim = read.size("head_dim", limits.MAX_HEAD_DIM, default=default_head_dim)
    generation = Reader(generation_config or {}, "generation_config.json")
    eos_token_ids = generation.token_ids("eos_token_id", vocab_size)
    bos_token_ids = read.token_ids("bos_token_id", vocab_size)
    bos_token_ids = bos_token_ids or generation.token_ids("bos_token_id", vocab_size)
    attention_scale = family.attention_scale
    if family.query_pre_attn_scalar:
        attention_scale = read.number("query_pre_attn_scalar", 0.0, limits.MAX_INTERMEDIATE) ** -0.5
    if family.output_multiplier:
        attention_scale = read.number("qk_scale_factor", 0.0, limits.MAX_SCALE) * head_dim**-0.5
    heads = Heads(read.size("num_key_value_heads", limits.MAX_HEADS, default=n_q_heads), head_dim)
    if (latent := latent_from_hf(read, family)) is not None:
        heads = Heads(1, latent.width)
    input_size = input_size_from_hf(read, family, vocab_size)
    of_layers = _settings(read, family, n_layers, max_position, heads, input_size)
    settings = [replace(layer_settings, latent=latent) for layer_settings in of_layers]
    rotated = next((layer.heads.size for layer in settings if layer.heads and layer.rotation == "main"), head_dim)
    rope = rope_from_hf(read, family, rotated if latent is None else latent.rope, max_position)
    if latent is not None:
        attention_scale = latent_scale(latent, rope["rope_scaling"], log_multiplier_from_hf(read))
        rope["rotary_dim"] = latent.rope
    eps_key = "layer_norm_eps" if family.layer_norms else "rms_norm_eps"
    # Families with experts in all layers leave it out.
    expert_size = None if family.experts is None else read.get(family.experts.size)
    return checked(
        ModelConfig(
            architecture=model_type,
            hidden_size=hidden_size,
            intermediate_size=read.size("intermediate_size", limits.MAX_INTERMEDIATE, default=expert_size),
            n_q_heads=n_q_heads,
            n_kv_heads=heads.n_kv,
            head_dim=heads.size,
            vocab_size=vocab_size,
            max_position=max_position,
            rms_norm_eps=read.number(eps_key, 0.0, 1.0, default=1e-6),
            tie_embeddings=read.flag("tie_word_embeddings", default=False),
            dtype=_dtype(read),
            bos_token_id=bos_token_ids[0] if bos_token_ids else None,
            eos_token_ids=eos_token_ids or read.token_ids("eos_token_id", vocab_size),
            norm_offset=family.norm_offset,
            **rope,
            layer_input_size=input_size,
            bidirectional=_is_bidirectional(read, family),
            **family_fields(read, family, "", hidden_size, settings, attention_scale),
        ),
        "config.json",
    )


def _text_config(read: Reader, part: TextPart) -> dict[str, Any]:
    """Returns the config.json of the text part alone. Missing values are taken from the surrounding object or the
    family. Tied embeddings are read from the surrounding object, as in transformers.
    """
    if read.get("architectures", [part.hf_class]) != [part.hf_class]:
        unsupported(f"the architecture {shown(read.get('architectures'))}", f"it supports {part.hf_class}")
    text = read.table("text_config")
    if part.flat and text is None:
        return {**read.values, "model_type": part.family, "architectures": None}
    beside = {key: read.get(key) for key in _BESIDE_TEXT_CONFIG if read.get(key) is not None}
    text_values = {} if text is None else {key: value for key, value in text.values.items() if value is not None}
    tied = {"tie_word_embeddings": read.flag("tie_word_embeddings", default=part.tied)}
    if part.flat and text_values.get("tie_word_embeddings") is True:
        tied["tie_word_embeddings"] = True
    return {"model_type": part.family, **beside, **text_values, **tied, "architectures": None}


def _settings(
    read: Reader, family: Family, n_layers: int, max_position: int, heads: Heads, input_size: int
) -> list[LayerSettings]:
    bias = "attention_bias" in family.biases and read.flag("attention_bias", default=False)
    mlp_bias = "mlp_bias" in family.biases and read.flag("mlp_bias", default=False)
    windows = _windows(read, family, n_layers, max_position)
    if _is_bidirectional(read, family):  # half on each side
        windows = tuple(None if window is None else window // 2 + 1 for window in windows)
    rotations = _rotations(read, family, windows)
    output_bias = read.flag("attention_out_bias", default=False) if "attention_out_bias" in family.biases else bias
    flags: dict[str, Any] = {"bias": bias, "output_bias": output_bias, "mlp_bias": mlp_bias}
    flags["query_scale"] = query_scale_from_hf(read) if family.query_scale else None
    flags["head_norms"] = family.optional_head_norms and read.flag("use_qk_norm", default=False)
    if family.chunks:
        flags["query_scale"] = temperature_from_hf(read)
        flags["chunk"] = chunk_from_hf(read, [rotation != "none" for rotation in rotations])
    keys_of = keys_of_from_hf(read, family, windows)
    of_layers: dict[str, Sequence[Any]] = {
        "window": windows,
        "rotation": rotations,
        "experts": experts_from_hf(read, family, n_layers),
        "recurrent": recurrent_from_hf(read, family, n_layers),
        "part": parts_from_hf(read, family, n_layers),
        "heads": heads_from_hf(read, family, windows, heads),
        "keys_as_values": keys_as_values_from_hf(read, family, windows),
        "keys_of": keys_of,
        "mlp_width": mlp_widths_from_hf(read, family, keys_of),
        "input_size": [input_size] * n_layers,
    }
    return [
        LayerSettings(**ends, **flags, **{name: values[i] for name, values in of_layers.items()})
        for i, ends in enumerate(ends_of(n_layers))
    ]


def _rotations(read: Reader, family: Family, windows: Windows) -> list[Rotation]:
    """Reads each layer's rotation. no_rope_layers has 1 for a rotating layer and 0 for a layer without rotation."""
    if family.unrotated_full and read.get("sliding_window") is None:
        return ["main"] * len(windows)
    if family.rotates == "optional" and read.get("position_embedding_type") != "rope":
        return ["none"] * len(windows)
    if not family.unrotated_layers:
        return rotations_by_window(family, windows)
    n_layers = len(windows)
    flags = read.get("no_rope_layers")
    if flags is None:
        return rotations_by_interval(read.size("no_rope_layer_interval", limits.MAX_LAYERS), n_layers)
    if not isinstance(flags, list) or len(flags) < n_layers or any(flag not in (0, 1) for flag in flags):
        read.fail("no_rope_layers", flags, f"a 0 or a 1 for each of {n_layers} layers")
    return ["main" if flag else "none" for flag in flags[:n_layers]]


def _windows(read: Reader, family: Family, n_layers: int, max_position: int) -> Windows:
    """Returns the window of each layer."""
    window = None
    if read.get("sliding_window") is not None:
        window = read.size("sliding_window", limits.MAX_WINDOW)
    if family.windows == "none" and window is not None and window < max_position:
        unsupported(
            f"sliding-window attention in this architecture (sliding_window {window} below max_position_embeddings "
            f"{max_position})",
            "use a version of the model without a window",
        )
    if family.windows in SWITCHED and not read.flag("use_sliding_window", default=False):
        window = None
    first = read.size("max_window_layers", limits.MAX_LAYERS, default=0, minimum=0) if family.windows == "late" else 0
    pattern = family.windows
    layer_types = read.get("layer_types")
    if isinstance(pattern, int) and not layer_types and window is not None:
        pattern = read.size("sliding_window_pattern", limits.MAX_LAYERS, default=pattern)
    if layer_types is None and pattern == "unrotated":
        rotations = _rotations(read, family, (None,) * n_layers)
        return tuple(window if rotation == "none" else None for rotation in rotations)
    if layer_types is None:
        return windows_by_pattern(pattern, window, n_layers, first)
    if not isinstance(layer_types, list):
        read.fail("layer_types", layer_types, "a list")
    for layer_type in layer_types:
        known = (
            "full_attention",
            "sliding_attention",
            family.recurrent,
            *(("mlp", "moe") if family.single_blocks else ()),
        )
        if layer_type not in known:
            unsupported(f"layers of type {shown(layer_type)} (layer_types)", "it supports full and sliding attention")
    if not layer_types:
        return windows_by_pattern(pattern, window, n_layers, first)
    if "sliding_attention" not in layer_types:
        return (None,) * n_layers
    if family.windows == "none":
        unsupported("layers of type 'sliding_attention' (layer_types) in this architecture")
    if len(layer_types) != n_layers:
        read.fail("layer_types", layer_types, f"the types of {n_layers} layers")
    if window is None:
        read.fail("sliding_window", None, "the window of the layers of type sliding_attention")
    return tuple(window if layer_type == "sliding_attention" else None for layer_type in layer_types)


def _refuse_features(read: Reader, family: Family) -> None:
    """Raises UnsupportedModelError for settings in config.json that llmcl does not compute."""
    architectures = read.get("architectures", [])
    base = family.hf_class.removesuffix("ForCausalLM")
    classes = [family.hf_class, f"{base}Model", f"{base}TextModel"]
    classes += [f"{base}ForSequenceClassification"] if family.judges else []
    if architectures and architectures not in [[name] for name in classes]:
        unsupported(f"the architecture {shown(architectures)}", f"it supports {family.hf_class}")
    for key in ("attention_bias", "attention_out_bias", "mlp_bias"):
        if key not in family.biases and read.flag(key, default=False):
            unsupported(f"projections with a bias ({key} true)")
    # With "vision" only image tokens see each other.
    visible = (False, "vision", True) if family.bidirectional else (False, "vision")
    if read.get("use_bidirectional_attention", False) not in visible:
        unsupported("attention to later tokens (use_bidirectional_attention)")
    kinds = Experts, GatedMlp, PlainMlp
    mlp = next((block for block in family.layer(LayerSettings()) if isinstance(block, kinds)), GatedMlp())
    activation: Activation
    match mlp:
        case PlainMlp():
            activation = "xielu" if mlp.curved else "relu2"
        case _:
            activation = mlp.activation
    key, known = _ACTIVATIONS[activation]
    if (wanted := read.text(key, default=known[0])) not in known:
        unsupported(f"the activation {shown(wanted)} ({key})", f"it supports {known[0]}")
    quantization_from_hf(read.values, family.quant_methods)
    for name, value in family.fixed.items():
        if (actual := read.get(name, value)) != value:
            unsupported(f"{name} {shown(actual)}", f"it supports {value}")


def _is_bidirectional(read: Reader, family: Family) -> bool:
    return family.bidirectional and read.get("use_bidirectional_attention") is True


def _dtype(read: Reader) -> str:
    key = "dtype" if read.get("dtype") is not None else "torch_dtype"
    dtype = read.text(key, default="float32").removeprefix("torch.")
    if dtype == "auto":  # the tensors have the dtype
        return "float32"
    if dtype not in _DTYPES:
        unsupported(f"the dtype {shown(dtype)} ({key})", f"it supports {', '.join(_DTYPES)}")
    return dtype
