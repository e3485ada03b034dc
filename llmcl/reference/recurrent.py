"""The ops of recurrent layers: a state with fixed size in place of keys and values."""

from __future__ import annotations

import numpy as np

from llmcl.reference.arrays import Array, Float64, wide
from llmcl.reference.layers import rms_norm, swiglu


def causal_conv(u: Array, weights: Array, state: Array, bias: Array | None = None) -> tuple[Float64, Float64]:
    """Convolves each channel with its last inputs: y[t] = sum_j weights[j] u[t - length + 1 + j] + bias.

    u [n, channels], weights [length, channels], state [length - 1, channels]: the inputs before u, 0 before a text -> y
    [n, channels] and the state after u.
    """
    length = len(weights)
    inputs = np.concatenate([wide(state), wide(u)])
    y = sum(wide(weights[j]) * inputs[j : j + len(u)] for j in range(length))
    y = y if bias is None else y + wide(bias)
    return np.asarray(y), inputs[len(inputs) - (length - 1) :]


def short_conv(rows: Array, weights: Array, state: Array, bias: Array | None = None) -> tuple[Float64, Float64]:
    """c conv(b x): rows [n, 3, channels] with b, c, x; the rest as in causal_conv -> [n, channels], new state."""
    b, c, x = np.moveaxis(wide(rows), 1, 0)
    y, state = causal_conv(b * x, weights, state, bias)
    return c * y, state


def delta_inputs(
    rows: Array, weights: Array, scalars: Array, state: Array, *, n_k: int, d_k: int
) -> tuple[Float64, Float64, Float64]:
    """Queries, keys and values for the delta rule, and decay and rate per value head.

    rows [n, 2 n_k d_k + 2 n_v d_v + 2 n_v]: q, k, v, gates, b, a; weights and state as in causal_conv; scalars [2,
    n_v]: A (below 0) and the bias added to a -> [n, 2 n_k d_k + n_v d_v]; [n, n_v, 2]; new state.
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


def delta_heads(qkv: Array, *, n_k: int, n_v: int, d_k: int, heads_in_turn: bool) -> tuple[Float64, Float64, Float64]:
    """The value heads' queries and keys [n, n_v, d_k] and values [n, n_v, d_v]; arguments as in `delta_rule`."""
    n = len(qkv)
    q, k = wide(qkv[:, : 2 * n_k * d_k]).reshape(n, 2, n_k, d_k).swapaxes(0, 1)
    v = wide(qkv[:, 2 * n_k * d_k :]).reshape(n, n_v, -1)
    key_heads = np.arange(n_v) % n_k if heads_in_turn else np.arange(n_v) // (n_v // n_k)
    return q[:, key_heads], k[:, key_heads], v


def delta_rule(
    qkv: Array, gates: Array, state: Array, *, n_k: int, heads_in_turn: bool = False
) -> tuple[Float64, Float64]:
    """For each value head and token: S = decay S, S += k (rate (v - S^T k))^T, out = S^T q.

    qkv and gates come from `delta_inputs`; state [n_v, d_k, d_v]. Value head h has key head h % n_k (heads_in_turn),
    otherwise value heads with the same key head are neighbours -> [n, n_v, d_v] and the new state.
    """
    n, (n_v, d_k, d_v) = len(qkv), state.shape
    q, k, v = delta_heads(qkv, n_k=n_k, n_v=n_v, d_k=d_k, heads_in_turn=heads_in_turn)
    s, out = wide(state), np.zeros((n, n_v, d_v))
    for t in range(n):
        decay, rate = wide(gates[t, :, :1]), wide(gates[t, :, 1:])
        s = s * decay[..., None]
        d = rate * (v[t] - np.einsum("hkv,hk->hv", s, k[t]))
        s = s + k[t][..., None] * d[:, None]
        out[t] = np.einsum("hkv,hk->hv", s, q[t])
    return out, s


def delta_terms(
    qkv: Array, gates: Array, *, n_k: int, d_k: int, chunk: int, heads_in_turn: bool = False
) -> tuple[Float64, Float64, Float64, Float64]:
    """The part of the delta rule within each chunk that doesn't depend on the state; arguments as in `delta_rule`.

    With r[t][s] = decay[s + 1] ... decay[t] and g[t] = decay[chunk's first] ... decay[t]:
    A[t][s] = rate[t] r[t][s] (k[t] . k[s]) for s < t;  w = (1 + A)^-1 (rate g k);  u = (1 + A)^-1 (rate v);
    b[t][s] = r[t][s] (q[t] . k[s]) for s <= t;  factors[t] = g[t], r[chunk's last][t]
    -> w [n, n_v, d_k], u [n, n_v, d_v], b [n, n_v, chunk], factors [n, n_v, 2].
    """
    n, n_v = gates.shape[:2]
    q, k, v = delta_heads(qkv, n_k=n_k, n_v=n_v, d_k=d_k, heads_in_turn=heads_in_turn)
    w, u, b = np.zeros_like(k), np.zeros_like(v), np.zeros((n, n_v, chunk))
    factors = np.zeros((n, n_v, 2))
    for first in range(0, n, chunk):
        part = slice(first, min(first + chunk, n))
        size = part.stop - first
        decay, rate = wide(gates[part]).transpose(2, 1, 0)  # [n_v, size]
        r = np.zeros((n_v, size, size))
        for t in range(size):
            r[:, t, :t] = r[:, t - 1, :t] * decay[:, t, None] if t else 0.0
            r[:, t, t] = 1.0
        g = r[:, :, 0] * decay[:, :1]
        k_part, q_part, v_part = (x[part].swapaxes(0, 1) for x in (k, q, v))  # [n_v, size, columns]
        a = np.tril(rate[..., None] * r * (k_part @ k_part.swapaxes(1, 2)), -1)
        inverse = np.linalg.inv(np.eye(size) + a)
        w[part] = (inverse @ ((rate * g)[..., None] * k_part)).swapaxes(0, 1)
        u[part] = (inverse @ (rate[..., None] * v_part)).swapaxes(0, 1)
        b[part, :, :size] = (r * (q_part @ k_part.swapaxes(1, 2))).swapaxes(0, 1)
        factors[part] = np.stack([g, r[:, -1]], axis=-1).swapaxes(0, 1)
    return w, u, b, factors


