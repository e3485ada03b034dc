"""Rotary frequencies: how checkpoints state them, and their values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from llmcl.errors import CheckpointError, shown
from llmcl.models.config.limits import MAX_POSITION
from llmcl.models.config.reader import Reader, unsupported

# Keeps frequencies finite in float32.
_MIN_ROPE_FACTOR, _MAX_ROPE_FACTOR = 1e-6, 1e6


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


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> np.ndarray:
    """Rotary frequencies in radians per position, float32 [head_dim / 2].

    Float32 arithmetic in the order of operations of transformers' `LlamaRotaryEmbedding`, because the last bit is
    multiplied by the position.
    """
    f32 = np.float32
    exponent = np.arange(0, head_dim, 2, dtype=f32) / f32(head_dim)
    # Rounded once from float64: the float32 power of C libraries differs from machine to machine.
    power = np.power(np.float64(theta), exponent.astype(np.float64)).astype(f32)
    inv_freq = f32(1.0) / power
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


def rope_from_hf(read: Reader, max_position: int) -> tuple[float, RopeScaling | None]:
    """(theta, scaling) from `rope_parameters` (transformers 5) or from `rope_theta` and `rope_scaling` (before)."""
    theta = read.number("rope_theta", 1.0, 1e15, default=10000.0)
    rope = read.table("rope_parameters") or read.table("rope_scaling")
    if read.number("partial_rotary_factor", 0.0, 1e15, default=1.0) != 1.0:
        unsupported(f"partial rotary embeddings (partial_rotary_factor {read.get('partial_rotary_factor')})")
    if rope is None:
        return theta, None
    theta = rope.number("rope_theta", 1.0, 1e15, default=theta)
    if rope.number("partial_rotary_factor", 0.0, 1e15, default=1.0) != 1.0:
        unsupported(f"partial rotary embeddings (partial_rotary_factor {rope.get('partial_rotary_factor')})")
    if any(isinstance(value, Mapping) for value in rope.values.values()):
        unsupported("rotary settings that differ between layers")
    kind = rope.text("rope_type", default=rope.text("type", default="default"))
    if kind == "default":
        return theta, None
    if kind not in ("linear", "llama3"):
        unsupported(f"the rotary scaling {shown(kind)}", "it supports default, linear and llama3")
    factor = rope.number("factor", _MIN_ROPE_FACTOR, _MAX_ROPE_FACTOR)
    if kind == "linear":
        return theta, RopeScaling("linear", factor)
    low = rope.number("low_freq_factor", _MIN_ROPE_FACTOR, _MAX_ROPE_FACTOR)
    return theta, RopeScaling(
        "llama3",
        factor,
        low_freq_factor=low,
        high_freq_factor=rope.number("high_freq_factor", low, _MAX_ROPE_FACTOR),
        original_max_position=rope.size("original_max_position_embeddings", MAX_POSITION, default=max_position),
    )


def scaling_from_gguf(
    read: Reader, architecture: str, rope_factors: Sequence[float] | None, head_dim: int
) -> RopeScaling | None:
    kind = read.text(f"{architecture}.rope.scaling.type", default="none")
    if kind not in ("none", "linear"):
        unsupported(
            f"the rotary scaling {shown(kind)} ({architecture}.rope.scaling.type)", "it supports none and linear"
        )
    # Files of 2023 have only the older key.
    old_factor = read.number(f"{architecture}.rope.scale_linear", _MIN_ROPE_FACTOR, _MAX_ROPE_FACTOR, default=1.0)
    factor = (
        read.number(f"{architecture}.rope.scaling.factor", _MIN_ROPE_FACTOR, _MAX_ROPE_FACTOR, default=1.0)
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
                "rope_freqs.weight: a value is not finite and positive, or absurd; fetch or convert the file again."
            )
        return RopeScaling("factors", factor, factors=tuple(float(value) for value in rope_factors))
    return None if factor == 1.0 else RopeScaling("linear", factor)
