"""What a model is made of: sizes and constants, read from config.json or from GGUF metadata.

Everything that llmcl does not compute exactly is refused here, by the name of the feature, so that no other module has
to ask whether a checkpoint means what the layer stack does. `families.py` says what each architecture has.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmcl.config_reader import Reader, unsupported
from llmcl.errors import CheckpointError
from llmcl.families import FAMILIES, GGUF_ARCHITECTURES, Activation, Family, WindowPattern
from llmcl.rope import MAX_POSITION, RopeScaling, inverse_frequencies, rope_from_hf, scaling_from_gguf

__all__ = ["ModelConfig", "RopeScaling"]

# Far above any published model of these families; a size beyond is damage or an attack, and would only end
# in an allocation that cannot be had.
_MAX_HIDDEN = 1 << 17
_MAX_INTERMEDIATE = 1 << 20
_MAX_LAYERS = 1024
_MAX_HEADS = 4096
_MAX_HEAD_DIM = 1024
_MAX_VOCAB = 1 << 22
_MAX_WINDOW = 1 << 62
_MAX_SOFT_CAP = 1e6

# Kernels read rows in vectors of 16.
_SIZE_MULTIPLE = 16

_DTYPES = ("float32", "float16", "bfloat16")
_HF_ACTIVATIONS: dict[Activation, tuple[str, tuple[str, ...]]] = {
    "silu": ("hidden_act", ("silu", "swish")),
    "gelu_tanh": ("hidden_activation", ("gelu_pytorch_tanh",)),
}

# Tokens that end a turn in chat models whose GGUF metadata names only the end of the document.
_END_OF_TURN_TOKENS = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>")


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and constants of a decoder; every field is checked by the two constructors below.

    max_position: trained context length in tokens. dtype: what the checkpoint stores, one of "float32", "float16",
    "bfloat16", "quantized". bos_token_id and eos_token_ids lie within the vocabulary.

    The fields with defaults are what Llama does not have. qkv_bias, qk_norm, post_norms, activation, norm_offset: see
    `families.Family`. embedding_scale: factor of the embeddings. attention_scale: factor of the scores, None for
    1/sqrt(head_dim). attention_soft_cap, logit_soft_cap: c in c tanh(x / c), of scores and of logits. windows: tokens
    that each layer sees back, itself included, None for all; () where no layer has a window.
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_q_heads: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_embeddings: bool
    dtype: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    qkv_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    activation: Activation = "silu"
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    attention_scale: float | None = None
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    windows: tuple[int | None, ...] = ()

    @staticmethod
    def from_hf(config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> ModelConfig:
        """The model of a Hugging Face config.json; generation_config.json says which ids end a text.

        Raises CheckpointError for a missing or senseless value and UnsupportedModelError for a feature that
        llmcl does not have; both name the key.
        """
        model_type = Reader(config, "config.json").text("model_type")
        if model_type not in FAMILIES:
            unsupported(f"the architecture {model_type!r}", f"it supports {', '.join(FAMILIES)}")
        family = FAMILIES[model_type]
        read = Reader({**family.defaults, **config}, "config.json")
        _refuse_hf_features(read, family)

        hidden_size = read.size("hidden_size", _MAX_HIDDEN)
        n_layers = read.size("num_hidden_layers", _MAX_LAYERS)
        n_q_heads = read.size("num_attention_heads", _MAX_HEADS)
        default_head_dim = max(hidden_size // n_q_heads, 1)
        max_position = read.size("max_position_embeddings", MAX_POSITION, default=2048)
        vocab_size = read.size("vocab_size", _MAX_VOCAB)
        rope_theta, rope_scaling = rope_from_hf(read, max_position)
        generation = Reader(generation_config or {}, "generation_config.json")
        eos_token_ids = generation.token_ids("eos_token_id", vocab_size)
        bos_token_ids = read.token_ids("bos_token_id", vocab_size)
        bos_token_ids = bos_token_ids or generation.token_ids("bos_token_id", vocab_size)
        attention_scale = None
        if family.soft_caps:
            attention_scale = read.number("query_pre_attn_scalar", 0.0, _MAX_INTERMEDIATE) ** -0.5
        return _checked(
            ModelConfig(
                architecture=model_type,
                hidden_size=hidden_size,
                intermediate_size=read.size("intermediate_size", _MAX_INTERMEDIATE),
                n_layers=n_layers,
                n_q_heads=n_q_heads,
                n_kv_heads=read.size("num_key_value_heads", _MAX_HEADS, default=n_q_heads),
                head_dim=read.size("head_dim", _MAX_HEAD_DIM, default=default_head_dim),
                vocab_size=vocab_size,
                max_position=max_position,
                rms_norm_eps=read.number("rms_norm_eps", 0.0, 1.0, default=1e-6),
                rope_theta=rope_theta,
                rope_scaling=rope_scaling,
                tie_embeddings=read.flag("tie_word_embeddings", default=False),
                dtype=_hf_dtype(read),
                bos_token_id=bos_token_ids[0] if bos_token_ids else None,
                eos_token_ids=eos_token_ids or read.token_ids("eos_token_id", vocab_size),
                norm_offset=family.norm_offset,
                attention_scale=attention_scale,
                windows=_hf_windows(read, family, n_layers, max_position),
                **_family_fields(read, family, "", hidden_size),
            ),
            "config.json",
        )

    @staticmethod
    def from_gguf(
        metadata: Mapping[str, Any],
        tensor_names: Collection[str],
        rope_factors: Sequence[float] | None = None,
    ) -> ModelConfig:
        """The model described by GGUF metadata.

        tensor_names: names as the file has them (an absent output.weight means tied embeddings).
        rope_factors: the values of the tensor rope_freqs.weight, float [head_dim / 2], where there is one.
        `dtype` is "quantized"; who knows the tensors' formats replaces it. Raises as `from_hf` does.
        """
        arch = Reader(metadata, "GGUF metadata").text("general.architecture")
        if arch not in GGUF_ARCHITECTURES:
            unsupported(f"the GGUF architecture {arch!r}", f"it supports {', '.join(GGUF_ARCHITECTURES)}")
        family = FAMILIES[arch]
        defaults = {f"{arch}.{key}": family.defaults[key] for key in _GGUF_SOFT_CAPS if key in family.defaults}
        read = Reader({**defaults, **metadata}, "GGUF metadata")
        if (n_experts := read.size(f"{arch}.expert_count", _MAX_HEADS, default=0, minimum=0)) > 1:
            unsupported(f"mixture of experts ({arch}.expert_count {n_experts})")

        hidden_size = read.size(f"{arch}.embedding_length", _MAX_HIDDEN)
        n_layers = read.size(f"{arch}.block_count", _MAX_LAYERS)
        n_q_heads = read.size(f"{arch}.attention.head_count", _MAX_HEADS)
        default_head_dim = max(hidden_size // n_q_heads, 1)
        head_dim = read.size(f"{arch}.attention.key_length", _MAX_HEAD_DIM, default=default_head_dim)
        value_dim = read.size(f"{arch}.attention.value_length", _MAX_HEAD_DIM, default=head_dim)
        if value_dim != head_dim:
            unsupported(f"values of another size than keys (value_length {value_dim}, key_length {head_dim})")
        rope_dim = read.size(f"{arch}.rope.dimension_count", _MAX_HEAD_DIM, default=head_dim)
        if rope_dim != head_dim:
            unsupported(f"partial rotary embeddings ({arch}.rope.dimension_count {rope_dim} of {head_dim})")
        max_position = read.size(f"{arch}.context_length", MAX_POSITION)

        tokens = read.get("tokenizer.ggml.tokens", [])
        if not isinstance(tokens, list) or (tokens and not isinstance(tokens[0], str)):
            read.fail("tokenizer.ggml.tokens", tokens, "a list of strings")
        vocab_size = read.size(f"{arch}.vocab_size", _MAX_VOCAB, default=len(tokens) or None)
        if len(tokens) > vocab_size:
            raise CheckpointError(
                f"GGUF metadata: tokenizer.ggml.tokens has {len(tokens)} tokens, but {arch}.vocab_size is "
                f"{vocab_size}. The file is inconsistent; convert it again."
            )
        attention_scale = None
        if family.soft_caps and n_layers == _GEMMA2_27B_LAYERS:
            # The format has no key for query_pre_attn_scalar; it is head_dim in all sizes but this one (as llama.cpp).
            attention_scale = (hidden_size / n_q_heads) ** -0.5
        return _checked(
            ModelConfig(
                architecture=arch,
                hidden_size=hidden_size,
                intermediate_size=read.size(f"{arch}.feed_forward_length", _MAX_INTERMEDIATE),
                n_layers=n_layers,
                n_q_heads=n_q_heads,
                n_kv_heads=read.size(f"{arch}.attention.head_count_kv", _MAX_HEADS, default=n_q_heads),
                head_dim=head_dim,
                vocab_size=vocab_size,
                max_position=max_position,
                rms_norm_eps=read.number(f"{arch}.attention.layer_norm_rms_epsilon", 0.0, 1.0),
                rope_theta=read.number(f"{arch}.rope.freq_base", 1.0, 1e15, default=10000.0),
                rope_scaling=scaling_from_gguf(read, arch, rope_factors, head_dim),
                tie_embeddings="output.weight" not in tensor_names,
                dtype="quantized",
                bos_token_id=next(iter(read.token_ids("tokenizer.ggml.bos_token_id", vocab_size)), None),
                eos_token_ids=_gguf_eos_token_ids(read, tokens, vocab_size),
                attention_scale=attention_scale,
                windows=_gguf_windows(read, arch, family, n_layers, max_position),
                **_family_fields(read, family, f"{arch}.", hidden_size),
            ),
            "GGUF metadata",
        )

    def inv_freq(self) -> np.ndarray:
        """Rotary frequencies in radians per position, float32 [head_dim / 2]."""
        return inverse_frequencies(self.head_dim, self.rope_theta, self.rope_scaling)

    def window(self, layer: int) -> int | None:
        """Tokens that a layer's queries see back, themselves included; None for all."""
        return self.windows[layer] if self.windows else None

    def n_parameters(self) -> int:
        """Number of weights, embeddings included; tied embeddings count once."""
        q_size, kv_size = self.n_q_heads * self.head_dim, self.n_kv_heads * self.head_dim
        attention = self.hidden_size * (2 * q_size + 2 * kv_size)
        attention += (q_size + 2 * kv_size) * self.qkv_bias + 2 * self.head_dim * self.qk_norm
        mlp = 3 * self.hidden_size * self.intermediate_size
        layer = attention + mlp + (4 if self.post_norms else 2) * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return embeddings + self.n_layers * layer + self.hidden_size


