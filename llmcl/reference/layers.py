"""The ops of a layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from llmcl.reference.arrays import Array, Float64, wide


def embed(table: Array, token_ids: Sequence[int] | Array) -> Float64:
    """Gathers embedding rows: table [vocab, hidden], token_ids int [n] -> [n, hidden]."""
    return wide(table[np.asarray(token_ids, dtype=np.int64)])


def rms_norm(x: Array, weight: Array, eps: float) -> Float64:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis: x [n, hidden], weight [hidden] -> as x."""
    x = wide(x)
    normed: Float64 = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    return normed * wide(weight)


def layer_norm(x: Array, weight: Array, bias: Array, eps: float) -> Float64:
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last axis: x [n, hidden] -> as x."""
    x = wide(x)
    x = x - np.mean(x, axis=-1, keepdims=True)
    normed: Float64 = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    return normed * wide(weight) + wide(bias)


def bias_gelu(x: Array, bias: Array, *, tanh: bool) -> Float64:
    """gelu(x + bias), by the error function or by its tanh approximation (see `geglu`): x [n, columns] -> as x."""
    x = wide(x) + wide(bias)
    if tanh:
        return geglu(x, np.ones_like(x))
    erf = np.vectorize(math.erf, otypes=[np.float64])
    gelu: Float64 = 0.5 * x * (1.0 + wide(erf(x / math.sqrt(2.0))))
    return gelu


def add_positions(x: Array, positions: Array, types: Array, position: int, second: int) -> Float64:
    """x[t] + positions[p] + types[p >= second], p = position + t: x [n, columns] -> as x."""
    places = position + np.arange(len(x))
    added: Float64 = wide(x) + wide(positions)[places] + wide(types)[(places >= second).astype(int)]
    return added


def pool(rows: Array, pooling: str) -> Float64:
    """A text's row: the mean, the first ("cls") or the last of its rows [n, hidden] -> [hidden]."""
    rows = wide(rows)
    pooled: Float64 = {"mean": rows.mean(axis=0), "cls": rows[0], "last": rows[-1]}[pooling]
    return pooled


def linear(x: Array, weight: Array) -> Float64:
    """x weight^T: x [n, k], weight [rows, k] (row-major, as checkpoints store it) -> [n, rows]."""
    return wide(x) @ wide(weight).T


def geglu(gate: Array, up: Array) -> Float64:
    """gelu(gate) * up with gelu(g) = g (1 + tanh(sqrt(2/pi) (g + 0.044715 g^3))) / 2: gate, up [n, f] -> [n, f]."""
    gate = wide(gate)
    gelu: Float64 = 0.5 * gate * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (gate + 0.044715 * gate**3)))
    return gelu * wide(up)


def soft_cap(x: Array, cap: float) -> Float64:
    """cap tanh(x / cap), for an array with any shape."""
    capped: Float64 = cap * np.tanh(wide(x) / cap)
    return capped


def qkv_adjust(
    qkv: Array,
    bias: Array | None,
    head_norms: Array | None,
    n_q_heads: int,
    n_kv_heads: int,
    eps: float,
    *,
    value_norms: bool = False,
    rotation: tuple[Array, Array] | None = None,
) -> Float64:
    """qkv [n, n_q_heads + 2 n_kv_heads, head_dim] plus bias [heads, head_dim], then its query and key heads normalised.

    head_norms [2, head_dim]: the norm weights of query heads and of key heads. value_norms: value heads, too, without
    weights. rotation: cosines and sines [n, head_dim / 2], by which query and key heads are rotated before.
    """
    qkv = wide(qkv) if bias is None else wide(qkv) + wide(bias)
    if head_norms is None:
        return qkv
    end = n_q_heads + n_kv_heads
    if rotation is not None:
        qkv = np.concatenate([rope(qkv[:, :end], *rotation), qkv[:, end:]], axis=1)
    q = rms_norm(qkv[:, :n_q_heads], head_norms[0], eps)
    k = rms_norm(qkv[:, n_q_heads:end], head_norms[1], eps)
    v = rms_norm(qkv[:, end:], np.ones(qkv.shape[-1]), eps) if value_norms else qkv[:, end:]
    return np.concatenate([q, k, v], axis=1)


def swiglu(gate: Array, up: Array) -> Float64:
    """silu(gate) * up with silu(g) = g / (1 + exp(-g)): gate, up [n, f] -> [n, f]."""
    gate = wide(gate)
    # exp only gets negative numbers, so neither sign overflows.
    decay = np.exp(-np.abs(gate))
    sigmoid = np.where(gate >= 0, 1.0, decay) / (1.0 + decay)
    return gate * sigmoid * wide(up)


def clamped_swiglu(gate: Array, up: Array) -> Float64:
    """g sigmoid(1.702 g) (u + 1), with g = min(gate, 7) and u = up clipped to -7..7, as in gpt-oss: [n, f] each."""
    gate, up = np.minimum(wide(gate), 7.0), np.clip(wide(up), -7.0, 7.0)
    return swiglu(1.702 * gate, up + 1.0) / 1.702


