"""The ops of layers that keep a state of fixed size in place of keys and values."""

from __future__ import annotations

import numpy as np

from llmcl.reference.arrays import Array, Float64, wide
from llmcl.reference.layers import rms_norm, swiglu


def causal_conv(u: Array, weights: Array, state: Array) -> tuple[Float64, Float64]:
    """Each channel's convolution with its last inputs: y[t] = sum_j weights[j] u[t - length + 1 + j].

    u [n, channels], weights [length, channels], state [length - 1, channels]: the inputs before u, 0 before a text
    -> y [n, channels] and the state after u.
    """
    length = len(weights)
    inputs = np.concatenate([wide(state), wide(u)])
    y = sum(wide(weights[j]) * inputs[j : j + len(u)] for j in range(length))
    return np.asarray(y), inputs[len(inputs) - (length - 1) :]


def short_conv(rows: Array, weights: Array, state: Array) -> tuple[Float64, Float64]:
    """c conv(b x): rows [n, 3, channels] of b, c, x; weights, state as of causal_conv -> [n, channels], new state."""
    b, c, x = np.moveaxis(wide(rows), 1, 0)
    y, state = causal_conv(b * x, weights, state)
    return c * y, state


def delta_inputs(
    rows: Array, weights: Array, scalars: Array, state: Array, *, n_k: int, d_k: int
) -> tuple[Float64, Float64, Float64]:
    """Queries, keys and values of the delta rule, and decay and rate of each value head.

    rows [n, 2 n_k d_k + 2 n_v d_v + 2 n_v]: q, k, v, gates, b, a; weights and state as of causal_conv; scalars
    [2, n_v]: A, below 0, and the bias of a -> [n, 2 n_k d_k + n_v d_v]; [n, n_v, 2]; new state.
    """
    channels, n_v = weights.shape[1], scalars.shape[1]
    y, state = causal_conv(rows[:, :channels], weights, state)
    y = swiglu(y, np.ones_like(y))
    heads = y[:, : 2 * n_k * d_k].reshape(len(y), 2, n_k, d_k)
    heads = heads / np.sqrt(np.sum(heads * heads, axis=-1, keepdims=True) + 1e-6)
    heads[:, 0] /= np.sqrt(d_k)
    b, a = wide(rows[:, -2 * n_v : -n_v]), wide(rows[:, -n_v:]) + wide(scalars[1])
    decay = np.exp(wide(scalars[0]) * np.logaddexp(0.0, a))
    gates = np.stack([decay, 1.0 / (1.0 + np.exp(-b))], axis=-1)
    return np.concatenate([heads.reshape(len(y), -1), y[:, 2 * n_k * d_k :]], axis=1), gates, state


def delta_rule(
    qkv: Array, gates: Array, state: Array, *, n_k: int, heads_in_turn: bool = False
) -> tuple[Float64, Float64]:
    """Of each value head and token: S = decay S, S += k (rate (v - S^T k))^T, out = S^T q.

    qkv and gates as `delta_inputs` gives them; state [n_v, d_k, d_v]; value head h has key head h % n_k
    (heads_in_turn), otherwise those of a key head are neighbours -> [n, n_v, d_v] and the state after them.
    """
    n, (n_v, d_k, d_v) = len(qkv), state.shape
    q, k = wide(qkv[:, : 2 * n_k * d_k]).reshape(n, 2, n_k, d_k).swapaxes(0, 1)
    v = wide(qkv[:, 2 * n_k * d_k :]).reshape(n, n_v, d_v)
    key_heads = np.arange(n_v) % n_k if heads_in_turn else np.arange(n_v) // (n_v // n_k)
    q, k, s, out = q[:, key_heads], k[:, key_heads], wide(state), np.zeros((n, n_v, d_v))
    for t in range(n):
        decay, rate = wide(gates[t, :, :1]), wide(gates[t, :, 1:])
        s = s * decay[..., None]
        d = rate * (v[t] - np.einsum("hkv,hk->hv", s, k[t]))
        s = s + k[t][..., None] * d[:, None]
        out[t] = np.einsum("hkv,hk->hv", s, q[t])
    return out, s


def gated_norm(x: Array, weight: Array, gates: Array, eps: float) -> Float64:
    """rms_norm(x) silu(gates) of each head: x, gates [n, heads, columns], weight [columns]."""
    return swiglu(gates, rms_norm(x, weight, eps))


def sigmoid_gate(x: Array, gate: Array) -> Float64:
    """x sigmoid(gate), of any shape."""
    return wide(x) / (1.0 + np.exp(-wide(gate)))
