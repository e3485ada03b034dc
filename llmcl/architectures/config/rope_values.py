"""Computes rotary frequencies.

Uses float32 arithmetic in the operation order of transformers' `modeling_rope_utils.py`, because positions multiply
even last-bit differences.
"""

from __future__ import annotations

import math

import numpy as np

from llmcl.architectures.config.rope import RopeScaling

_f32 = np.float32


def rotation(head_dim: int, rotary_dim: int, theta: float, scaling: RopeScaling | None, max_context: int) -> np.ndarray:
    """Returns frequencies in radians per position and factors on cosines and sines, float32 [2, head_dim / 2].

    rotary_dim: rotated head dimensions. Later pairs have frequency 0 and factor 1.
    """
    table = np.zeros((2, head_dim // 2), _f32)
    table[1] = 1.0
    table[0, : rotary_dim // 2] = inverse_frequencies(rotary_dim, theta, scaling, max_context)
    if scaling is not None:
        table[1, : rotary_dim // 2] = scaling.amplitude
    return table


def rotation_by_length(head_dim: int, rotary_dim: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    """Returns the rotation up to the original length, and what longer texts need (common/rope_table.cl), float32 [3,
    head_dim / 2].

    For "longrope" the third row is their frequencies. For "dynamic" it is e_i = -2i / (dim - 2): a theta larger by the
    factor x^(dim / (dim - 2)) multiplies frequency i by x^e_i.
    """
    original = scaling.original_max_position
    longer = np.zeros((1, head_dim // 2), _f32)
    if scaling.kind == "longrope":
        longer = rotation(head_dim, rotary_dim, theta, scaling, original + 1)[:1]
    else:
        longer[0, : rotary_dim // 2] = -np.arange(0, rotary_dim, 2) / max(rotary_dim - 2, 1)
    return np.concatenate([rotation(head_dim, rotary_dim, theta, scaling, original), longer])


def inverse_frequencies(dim: int, theta: float, scaling: RopeScaling | None, max_context: int) -> np.ndarray:
    """Returns rotary frequencies in radians per position for texts up to max_context tokens, float32 [dim / 2]."""
    if scaling is None:
        return _f32(1.0) / _powers(dim, theta)
    if scaling.kind == "dynamic":
        excess = scaling.factor * max(max_context / scaling.original_max_position, 1.0) - (scaling.factor - 1.0)
        return _f32(1.0) / _powers(dim, theta * excess ** (dim / max(dim - 2, 1)))
    if scaling.kind == "longrope":
        factors = scaling.long_factors if max_context > scaling.original_max_position else scaling.factors
        divided: np.ndarray = _f32(1.0) / (np.array(factors, _f32) * _powers(dim, theta))
        return divided
    inv_freq: np.ndarray = _f32(1.0) / _powers(dim, theta)
    factor = _f32(scaling.factor)
    if scaling.kind == "linear":
        return inv_freq / factor
    if scaling.kind == "factors":
        return inv_freq / np.array(scaling.factors, _f32) / factor
    if scaling.kind == "yarn":
        return _yarn(dim, theta, scaling)
    assert scaling.kind == "llama3", scaling.kind
    return _llama3(inv_freq, scaling)


def _powers(dim: int, theta: float) -> np.ndarray:
    """Returns theta^(2i/dim), rounded once from float64, because float32 power differs between C libraries."""
    exponent = np.arange(0, dim, 2, dtype=_f32) / _f32(dim)
    return np.power(np.float64(theta), exponent.astype(np.float64)).astype(_f32)


def _llama3(inv_freq: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    factor, low = _f32(scaling.factor), _f32(scaling.low_freq_factor)
    low_wavelength = scaling.original_max_position / scaling.low_freq_factor
    high_wavelength = scaling.original_max_position / scaling.high_freq_factor
    # PyTorch computes number / tensor as number * (1 / tensor). The last bit depends on it.
    wavelength = _f32(2 * math.pi) * (_f32(1.0) / inv_freq)
    scaled = np.where(wavelength > _f32(low_wavelength), inv_freq / factor, inv_freq)
    blend = _f32(scaling.original_max_position) * (_f32(1.0) / wavelength) - low
    blend = blend / _f32(scaling.high_freq_factor - scaling.low_freq_factor)
    blended = (_f32(1.0) - blend) * scaled / factor + blend * scaled
    is_between = (wavelength >= _f32(high_wavelength)) & (wavelength <= _f32(low_wavelength))
    return np.where(is_between, blended, scaled)


def _yarn(dim: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    """Returns YaRN frequencies (Peng et al., "YaRN", 2023)."""
    powers = _powers(dim, theta)

    def pair_that_turns(times: float) -> float:
        """Returns the pair, as a real number, that turns `times` times in the original context."""
        turns = scaling.original_max_position / (times * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(theta))

    low, high = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high = high + 0.001 if low == high else high
    ramp = np.clip((np.arange(dim // 2, dtype=_f32) - _f32(low)) / _f32(high - low), _f32(0.0), _f32(1.0))
    kept = _f32(1.0) - ramp
    inv_freq: np.ndarray = _f32(1.0) / (_f32(scaling.factor) * powers) * (_f32(1.0) - kept) + _f32(1.0) / powers * kept
    return inv_freq
