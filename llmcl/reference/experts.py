"""The ops of a mixture of experts."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmcl.reference.arrays import Array, Float64, wide
from llmcl.reference.layers import GATES


def choose_experts(
    logits: Array, top_k: int, *, renormalize: bool, bias: Array | None = None
) -> tuple[NDArray[np.int32], Float64]:
    """The top_k experts of the largest logits, the lower number first of equal ones, and the softmax of their logits.

    logits [n, n_experts] -> ids int32 [n, top_k] and weights [n, top_k]. renormalize: the softmax is that of the chosen
    experts alone. bias [n_experts]: is added to the logits.
    """
    logits = wide(logits) + (0.0 if bias is None else wide(bias))
    ids = np.argsort(-logits, axis=-1, kind="stable")[:, :top_k]
    chosen = np.take_along_axis(logits, ids, axis=-1)
    largest = chosen[:, :1]
    over = chosen if renormalize else logits
    return ids.astype(np.int32), np.exp(chosen - largest) / np.exp(over - largest).sum(axis=-1, keepdims=True)


def group_by_expert(ids: Array, block_rows: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The slots of ids int [n, top_k], read as [n top_k], in the order of their experts, and blocks of them.

    -> order int32 [n top_k]; blocks int32 [n_blocks, 3]: expert, first place in order, slots, at most block_rows.
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
    """What the chosen experts make of each token: gate(gate[e] x) (up[e] x).

    x [n, k], gate and up [n_experts, f, k], ids int [n, top_k]; kind: one of GATES; bias [n_experts, 2, f]: of gate and
    of up -> [n, top_k, f].
    """
    of_token = "tk,tsfk->tsf"
    gates, ups = (np.einsum(of_token, wide(x), wide(weight)[ids]) for weight in (gate, up))
    if bias is not None:
        gates, ups = gates + wide(bias)[ids, 0], ups + wide(bias)[ids, 1]
    return GATES[kind](gates, ups)


def experts_down(rows: Array, down: Array, ids: Array, weights: Array, bias: Array | None = None) -> Float64:
    """The sum of the chosen experts' outputs: sum_s weights[t][s] (down[ids[t][s]] rows[t][s] + bias[ids[t][s]]).

    rows [n, top_k, f], down [n_experts, hidden, f], ids int [n, top_k], weights [n, top_k], bias [n_experts, hidden]
    -> [n, hidden].
    """
    summed: Float64 = np.einsum("tsf,tshf,ts->th", wide(rows), wide(down)[ids], wide(weights))
    return summed if bias is None else summed + np.einsum("tsh,ts->th", wide(bias)[ids], wide(weights))