_GGUF_SOFT_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
_GEMMA2_27B_LAYERS = 46


def _family_fields(read: Reader, family: Family, prefix: str, hidden_size: int) -> dict[str, Any]:
    """The fields that follow from the family, and those that both formats state under the same key."""

    def soft_cap(key: str) -> float | None:
        if not family.soft_caps or read.get(prefix + key) is None:
            return None
        return read.number(prefix + key, 0.0, _MAX_SOFT_CAP)

    return {
        "qkv_bias": family.qkv_bias,
        "qk_norm": family.qk_norm,
        "post_norms": family.post_norms,
        "activation": family.activation,
        "embedding_scale": float(np.sqrt(np.float32(hidden_size))) if family.scaled_embedding else 1.0,
        "attention_soft_cap": soft_cap("attn_logit_softcapping"),
        "logit_soft_cap": soft_cap("final_logit_softcapping"),
    }


def _hf_windows(read: Reader, family: Family, n_layers: int, max_position: int) -> tuple[int | None, ...]:
    """The window of each layer; () where no layer has one."""
    window = None
    if read.get("sliding_window") is not None:
        window = read.size("sliding_window", _MAX_WINDOW)
    if family.windows == "none" and window is not None and window < max_position:
        unsupported(
            f"sliding-window attention in this architecture (sliding_window {window} below max_position_embeddings "
            f"{max_position})",
            "use a version of the model without a window",
        )
    if family.windows == "late" and not read.flag("use_sliding_window", default=False):
        window = None
    first = read.size("max_window_layers", _MAX_LAYERS, default=0, minimum=0) if family.windows == "late" else 0
    layer_types = read.get("layer_types")
    if layer_types is None:
        return _windows(family.windows, window, n_layers, first)
    if not isinstance(layer_types, list):
        read.fail("layer_types", layer_types, "a list")
    for layer_type in layer_types:
        if layer_type not in ("full_attention", "sliding_attention"):
            unsupported(f"layers of type {layer_type!r} (layer_types)", "it supports full and sliding attention")
    if not layer_types:
        return _windows(family.windows, window, n_layers, first)
    if "sliding_attention" not in layer_types:
        return ()
    if family.windows == "none":
        unsupported("layers of type 'sliding_attention' (layer_types) in this architecture")
    if len(layer_types) != n_layers:
        read.fail("layer_types", layer_types, f"the types of {n_layers} layers")
    if window is None:
        read.fail("sliding_window", None, "the window of the layers of type sliding_attention")
    return tuple(window if layer_type == "sliding_attention" else None for layer_type in layer_types)