def delta_chunks(
    qkv: Array, gates: Array, state: Array, *, n_k: int, chunk: int, heads_in_turn: bool = False
) -> tuple[Float64, Float64]:
    """`delta_rule` chunk by chunk: d = u - w S;  out = g (S^T q) + b d;  S = g[last] S + k^T (r[last] d)."""
    n_v, d_k, d_v = state.shape
    heads = {"n_k": n_k, "d_k": d_k, "heads_in_turn": heads_in_turn}
    q, k, _ = delta_heads(qkv, n_v=n_v, **heads)
    w, u, b, factors = delta_terms(qkv, gates, chunk=chunk, **heads)
    s, out = wide(state), np.zeros((len(qkv), n_v, d_v))
    for first in range(0, len(qkv), chunk):
        part = slice(first, min(first + chunk, len(qkv)))
        d = u[part] - np.einsum("thk,hkv->thv", w[part], s)
        g, rest = np.moveaxis(factors[part], 2, 0)[..., None]
        out[part] = g * np.einsum("thk,hkv->thv", q[part], s) + np.einsum("ths,shv->thv", b[part, :, : len(d)], d)
        s = g[-1][..., None] * s + np.einsum("thk,thv->hkv", k[part], rest * d)
    return out, s


def mamba_inputs(
    rows: Array,
    weights: Array,
    scalars: Array,
    state: Array,
    bias: Array | None = None,
    limits: tuple[float, float] = (0.0, np.inf),
) -> tuple[Float64, Float64, Float64]:
    """Mamba-2's x, B and C after a causal convolution with SiLU, and decay and step per head.

    rows [n, channels + gates + heads]: x, B, C, gates (not read), raw steps; weights, state and bias as in causal_conv;
    scalars [3, heads]: A (below 0), the bias of the steps, D (not read). step = clamp(softplus(raw + bias)), decay =
    exp(step A) -> [n, channels]; [n, heads, 2]; new state.
    """
    y, state = causal_conv(rows[:, : weights.shape[1]], weights, state, bias)
    raw = wide(rows[:, -scalars.shape[1] :]) + wide(scalars[1])
    steps = np.clip(np.logaddexp(0.0, raw), *limits)
    return swiglu(y, np.ones_like(y)), np.stack([np.exp(steps * wide(scalars[0])), steps], axis=-1), state


def mamba_scan(xbc: Array, gates: Array, skips: Array, state: Array, *, n_groups: int) -> tuple[Float64, Float64]:
    """Mamba-2's scan: for each head and token S = decay S + B (step x)^T, out = S^T C + D x.

    xbc [n, ...] and gates come from `mamba_inputs`; skips [heads]: D; state [heads, d_state, d_head]. Neighbouring
    heads share B and C of a group -> [n, heads, d_head] and the new state.
    """
    n, (heads, d_state, d_head) = len(xbc), state.shape
    x, b, c = np.split(wide(xbc), [heads * d_head, heads * d_head + n_groups * d_state], axis=1)
    x = x.reshape(n, heads, d_head)
    b, c = (np.repeat(part.reshape(n, n_groups, d_state), heads // n_groups, axis=1) for part in (b, c))
    decays, steps = np.moveaxis(wide(gates), 2, 0)
    s, out = wide(state), np.zeros((n, heads, d_head))
    for t in range(n):
        s = decays[t][:, None, None] * s + b[t][:, :, None] * (steps[t][:, None] * x[t])[:, None]
        out[t] = np.einsum("hsp,hs->hp", s, c[t]) + wide(skips)[:, None] * x[t]
    return out, s


def gated_norm(x: Array, weight: Array, gates: Array, eps: float, *, gate_first: bool = False) -> Float64:
    """rms_norm(x) silu(gates) per head, or with gate_first rms_norm(x silu(gates)).

    x, gates [n, heads, columns], weight [columns] or [heads, columns].
    """
    if gate_first:
        return rms_norm(swiglu(gates, wide(x)), weight, eps)
    return swiglu(gates, rms_norm(x, weight, eps))


def sigmoid_gate(x: Array, gate: Array) -> Float64:
    """x sigmoid(gate), any shape."""
    return wide(x) / (1.0 + np.exp(-wide(gate)))
