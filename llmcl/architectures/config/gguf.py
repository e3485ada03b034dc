"""Reads a ModelConfig from GGUF metadata."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from llmcl.architectures.config import limits
from llmcl.architectures.config.encoder import ENCODERS, encoder_from_gguf
from llmcl.architectures.config.experts import experts_from_gguf
from llmcl.architectures.config.family_fields import (
    SWITCHED,
    Windows,
    family_fields,
    rotations_by_interval,
    rotations_by_window,
    windows_by_pattern,
)
from llmcl.architectures.config.heads import heads_from_gguf, keys_as_values_from_gguf, kv_heads_from_gguf
from llmcl.architectures.config.latent import latent_from_gguf, latent_scale, log_multiplier_from_gguf
from llmcl.architectures.config.layer_inputs import input_size_from_gguf, keys_of_from_gguf, mlp_widths_from_gguf
from llmcl.architectures.config.missing import check_file_type, refuse_architecture
from llmcl.architectures.config.model_config import ModelConfig, checked
from llmcl.architectures.config.reader import Reader, unsupported
from llmcl.architectures.config.recurrent import parts_from_gguf, recurrent_from_gguf
from llmcl.architectures.config.rope import MAX_THETA, GgufFactors, query_scale_from_gguf, scaling_from_gguf
from llmcl.architectures.config.rope_axes import axes_from_gguf
from llmcl.architectures.families import FAMILIES, GGUF_FAMILIES
from llmcl.architectures.families.blocks import Heads
from llmcl.architectures.families.family import Family, LayerSettings
from llmcl.errors import CheckpointError

# Tokens that end a turn, for chat models with only an end-of-document token in the GGUF metadata.
_END_OF_TURN_TOKENS = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<turn|>", "<|end|>")
# In gpt-oss an answer has several messages, each ended by <|end|>. The tokens below end the answer.
_END_OF_ANSWER_TOKENS = ("<|return|>", "<|call|>")
# Gemma 4 writes the token after a tool call, before the result.
_END_OF_CALL_TOKEN = "<|tool_response>"
# GLM's answers end where another role's turn begins.
_OTHERS_TURNS = ("<|user|>", "<|observation|>")
_SOFT_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
_NO_FACTORS = GgufFactors()
_UNROTATED_INTERVAL = 4  # GGUF has no key for it


def checked_architecture(metadata: Mapping[str, Any]) -> str:
    """Returns `general.architecture`. Raises UnsupportedModelError for no model, or one of no known family."""
    check_file_type(metadata.get("general.type"))
    arch = Reader(metadata, "GGUF metadata").text("general.architecture")
    if arch not in GGUF_FAMILIES:
        refuse_architecture(arch, "the GGUF architecture", GGUF_FAMILIES)
    return arch


def config_from_gguf(
    metadata: Mapping[str, Any],
    tensor_names: Collection[str],
    rope_factors: GgufFactors = _NO_FACTORS,
) -> ModelConfig:
    """Returns the model described by GGUF metadata.

    tensor_names: as in the file (a missing output.weight means tied embeddings). rope_factors: tensors that scale
    rotary frequencies. `dtype` is "quantized"; the caller replaces it once the tensor formats are known. Raises the
    errors of `config_from_hf`.
    """
    arch = checked_architecture(metadata)
    architecture = GGUF_FAMILIES[arch]
    if architecture in ENCODERS:
        return encoder_from_gguf(metadata, architecture)
    family = FAMILIES[architecture]
    window_key = f"{arch}.attention.sliding_window"
    if family.gguf_windowed is not None and metadata.get(window_key):
        architecture = family.gguf_windowed
        family = FAMILIES[architecture]
    if family.gguf_experts is not None and _has_experts(metadata, arch):
        architecture = family.gguf_experts
        family = FAMILIES[architecture]
    defaults = {f"{arch}.{key}": family.defaults[key] for key in _SOFT_CAPS if key in family.defaults}
    read = Reader({**defaults, **metadata}, "GGUF metadata")

    hidden_size = read.size(f"{arch}.embedding_length", limits.MAX_HIDDEN)
    n_layers = read.size(f"{arch}.block_count", limits.MAX_LAYERS)
    if family.gguf_drafting_layers:
        n_layers -= read.size(f"{arch}.nextn_predict_layers", n_layers - 1, default=0, minimum=0)
    n_q_heads = read.size(f"{arch}.attention.head_count", limits.MAX_HEADS)
    default_head_dim = max(hidden_size // n_q_heads, 1)
    head_dim = read.size(f"{arch}.attention.key_length", limits.MAX_HEAD_DIM, default=default_head_dim)
    value_dim = read.size(f"{arch}.attention.value_length", limits.MAX_HEAD_DIM, default=head_dim)
    if (latent := latent_from_gguf(read, arch, family)) is not None:
        head_dim = value_dim = latent.rope
    if value_dim != head_dim:
        unsupported(f"values of another size than keys (value_length {value_dim}, key_length {head_dim})")
    rope_dim = read.size(f"{arch}.rope.dimension_count", limits.MAX_HEAD_DIM, default=head_dim)
    if family.rotates == "never":
        rope_dim = head_dim
    if rope_dim != head_dim and (not family.partial_rotation or rope_dim > head_dim or rope_dim % 2):
        unsupported(f"partial rotary embeddings ({arch}.rope.dimension_count {rope_dim} of {head_dim})")
    max_position = read.size(f"{arch}.context_length", limits.MAX_POSITION)

    tokens = read.get("tokenizer.ggml.tokens", [])
    if not isinstance(tokens, list) or (tokens and not isinstance(tokens[0], str)):
        read.fail("tokenizer.ggml.tokens", tokens, "a list of strings")
    vocab_size = read.size(f"{arch}.vocab_size", limits.MAX_VOCAB, default=len(tokens) or None)
    if len(tokens) > vocab_size:
        raise CheckpointError(
            f"GGUF metadata: tokenizer.ggml.tokens has {len(tokens)} tokens, but {arch}.vocab_size is "
            f"{vocab_size}. The file is inconsistent; convert it again."
        )
    attention_scale = family.attention_scale
    if n_layers == family.gguf_wide_scale:
        # GGUF has no key for query_pre_attn_scalar. It is head_dim in all sizes but this one (as in llama.cpp).
        attention_scale = (hidden_size / n_q_heads) ** -0.5
    expert_size = read.get(f"{arch}.expert_feed_forward_length")  # for files with only expert sizes
    eps_key = "layer_norm_epsilon" if family.layer_norms else "layer_norm_rms_epsilon"
    theta = read.number(f"{arch}.rope.freq_base", 1.0, MAX_THETA, default=10000.0)
    local_theta = family.defaults.get("rope_local_base_freq", theta)
    local_theta = read.number(f"{arch}.rope.freq_base_swa", 1.0, MAX_THETA, default=local_theta)
    windows = _windows(read, arch, family, n_layers, max_position)
    scale = query_scale_from_gguf(read, arch) if family.query_scale else None
    n_kv_heads = kv_heads_from_gguf(read, arch, family, n_layers)
    heads, own_heads = heads_from_gguf(read, arch, family, windows, n_kv_heads, head_dim)
    scaling = scaling_from_gguf(read, arch, family, rope_factors, rope_dim, max_position)
    if latent is not None:
        heads = Heads(1, latent.width)
        attention_scale = latent_scale(latent, scaling, log_multiplier_from_gguf(read, arch))
    mlp_rows, mlp_widths = mlp_widths_from_gguf(read, arch, family, n_layers)
    if mlp_rows is None:
        mlp_rows = read.size(f"{arch}.feed_forward_length", limits.MAX_INTERMEDIATE, default=expert_size)
    input_size = input_size_from_gguf(read, arch, family)
    of_layers: dict[str, Sequence[Any]] = {
        "experts": experts_from_gguf(read, arch, family, n_layers, tensor_names),
        "recurrent": recurrent_from_gguf(read, arch, family, n_layers, tensor_names),
        "part": parts_from_gguf(read, arch, family, n_kv_heads),
        "heads": own_heads,
        "keys_as_values": keys_as_values_from_gguf(family, n_layers, tensor_names),
        "keys_of": keys_of_from_gguf(read, arch, family, windows),
        "mlp_width": mlp_widths,
        "input_size": [input_size] * n_layers,
    }
    settings = [
        replace(layer, query_scale=scale, latent=latent, **{name: values[i] for name, values in of_layers.items()})
        for i, layer in enumerate(_settings(read, arch, family, windows, tensor_names))
    ]
    return checked(
        ModelConfig(
            architecture=architecture,
            hidden_size=hidden_size,
            intermediate_size=mlp_rows,
            n_q_heads=n_q_heads,
            n_kv_heads=heads.n_kv,
            head_dim=heads.size,
            vocab_size=vocab_size,
            max_position=max_position,
            rms_norm_eps=read.number(f"{arch}.attention.{eps_key}", 0.0, 1.0),
            rope_scaling=scaling,
            rotary_dim=None if latent is None and rope_dim == head_dim else rope_dim,
            rope_axes=axes_from_gguf(read, arch, family, rope_dim // 2),
            rope_theta=theta,
            local_rope_theta=local_theta if family.local_rope else None,
            layer_input_size=input_size,
            tie_embeddings="output.weight" not in tensor_names,
            dtype="quantized",
            bos_token_id=next(iter(read.token_ids("tokenizer.ggml.bos_token_id", vocab_size)), None),
            eos_token_ids=_eos_token_ids(read, tokens, vocab_size),
            **family_fields(read, family, f"{arch}.", hidden_size, settings, attention_scale),
        ),
        "GGUF metadata",
    )


def _has_experts(metadata: Mapping[str, Any], arch: str) -> bool:
    count = metadata.get(f"{arch}.expert_count", 0)
    return isinstance(count, int) and count > 1


def _settings(
    read: Reader, arch: str, family: Family, windows: Windows, tensor_names: Collection[str]
) -> list[LayerSettings]:
    """Returns the layer settings. Only the tensor names say which biases exist."""
    attention, mlp = (key in family.biases for key in ("attention_bias", "mlp_bias"))
    n_layers = len(windows)
    rotations = rotations_by_window(family, windows)
    if family.unrotated_full and not any(windows):
        rotations = ["main"] * n_layers
    if family.unrotated_layers:
        rotations = rotations_by_interval(_UNROTATED_INTERVAL, n_layers)
    if family.rotates == "optional" and not read.flag(f"{arch}.rope.scaling.finetuned", default=True):
        rotations = ["none"] * n_layers
    return [
        LayerSettings(
            window,
            rotation=rotation,
            bias=attention and f"blk.{i}.attn_q.bias" in tensor_names,
            output_bias=attention and f"blk.{i}.attn_output.bias" in tensor_names,
            mlp_bias=mlp and f"blk.{i}.ffn_gate.bias" in tensor_names,
            is_last=i == n_layers - 1,
            head_norms=family.optional_head_norms and f"blk.{i}.attn_q_norm.weight" in tensor_names,
        )
        for i, (window, rotation) in enumerate(zip(windows, rotations, strict=True))
    ]


def _windows(read: Reader, arch: str, family: Family, n_layers: int, max_position: int) -> Windows:
    key = f"{arch}.attention.sliding_window"
    pattern = family.windows
    default = family.defaults.get("sliding_window", 0) if isinstance(pattern, int) else 0
    window = read.size(key, limits.MAX_WINDOW, default=default, minimum=0) or None
    if family.windows in SWITCHED:
        if window is not None and window < max_position:
            unsupported(f"sliding-window attention in a GGUF file of this architecture ({key} {window})")
        return (None,) * n_layers
    if not isinstance(pattern, int):
        return windows_by_pattern("all", window, n_layers, 0)
    flags = read.get(f"{key}_pattern", pattern)  # a number as in `Family.windows`, or a flag per layer
    if not isinstance(flags, np.ndarray):
        pattern = read.size(f"{key}_pattern", limits.MAX_LAYERS, default=pattern)
        return windows_by_pattern(pattern, window, n_layers, 0)
    if flags.shape != (n_layers,):
        read.fail(f"{key}_pattern", flags.tolist(), f"a value for each of {n_layers} layers")
    return tuple(window if flag else None for flag in flags)


def _eos_token_ids(read: Reader, tokens: list[str], vocab_size: int) -> tuple[int, ...]:
    ids = list(read.token_ids("tokenizer.ggml.eos_token_id", vocab_size))
    ids += read.token_ids("tokenizer.ggml.eot_token_id", vocab_size)
    ids += read.token_ids("tokenizer.ggml.eom_token_id", vocab_size)
    answer = all(text in tokens for text in _END_OF_ANSWER_TOKENS)
    ends: tuple[str, ...] = _END_OF_ANSWER_TOKENS if answer else _END_OF_TURN_TOKENS
    ends += _OTHERS_TURNS if all(text in tokens for text in _OTHERS_TURNS) else ()
    ids += [tokens.index(text) for text in (*ends, _END_OF_CALL_TOKEN) if text in tokens]
    return tuple(dict.fromkeys(ids))