def _gguf_windows(read: Reader, arch: str, family: Family, n_layers: int, max_position: int) -> tuple[int | None, ...]:
    key = f"{arch}.attention.sliding_window"
    default = family.defaults.get("sliding_window", 0) if family.windows == "even" else 0
    window = read.size(key, _MAX_WINDOW, default=default, minimum=0) or None
    if family.windows == "late":
        if window is not None and window < max_position:
            unsupported(f"sliding-window attention in a GGUF file of this architecture ({key} {window})")
        return ()
    return _windows("all" if family.windows == "none" else family.windows, window, n_layers, 0)


def _windows(pattern: WindowPattern, window: int | None, n_layers: int, first: int) -> tuple[int | None, ...]:
    """first: the first layer with a window, for the pattern "late"."""
    if window is None or pattern == "none":
        return ()
    layers = {"all": range(n_layers), "even": range(0, n_layers, 2), "late": range(first, n_layers)}[pattern]
    return tuple(window if layer in layers else None for layer in range(n_layers))


def _checked(config: ModelConfig, source: str) -> ModelConfig:
    """Refuses sizes that each make sense but not together, or that the kernels cannot handle."""
    if config.n_q_heads % config.n_kv_heads:
        raise CheckpointError(
            f"{source}: {config.n_q_heads} attention heads cannot share {config.n_kv_heads} key/value heads "
            "evenly. The checkpoint is damaged or not what it claims to be; fetch or convert it again."
        )
    for name in ("hidden_size", "intermediate_size", "head_dim"):
        if (value := getattr(config, name)) % _SIZE_MULTIPLE:
            unsupported(f"{name} {value}", f"it must be a multiple of {_SIZE_MULTIPLE}")
    # Together with the limits above this keeps every byte count far from 2**63.
    if config.n_q_heads * config.head_dim > _MAX_INTERMEDIATE:
        unsupported(
            f"{config.n_q_heads} heads of {config.head_dim}",
            f"their product must be at most {_MAX_INTERMEDIATE}",
        )
    return config


