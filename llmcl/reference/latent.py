"""The ops of latent attention (MLA): a token's query heads share rows with a latent and a rotated key."""

from __future__ import annotations

import numpy as np

from llmcl.reference.arrays import Array, Float64, wide
from llmcl.reference.layers import rms_norm, rope
from llmcl.reference.online_softmax import attention


def rotate_pairs(x: Array, cos: Array, sin: Array, *, interleaved: bool) -> Float64:
    """Rotates x [n, heads, dim]. The rotary pairs are neighbours (interleaved) or dim/2 apart; in the result dim/2
    apart."""
    x = wide(x)
    if interleaved:
        x = np.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)
    return rope(x, cos, sin)


def latent_append(
    latents: Array, norm: Array, queries: Array, cos: Array, sin: Array, eps: float, *, interleaved: bool
) -> tuple[Float64, Float64]:
    """latents [n, rank + dim], norm [rank], queries [n, heads, query], cos and sin [n, dim / 2] -> cache rows [n, rank
    + dim], and the queries with the last dim elements rotated.
    """
    rank, dim = len(norm), 2 * cos.shape[-1]
    key = rotate_pairs(latents[:, None, rank:], cos, sin, interleaved=interleaved)[:, 0]
    rotated = rotate_pairs(queries[..., -dim:], cos, sin, interleaved=interleaved)
    rows = np.concatenate([rms_norm(latents[:, :rank], norm, eps), key], axis=-1)
    return rows, np.concatenate([wide(queries)[..., :-dim], rotated], axis=-1)


def latent_attention(absorbed: Array, rotated: Array, rows: Array, position: int, scale: float) -> Float64:
    """Causal attention of queries from `position` on over rows [kv_len, rank + dim]: sums of latents.

    absorbed [n, heads, rank], rotated [n, heads, dim] -> [n, heads, rank].
    """
    queries = np.concatenate([wide(absorbed), wide(rotated)], axis=-1)
    shared = rows[:, None]
    return attention(queries, shared, shared, position, scale)[..., : absorbed.shape[-1]]


def linear_heads(x: Array, weight: Array) -> Float64:
    """x [n, heads, k], weight [heads, rows, k] -> [n, heads, rows]."""
    product: Float64 = np.einsum("nhk,hrk->nhr", wide(x), wide(weight))
    return product
