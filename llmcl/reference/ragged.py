"""Ops for a ragged step: rows are token runs from several sequences."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llmcl.reference.arrays import Array, Float64, wide
from llmcl.reference.online_softmax import attention


def attention_of_runs(
    q: Array,
    keys: Sequence[Array],
    values: Sequence[Array],
    runs: Sequence[tuple[int, int]],
    scale: float | None = None,
    *,
    window: int | None = None,
    cap: float | None = None,
) -> Float64:
    """Causal attention of each run over its own sequence: q [n, n_q_heads, head_dim], run after run -> as q.

    runs: (position, row count) per run; keys, values: [kv_len, n_kv_heads, head_dim] per run. Further arguments as in
    `attention`.
    """
    outputs, row = [], 0
    for (position, n), k, v in zip(runs, keys, values, strict=True):
        outputs.append(attention(q[row : row + n], k, v, position, scale, window=window, cap=cap))
        row += n
    return np.concatenate(outputs)


def gather_rows(x: Array, wanted: Sequence[int]) -> Float64:
    """Gathers the wanted rows from x [n, columns]: [m, columns]."""
    return wide(x[np.asarray(wanted, np.int64)])
