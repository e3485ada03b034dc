"""Attention with online softmax. The state for a set of keys is (m, l, acc): the largest score, the sum of exp(score -
m), and the sum of exp(score - m) * value. Without keys: m = -inf, l = 0, and acc is never read.
"""

from __future__ import annotations

import math

import numpy as np

from llmcl.errors import UsageError
from llmcl.reference.arrays import Array, Float64, wide
from llmcl.reference.layers import soft_cap


def softmax_state(scores: Array) -> tuple[Float64, Float64]:
    """(m, l) over the last axis: scores [..., keys] -> each [...]. A score of -inf is a hidden key."""
    scores = wide(scores)
    m = np.max(scores, axis=-1, initial=-np.inf)
    # exp(-inf - -inf) would be NaN: without a visible key, subtract 0 from -inf instead.
    return m, np.sum(np.exp(scores - np.where(np.isneginf(m), 0.0, m)[..., None]), axis=-1)


def attention_partial(
    q: Array, k: Array, v: Array, start: int, stop: int, scale: float | None = None, cap: float | None = None
) -> tuple[Float64, Float64, Float64]:
    """The state of one query over the keys start..stop-1.

    q [n_q_heads, head_dim], k, v [kv_len, n_kv_heads, head_dim] -> m, l [n_q_heads], acc as q. scale: 1/sqrt(head_dim)
    by default; cap: soft cap on the scores. Keys outside start..stop-1 are not read.
    """
    n_q_heads, head_dim = q.shape
    n_kv_heads = k.shape[1]
    if scale is None:
        scale = 1.0 / math.sqrt(head_dim)
    keys = wide(k[start:stop]).transpose(1, 2, 0)  # [n_kv_heads, head_dim, keys]
    values = wide(v[start:stop]).transpose(1, 0, 2)  # [n_kv_heads, keys, head_dim]
    # Query heads with the same KV head are neighbours: kv_head = q_head // (n_q_heads // n_kv_heads).
    scores = wide(q).reshape(n_kv_heads, n_q_heads // n_kv_heads, head_dim) @ keys * scale
    if cap is not None:
        scores = soft_cap(scores, cap)
    m, l = softmax_state(scores)  # noqa: E741
    acc = np.exp(scores - np.where(np.isneginf(m), 0.0, m)[..., None]) @ values
    return m.reshape(n_q_heads), l.reshape(n_q_heads), acc.reshape(n_q_heads, head_dim)


def attention_merge(m: Array, l: Array, acc: Array, sinks: Array | None = None) -> Float64:  # noqa: E741
    """Merges states over disjoint key sets into the attention output.

    m, l [heads, splits], acc [heads, splits, head_dim] -> [heads, head_dim]; zeros for a head without keys. The acc of
    an empty split (l = 0) is not read, so it may hold anything. sinks [heads]: each is an additional state with m =
    sink, l = 1, acc = 0.
    """
    m, total = wide(m), wide(l)
    if sinks is not None:
        m, total = np.column_stack([m, wide(sinks)]), np.column_stack([total, np.ones(len(m))])
        acc = np.concatenate([wide(acc), np.zeros_like(acc[:, :1], np.float64)], axis=1)
    largest = np.max(m, axis=-1, keepdims=True, initial=-np.inf)
    weight = np.exp(m - np.where(np.isneginf(largest), 0.0, largest))  # [heads, splits]
    seen = np.where((total > 0)[..., None], wide(acc), 0.0)
    denominator = np.sum(weight * total, axis=-1)
    numerator = np.sum(weight[..., None] * seen, axis=-2)
    out: Float64 = numerator / np.where(denominator > 0, denominator, 1.0)[..., None]
    return out


def attention(
    q: Array,
    k: Array,
    v: Array,
    position: int,
    scale: float | None = None,
    *,
    window: int | None = None,
    cap: float | None = None,
    sinks: Array | None = None,
    chunk: int | None = None,
) -> Float64:
    """Causal attention: query row i sits at position + i and sees the keys 0..position + i, or the last `window` keys,
    or the keys of its chunk.

    q [n, n_q_heads, head_dim], k, v [kv_len, n_kv_heads, head_dim] with kv_len >= position + n -> as q.
    scale: 1/sqrt(head_dim) by default; cap: soft cap on the scores. sinks [n_q_heads]: a logit per head that only
    counts in the softmax sum. A row reads no key past its own position: poison there cannot leak.
    """
    n = q.shape[0]
    if k.shape[0] < position + n:
        raise UsageError(f"attention: k has {k.shape[0]} keys, position {position} + {n} queries need {position + n}")
    out = np.empty(q.shape, dtype=np.float64)
    k, v = wide(k[: position + n]), wide(v[: position + n])
    for i in range(n):
        first = 0 if window is None else max(0, position + i + 1 - window)
        first = first if chunk is None else max(first, (position + i) // chunk * chunk)
        m, total, acc = attention_partial(q[i], k, v, first, position + i + 1, scale, cap)
        out[i] = attention_merge(m[:, None], total[:, None], acc[:, None], sinks)
    return out


def attention_decode(
    q: Array, k: Array, v: Array, position: int, scale: float | None = None, sinks: Array | None = None
) -> Float64:
    """attention() of a single query: q [1, n_q_heads, head_dim] -> [1, n_q_heads, head_dim]."""
    if q.shape[0] != 1:
        raise UsageError(f"attention_decode: q has {q.shape[0]} rows, expected 1")
    return attention(q, k, v, position, scale, sinks=sinks)
