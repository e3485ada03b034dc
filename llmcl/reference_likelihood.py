"""The NumPy twins of the evaluation kernels (see `reference.py`): float64, written to be read."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def log_softmax(logits: NDArray[Any]) -> NDArray[np.float64]:
    """log(exp(l_i) / sum_j exp(l_j)) over the last axis: logits [n, vocab] -> as logits."""
    wide = np.asarray(logits, np.float64)
    shifted: NDArray[np.float64] = wide - wide.max(axis=-1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def log_likelihood(logits: NDArray[Any], targets: NDArray[Any]) -> NDArray[np.float64]:
    """The logarithm of each target's probability: logits [n, vocab], targets int [n] -> [n]."""
    chosen: NDArray[np.float64] = np.take_along_axis(log_softmax(logits), np.asarray(targets)[:, np.newaxis], axis=-1)
    return chosen[:, 0]


def kl_divergence(reference: NDArray[Any], logits: NDArray[Any]) -> NDArray[np.float64]:
    """[n, vocab] twice -> [n, 2]: sum_i P_i (log P_i - log Q_i) with P of `reference` and Q of `logits`, and whether
    (1 or 0) both have the same argmax, the lower index of equal ones."""
    log_p, log_q = log_softmax(reference), log_softmax(logits)
    divergence = np.sum(np.exp(log_p) * (log_p - log_q), axis=-1)
    return np.stack([divergence, np.argmax(reference, axis=-1) == np.argmax(logits, axis=-1)], axis=-1)
