"""The mixture-of-experts ops."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmcl.reference.arrays import Array, Float64, wide
from llmcl.reference.layers import GATES


def choose_experts(
    logits: Array, top_k: int, *, renormalize: bool, bias: Array | None = None
) -> tuple[NDArray[np.int32], Float64]:
    """Picks the top_k experts with the largest logits (lower number first on ties) and the softmax of their logits.

    logits [n, n_experts] -> ids int32 [n, top_k] and weights [n, top_k]. renormalize: softmax over the chosen experts
    alone. bias [n_experts] is added to the logits.
    """
    logits = wide(logits) + (0.0 if bias is None else wide(bias))
    ids = np.argsort(-logits, axis=-1, kind="stable")[:, :top_k]
    chosen = np.take_along_axis(logits, ids, axis=-1)
    largest = chosen[:, :1]
    over = chosen if renormalize else logits
    return ids.astype(np.int32), np.exp(chosen - largest) / np.exp(over - largest).sum(axis=-1, keepdims=True)


def choose_scored_experts(
    logits: Array,
    top_k: int,
    *,
    renormalize: bool,
    sigmoid: bool,
    n_groups: int = 1,
    top_groups: int = 1,
    per_group: int = 1,
    scale: float = 1.0,
    correction: Array | None = None,
) -> tuple[NDArray[np.int32], Float64]:
    """Picks the top_k experts by score, within the best groups of neighbouring experts; lower number first on ties.

    logits [n, n_experts] -> ids int32 [n, top_k] and weights [n, top_k], the scores times `scale`. A score is the
    logit's sigmoid, or the softmax over all logits. correction [n_experts] is added for the choice alone. A group's
    rank is the sum of its per_group largest scores; only top_groups of n_groups take part. renormalize: divides the
    scores by the sum over the chosen experts.
    """
    logits = wide(logits)
    if sigmoid:
        scores = 1.0 / (1.0 + np.exp(-logits))
    else:
        scores = np.exp(logits - logits.max(axis=-1, keepdims=True))
        scores /= scores.sum(axis=-1, keepdims=True)
    choice = scores + (0.0 if correction is None else wide(correction))
    grouped = np.sort(choice.reshape(len(logits), n_groups, -1), axis=-1)
    best = np.argsort(-grouped[..., -per_group:].sum(axis=-1), axis=-1, kind="stable")[:, :top_groups]
    is_kept = np.zeros(grouped.shape, bool)
    np.put_along_axis(is_kept, best[..., None], True, axis=1)
    choice = np.where(is_kept.reshape(choice.shape), choice, -np.inf)
    ids = np.argsort(-choice, axis=-1, kind="stable")[:, :top_k]
    weights = np.take_along_axis(scores, ids, axis=-1)
    if renormalize:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
    return ids.astype(np.int32), scale * weights


def scale_shares(shares: Array, ids: Array, scales: Array) -> Float64:
    """Multiplies shares by each expert's factor: shares [n, top_k], ids int [n, top_k], scales [n_experts] -> [n,
    top_k]."""
    return wide(shares) * wide(scales)[ids]


def group_by_expert(ids: Array, block_rows: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Sorts the slots of ids int [n, top_k], flattened to [n top_k], by expert, and cuts them into blocks.

    -> order int32 [n top_k]; blocks int32 [n_blocks, 3]: expert, first index in order, slot count up to block_rows.
    """
    experts = np.asarray(ids).reshape(-1)
    order = np.argsort(experts, kind="stable")
    blocks = []
    for expert in np.unique(experts):
        places = np.flatnonzero(experts[order] == expert)
        for first in range(places[0], places[-1] + 1, block_rows):
            blocks.append((expert, first, min(block_rows, places[-1] + 1 - first)))
    return order.astype(np.int32), np.array(blocks, np.int32)


def experts_gate_up(x: Array, gate: Array, up: Array, ids: Array, kind: str, bias: Array | None = None) -> Float64:
    """Computes gate(gate[e] x) (up[e] x) for each token and chosen expert e.

    x [n, k], gate and up [n_experts, f, k], ids int [n, top_k]; kind: one of GATES; bias [n_experts, 2, f] for gate and
    up -> [n, top_k, f].
    """
    of_token = "tk,tsfk->tsf"
    gates, ups = (np.einsum(of_token, wide(x), wide(weight)[ids]) for weight in (gate, up))
    if bias is not None:
        gates, ups = gates + wide(bias)[ids, 0], ups + wide(bias)[ids, 1]
    return GATES[kind](gates, ups)


def experts_down(rows: Array, down: Array, ids: Array, weights: Array, bias: Array | None = None) -> Float64:
    """Sums the chosen experts' outputs: sum_s weights[t][s] (down[ids[t][s]] rows[t][s] + bias[ids[t][s]]).

    rows [n, top_k, f], down [n_experts, hidden, f], ids int [n, top_k], weights [n, top_k], bias [n_experts, hidden] ->
    [n, hidden].
    """
    summed: Float64 = np.einsum("tsf,tshf,ts->th", wide(rows), wide(down)[ids], wide(weights))
    return summed if bias is None else summed + np.einsum("tsh,ts->th", wide(bias)[ids], wide(weights))
