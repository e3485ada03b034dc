"""What a model is made of: sizes and constants, read from config.json or from GGUF metadata.

Everything that llmcl does not compute exactly is refused here, by the name of the feature, so that no other
module has to ask whether a checkpoint means what the layer stack does.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from llmcl.errors import CheckpointError, UnsupportedModelError

# Far above any published model of these families; a size beyond is damage or an attack, and would only end
# in an allocation that cannot be had.
_MAX_HIDDEN = 1 << 17
_MAX_INTERMEDIATE = 1 << 20
_MAX_LAYERS = 1024
_MAX_HEADS = 4096
_MAX_HEAD_DIM = 1024
_MAX_VOCAB = 1 << 22
_MAX_POSITION = 1 << 27
# Keeps frequencies finite in float32.
_MIN_ROPE_FACTOR, _MAX_ROPE_FACTOR = 1e-6, 1e6

# Kernels read rows in vectors of 16.
_SIZE_MULTIPLE = 16

_HF_ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}
_DTYPES = ("float32", "float16", "bfloat16")

# Tokens that end a turn in chat models whose GGUF metadata names only the end of the document.
_END_OF_TURN_TOKENS = ("<|eot_id|>", "<|im_end|>")


@dataclass(frozen=True)
class RopeScaling:
    """How the rotary frequencies differ from theta^(-2i/head_dim).

    kind: "linear" divides all of them by `factor`; "llama3" divides the low ones and blends in between;
    "factors" divides frequency i by `factors[i]`, then by `factor` (GGUF's tensor rope_freqs.weight).
    """

    kind: str
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    factors: tuple[float, ...] | None = None


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and constants of a Llama-family decoder; every field is checked by the two constructors below.

    max_position: trained context length in tokens. dtype: what the checkpoint stores, one of "float32",
    "float16", "bfloat16", "quantized". bos_token_id and eos_token_ids lie within the vocabulary.
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

    @staticmethod
    def from_hf(config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> ModelConfig:
        """The model of a Hugging Face config.json; generation_config.json says which ids end a text.

        Raises CheckpointError for a missing or senseless value and UnsupportedModelError for a feature that
        llmcl does not have; both name the key.
        """
        read = _Reader(config, "config.json")
        model_type = read.text("model_type")
        if model_type not in _HF_ARCHITECTURES:
            _unsupported(f"the architecture {model_type!r}", f"it supports {', '.join(_HF_ARCHITECTURES)}")
        _refuse_hf_features(read, model_type)

        hidden_size = read.size("hidden_size", _MAX_HIDDEN)
        n_q_heads = read.size("num_attention_heads", _MAX_HEADS)
        default_head_dim = max(hidden_size // n_q_heads, 1)
        max_position = read.size("max_position_embeddings", _MAX_POSITION, default=2048)
        vocab_size = read.size("vocab_size", _MAX_VOCAB)
        window = None  # a null means no window; for mistral, an absent key means the format's default
        if read.get("sliding_window") is not None or (model_type == "mistral" and "sliding_window" not in config):
            window = read.size("sliding_window", 1 << 62, default=4096)
        if window is not None and window < max_position:
            _unsupported(
                f"sliding-window attention (sliding_window {window} below max_position_embeddings {max_position})",
                "use a version of the model without a window",
            )
        rope_theta, rope_scaling = _hf_rope(read, max_position)
        generation = _Reader(generation_config or {}, "generation_config.json")
        eos_token_ids = generation.token_ids("eos_token_id", vocab_size)
        bos_token_ids = read.token_ids("bos_token_id", vocab_size)
        bos_token_ids = bos_token_ids or generation.token_ids("bos_token_id", vocab_size)
        return _checked(
            ModelConfig(
                architecture=model_type,
                hidden_size=hidden_size,
                intermediate_size=read.size("intermediate_size", _MAX_INTERMEDIATE),
                n_layers=read.size("num_hidden_layers", _MAX_LAYERS),
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
        read = _Reader(metadata, "GGUF metadata")
        architecture = read.text("general.architecture")
        if architecture != "llama":
            _unsupported(f"the GGUF architecture {architecture!r}", "it supports llama")
        if (n_experts := read.size("llama.expert_count", _MAX_HEADS, default=0, minimum=0)) > 1:
            _unsupported(f"mixture of experts (llama.expert_count {n_experts})")

        hidden_size = read.size("llama.embedding_length", _MAX_HIDDEN)
        n_q_heads = read.size("llama.attention.head_count", _MAX_HEADS)
        head_dim = read.size("llama.attention.key_length", _MAX_HEAD_DIM, default=max(hidden_size // n_q_heads, 1))
        if (value_dim := read.size("llama.attention.value_length", _MAX_HEAD_DIM, default=head_dim)) != head_dim:
            _unsupported(f"values of another size than keys (value_length {value_dim}, key_length {head_dim})")
        if (rope_dim := read.size("llama.rope.dimension_count", _MAX_HEAD_DIM, default=head_dim)) != head_dim:
            _unsupported(f"partial rotary embeddings (llama.rope.dimension_count {rope_dim} of {head_dim})")
        max_position = read.size("llama.context_length", _MAX_POSITION)
        window = read.size("llama.attention.sliding_window", 1 << 62, default=0, minimum=0)
        if 0 < window < max_position:
            _unsupported(f"sliding-window attention (llama.attention.sliding_window {window})")

        tokens = read.get("tokenizer.ggml.tokens", [])
        if not isinstance(tokens, list) or (tokens and not isinstance(tokens[0], str)):
            read.fail("tokenizer.ggml.tokens", tokens, "a list of strings")
        vocab_size = read.size("llama.vocab_size", _MAX_VOCAB, default=len(tokens) or None)
        if len(tokens) > vocab_size:
            raise CheckpointError(
                f"GGUF metadata: tokenizer.ggml.tokens has {len(tokens)} tokens, but llama.vocab_size is "
                f"{vocab_size}. The file is inconsistent; convert it again."
            )
        return _checked(
            ModelConfig(
                architecture="llama",
                hidden_size=hidden_size,
                intermediate_size=read.size("llama.feed_forward_length", _MAX_INTERMEDIATE),
                n_layers=read.size("llama.block_count", _MAX_LAYERS),
                n_q_heads=n_q_heads,
                n_kv_heads=read.size("llama.attention.head_count_kv", _MAX_HEADS, default=n_q_heads),
                head_dim=head_dim,
                vocab_size=vocab_size,
                max_position=max_position,
                rms_norm_eps=read.number("llama.attention.layer_norm_rms_epsilon", 0.0, 1.0),
                rope_theta=read.number("llama.rope.freq_base", 1.0, 1e15, default=10000.0),
                rope_scaling=_gguf_rope_scaling(read, rope_factors, head_dim),
                tie_embeddings="output.weight" not in tensor_names,
                dtype="quantized",
                bos_token_id=next(iter(read.token_ids("tokenizer.ggml.bos_token_id", vocab_size)), None),
                eos_token_ids=_gguf_eos_token_ids(read, tokens, vocab_size),
            ),
            "GGUF metadata",
        )

    def inv_freq(self) -> np.ndarray:
        """Rotary frequencies in radians per position, float32 [head_dim / 2].

        Float32 arithmetic in the order of operations of transformers' `LlamaRotaryEmbedding`, because the
        last bit is multiplied by the position.
        """
        f32 = np.float32
        exponent = np.arange(0, self.head_dim, 2, dtype=f32) / f32(self.head_dim)
        # Rounded once from float64: the float32 power of C libraries differs from machine to machine.
        power = np.power(np.float64(self.rope_theta), exponent.astype(np.float64)).astype(f32)
        inv_freq = f32(1.0) / power
        scaling = self.rope_scaling
        if scaling is None:
            return inv_freq
        factor = f32(scaling.factor)
        if scaling.kind == "linear":
            return inv_freq / factor
        if scaling.kind == "factors":
            return inv_freq / np.array(scaling.factors, dtype=f32) / factor
        low = f32(scaling.low_freq_factor)
        low_wavelength = scaling.original_max_position / scaling.low_freq_factor
        high_wavelength = scaling.original_max_position / scaling.high_freq_factor
        # PyTorch computes number / tensor as number * (1 / tensor); the last bit shows it.
        wavelength = f32(2 * math.pi) * (f32(1.0) / inv_freq)
        scaled = np.where(wavelength > f32(low_wavelength), inv_freq / factor, inv_freq)
        blend = f32(scaling.original_max_position) * (f32(1.0) / wavelength) - low
        blend = blend / f32(scaling.high_freq_factor - scaling.low_freq_factor)
        blended = (f32(1.0) - blend) * scaled / factor + blend * scaled
        is_between = (wavelength >= f32(high_wavelength)) & (wavelength <= f32(low_wavelength))
        return np.where(is_between, blended, scaled)

    def n_parameters(self) -> int:
        """Number of weights, embeddings included; tied embeddings count once."""
        q_size, kv_size = self.n_q_heads * self.head_dim, self.n_kv_heads * self.head_dim
        attention = self.hidden_size * (2 * q_size + 2 * kv_size)
        mlp = 3 * self.hidden_size * self.intermediate_size
        layer = attention + mlp + 2 * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return embeddings + self.n_layers * layer + self.hidden_size


class _Reader:
    """Typed access to the values of one JSON object or metadata table; every failure names the key and the "
    "file."""

    def __init__(self, values: Mapping[str, Any], source: str):
        if not isinstance(values, Mapping):
            raise CheckpointError(f"{source}: it holds {type(values).__name__}, expected an object with named values.")
        self.values = values
        self.source = source

    def get(self, key: str, default: Any = None) -> Any:
        """The value as it is; a null counts as absent."""
        value = self.values.get(key)
        return default if value is None else value

    def fail(self, key: str, value: object, expected: str) -> NoReturn:
        shown = repr(value)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        raise CheckpointError(
            f"{self.source}: {key} is {shown}, expected {expected}. The checkpoint is damaged or not what it "
            "claims to be; fetch or convert it again."
        )

    def _required(self, key: str, default: Any) -> Any:
        value = self.get(key, default)
        if value is None:
            raise CheckpointError(f"{self.source}: {key} is missing. Without it the model cannot be computed.")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._required(key, default)
        if not isinstance(value, str):
            self.fail(key, value, "a string")
        return value

    def size(self, key: str, maximum: int, default: int | None = None, minimum: int = 1) -> int:
        value = self._required(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            self.fail(key, value, f"a whole number from {minimum} to {maximum}")
        return value

    def number(self, key: str, above: float, limit: float, default: float | None = None) -> float:
        """A finite number x with above < x <= limit."""
        value = self._required(key, default)
        # Compared before the conversion: float() of an integer of 400 digits raises OverflowError.
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not above < value <= limit:
            self.fail(key, value, f"a number above {above:g} and at most {limit:g}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            self.fail(key, value, "true or false")
        return value

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """One id or a list of ids, each within the vocabulary; () where the key is absent."""
        value = self.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        for token_id in ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
                self.fail(key, value, f"token ids from 0 to {vocab_size - 1}")
        return tuple(dict.fromkeys(ids))

    def table(self, key: str) -> _Reader | None:
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            self.fail(key, value, "an object")
        return _Reader(value, f"{self.source}: {key}")


def _unsupported(feature: str, remedy: str = "") -> NoReturn:
    raise UnsupportedModelError(f"llmcl does not support {feature}" + (f"; {remedy}." if remedy else "."))


def _checked(config: ModelConfig, source: str) -> ModelConfig:
    """Refuses sizes that each make sense but not together, or that the kernels cannot handle."""
    if config.n_q_heads % config.n_kv_heads:
        raise CheckpointError(
            f"{source}: {config.n_q_heads} attention heads cannot share {config.n_kv_heads} key/value heads "
            "evenly. The checkpoint is damaged or not what it claims to be; fetch or convert it again."
        )
    for name in ("hidden_size", "intermediate_size", "head_dim"):
        if (value := getattr(config, name)) % _SIZE_MULTIPLE:
            _unsupported(f"{name} {value}", f"it must be a multiple of {_SIZE_MULTIPLE}")
    # Together with the limits above this keeps every byte count far from 2**63.
    if config.n_q_heads * config.head_dim > _MAX_INTERMEDIATE:
        _unsupported(
            f"{config.n_q_heads} heads of {config.head_dim}",
            f"their product must be at most {_MAX_INTERMEDIATE}",
        )
    return config


def _refuse_hf_features(read: _Reader, model_type: str) -> None:
    """Raises UnsupportedModelError for what config.json can ask of this architecture and llmcl does not "
    "compute."""
    architectures = read.get("architectures", [])
    if architectures and architectures != [_HF_ARCHITECTURES[model_type]]:
        _unsupported(f"the architecture {architectures}", f"it supports {_HF_ARCHITECTURES[model_type]}")
    for key in ("attention_bias", "mlp_bias"):
        if read.flag(key, default=False):
            _unsupported(f"projections with a bias ({key} true)")
    if (activation := read.text("hidden_act", default="silu")) not in ("silu", "swish"):
        _unsupported(f"the activation {activation!r} (hidden_act)", "it supports silu")
    if (quantization := read.table("quantization_config")) is not None:
        method = quantization.get("quant_method", "unknown")
        _unsupported(
            f"safetensors quantised by {method!r} (quantization_config)",
            "use the original bfloat16 or float16 checkpoint, or a GGUF file",
        )
    for key in ("num_local_experts", "num_experts"):
        if read.get(key, 0) not in (0, 1):
            _unsupported(f"mixture of experts ({key} {read.get(key)})")
    layer_types = read.get("layer_types", [])
    if not isinstance(layer_types, list):
        read.fail("layer_types", layer_types, "a list")
    for layer_type in layer_types:
        if layer_type != "full_attention":
            _unsupported(f"layers of type {layer_type!r} (layer_types)", "it supports full_attention")


def _hf_dtype(read: _Reader) -> str:
    key = "dtype" if read.get("dtype") is not None else "torch_dtype"
    dtype = read.text(key, default="float32")
    if dtype not in _DTYPES:
        _unsupported(f"the dtype {dtype!r} ({key})", f"it supports {', '.join(_DTYPES)}")
    return dtype


def _hf_rope(read: _Reader, max_position: int) -> tuple[float, RopeScaling | None]:
    """(theta, scaling) from `rope_parameters` (transformers 5) or from `rope_theta` and `rope_scaling` "
    "(before)."""
    theta = read.number("rope_theta", 1.0, 1e15, default=10000.0)
    rope = read.table("rope_parameters") or read.table("rope_scaling")
    if read.number("partial_rotary_factor", 0.0, 1e15, default=1.0) != 1.0:
        _unsupported(f"partial rotary embeddings (partial_rotary_factor {read.get('partial_rotary_factor')})")
    if rope is None:
        return theta, None
    theta = rope.number("rope_theta", 1.0, 1e15, default=theta)
    if rope.number("partial_rotary_factor", 0.0, 1e15, default=1.0) != 1.0:
        _unsupported(f"partial rotary embeddings (partial_rotary_factor {rope.get('partial_rotary_factor')})")
    if any(isinstance(value, Mapping) for value in rope.values.values()):
        _unsupported("rotary settings that differ between layers")
    kind = rope.text("rope_type", default=rope.text("type", default="default"))
    if kind == "default":
        return theta, None
    if kind not in ("linear", "llama3"):
        _unsupported(f"the rotary scaling {kind!r}", "it supports default, linear and llama3")
    factor = rope.number("factor", _MIN_ROPE_FACTOR, _MAX_ROPE_FACTOR)
    if kind == "linear":
        return theta, RopeScaling("linear", factor)
    low = rope.number("low_freq_factor", _MIN_ROPE_FACTOR, _MAX_ROPE_FACTOR)
    return theta, RopeScaling(
        "llama3",
        factor,
        low_freq_factor=low,
        high_freq_factor=rope.number("high_freq_factor", low, _MAX_ROPE_FACTOR),
        original_max_position=rope.size("original_max_position_embeddings", _MAX_POSITION, default=max_position),
    )


def _gguf_rope_scaling(read: _Reader, rope_factors: Sequence[float] | None, head_dim: int) -> RopeScaling | None:
    kind = read.text("llama.rope.scaling.type", default="none")
    if kind not in ("none", "linear"):
        _unsupported(f"the rotary scaling {kind!r} (llama.rope.scaling.type)", "it supports none and linear")
    # Files of 2023 have only the older key.
    old_factor = read.number("llama.rope.scale_linear", _MIN_ROPE_FACTOR, _MAX_ROPE_FACTOR, default=1.0)
    factor = (
        read.number("llama.rope.scaling.factor", _MIN_ROPE_FACTOR, _MAX_ROPE_FACTOR, default=1.0)
        if kind == "linear"
        else old_factor
    )
    if rope_factors is not None:
        if len(rope_factors) != head_dim // 2:
            raise CheckpointError(
                f"rope_freqs.weight: {len(rope_factors)} values, expected {head_dim // 2} (half of the head dimension)."
            )
        if not all(_MIN_ROPE_FACTOR < value <= _MAX_ROPE_FACTOR for value in rope_factors):
            raise CheckpointError(
                "rope_freqs.weight: a value is not finite and positive, or absurd. The file is damaged."
            )
        return RopeScaling("factors", factor, factors=tuple(float(value) for value in rope_factors))
    return None if factor == 1.0 else RopeScaling("linear", factor)


def _gguf_eos_token_ids(read: _Reader, tokens: list[str], vocab_size: int) -> tuple[int, ...]:
    ids = list(read.token_ids("tokenizer.ggml.eos_token_id", vocab_size))
    ids += read.token_ids("tokenizer.ggml.eot_token_id", vocab_size)
    ids += [tokens.index(text) for text in _END_OF_TURN_TOKENS if text in tokens]
    return tuple(dict.fromkeys(ids))