def _refuse_hf_features(read: Reader, family: Family) -> None:
    """Raises UnsupportedModelError for what config.json can ask of this architecture and llmcl does not compute."""
    architectures = read.get("architectures", [])
    if architectures and architectures != [family.hf_class]:
        unsupported(f"the architecture {architectures}", f"it supports {family.hf_class}")
    for key in ("attention_bias", "mlp_bias"):
        if read.flag(key, default=False):
            unsupported(f"projections with a bias ({key} true)")
    if read.get("use_bidirectional_attention", False) is not False:
        unsupported("attention to later tokens (use_bidirectional_attention)")
    key, known = _HF_ACTIVATIONS[family.activation]
    if (activation := read.text(key, default=known[0])) not in known:
        unsupported(f"the activation {activation!r} ({key})", f"it supports {known[0]}")
    if (quantization := read.table("quantization_config")) is not None:
        method = quantization.get("quant_method", "unknown")
        unsupported(
            f"safetensors quantised by {method!r} (quantization_config)",
            "use the original bfloat16 or float16 checkpoint, or a GGUF file",
        )
    for key in ("num_local_experts", "num_experts"):
        if read.get(key, 0) not in (0, 1):
            unsupported(f"mixture of experts ({key} {read.get(key)})")


def _hf_dtype(read: Reader) -> str:
    key = "dtype" if read.get("dtype") is not None else "torch_dtype"
    dtype = read.text(key, default="float32")
    if dtype not in _DTYPES:
        unsupported(f"the dtype {dtype!r} ({key})", f"it supports {', '.join(_DTYPES)}")
    return dtype


def _gguf_eos_token_ids(read: Reader, tokens: list[str], vocab_size: int) -> tuple[int, ...]:
    ids = list(read.token_ids("tokenizer.ggml.eos_token_id", vocab_size))
    ids += read.token_ids("tokenizer.ggml.eot_token_id", vocab_size)
    ids += [tokens.index(text) for text in _END_OF_TURN_TOKENS if text in tokens]
    return tuple(dict.fromkeys(ids))