def squared_relu(x: Array) -> Float64:
    """max(x, 0)^2, any shape."""
    return np.square(np.maximum(wide(x), 0.0))


GATES: dict[str, Callable[[Array, Array], Float64]] = {
    "swiglu": swiglu,
    "geglu": geglu,
    "clamped_swiglu": clamped_swiglu,
    "relu2": lambda gate, up: squared_relu(up),  # without a gate
}


def biased_gate(gate: Array, up: Array, bias: Array, kind: str) -> Float64:
    """The gate activation after adding bias [2, f] to `gate` and `up` [n, f]; kind: "swiglu" or "geglu" -> [n, f]."""
    return GATES[kind](wide(gate) + wide(bias[0]), wide(up) + wide(bias[1]))


def add_bias(x: Array, bias: Array) -> Float64:
    """x [n, columns] + bias [columns]."""
    return wide(x) + wide(bias)


def lora(x: Array, a: Array, b: Array, scales: Array) -> Float64:
    """scales[t] b a x[t]: x [n, k], a [rank, k], b [columns, rank], scales [n] -> [n, columns]."""
    change: Float64 = wide(scales)[:, np.newaxis] * linear(linear(x, a), b)
    return change


def layer_inputs(x: Array, norm: Array, embedded: Array, eps: float) -> Float64:
    """(rms_norm(x) + sqrt(size) embedded) / sqrt(2): x and embedded [n, layers, size], norm [size]."""
    both: Float64 = (rms_norm(x, norm, eps) + np.sqrt(x.shape[-1]) * wide(embedded)) / np.sqrt(2.0)
    return both


def gate_inputs(gate: Array, x: Array, kind: str) -> Float64:
    """The activation of gate [n, size] times x [n, size]; kind: a name in GATES."""
    return GATES[kind](gate, x)


def xielu(x: Array, alpha_p: float, alpha_n: float, beta: float, eps: float) -> Float64:
    """xIELU of an array with any shape, with beta added to alpha_n."""
    x = wide(x)
    below = (float(alpha_n) + float(beta)) * (np.expm1(np.minimum(x, float(eps))) - x)
    activated: Float64 = np.where(x > 0, float(alpha_p) * x * x, below) + float(beta) * x
    return activated


def center_rows(x: Array) -> Float64:
    """Subtracts the mean of each row: x [n, columns] -> [n, columns]."""
    centered: Float64 = wide(x) - wide(x).mean(axis=-1, keepdims=True)
    return centered


def mean_rows(x: Array, n_rows: int) -> Float64:
    """Averages consecutive rows: x [n_rows n, columns] -> [n, columns]."""
    means: Float64 = wide(x).reshape(-1, n_rows, x.shape[-1]).mean(axis=1)
    return means


def scale_rows(x: Array, factor: Array) -> Float64:
    """x [n, columns] times factor [1]."""
    return wide(x) * wide(factor)


def rope_table(
    positions: Sequence[int] | Array, inv_freq: Array, factors: Array | None = None
) -> tuple[Float64, Float64]:
    """(cos, sin) for the rotary angles: positions int [n], inv_freq float32 [half] -> each [n, half].

    factors float32 [half]: multiply cosines and sines.

    half is head_dim/2. The angle is the float32 product of the position and the float32 frequency, like in
    transformers. At position 100000 the rounding is worth 4e-3 radians, so a twin with exact angles would reject a
    correct kernel.
    """
    angle = wide(np.asarray(positions).astype(np.float32)[:, None] * np.asarray(inv_freq, dtype=np.float32)[None, :])
    scale = 1.0 if factors is None else wide(factors)
    return scale * np.cos(angle), scale * np.sin(angle)


def rope_axes(positions: Array, axes: Array, inv_freq: Array, factors: Array | None = None) -> tuple[Float64, Float64]:
    """Like `rope_table`, with positions int [n, n_axes]. axes int [half]: whose position rotates each pair."""
    of_axes = [rope_table(positions[:, axis], inv_freq, factors) for axis in range(positions.shape[1])]
    cos, sin = np.stack(of_axes, axis=1)
    pairs = np.arange(len(axes))
    return cos[axes, :, pairs].T, sin[axes, :, pairs].T


def rope(x: Array, cos: Array, sin: Array) -> Float64:
    """Rotates the pairs (i, i + head_dim/2) in every head: x [n, heads, head_dim], cos, sin [n, head_dim/2].

    out[i] = x[i] cos[i] - x[i + half] sin[i]; out[i + half] = x[i + half] cos[i] + x[i] sin[i].
    """
    x = wide(x)
    half = x.shape[-1] // 2
    low, high = x[..., :half], x[..., half:]
    c, s = wide(cos)[:, None, :], wide(sin)[:, None, :]
    return np.concatenate([low * c - high * s, high * c + low * s], axis=-1)
