"""Log-likelihood and divergence, for evaluation."""

from __future__ import annotations

import numpy as np

from llmcl.reference.arrays import Array, Float64, wide


def log_softmax(logits: Array) -> Float64:
    """log(exp(l_i) / sum_j exp(l_j)) over the last axis: logits [n, vocab] -> as logits."""
    logits = wide(logits)
    shifted: Float64 = logits - logits.max(axis=-1, keepdims=True)
    result: Float64 = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def log_likelihood(logits: Array, targets: Array) -> Float64:
    """The log probability of each target: logits [n, vocab], targets int [n] -> [n]."""
    chosen: Float64 = np.take_along_axis(log_softmax(logits), np.asarray(targets)[:, np.newaxis], axis=-1)
    return chosen[:, 0]


def kl_divergence(reference: Array, logits: Array) -> Float64:
    """[n, vocab] twice -> [n, 2]: sum_i P_i (log P_i - log Q_i) with P from `reference` and Q from `logits`; and 1 if
    both have the same argmax (lower index on ties), else 0."""
    log_p, log_q = log_softmax(reference), log_softmax(logits)
    divergence = np.sum(np.exp(log_p) * (log_p - log_q), axis=-1)
    return np.stack([divergence, np.argmax(reference, axis=-1) == np.argmax(logits, axis=-1)], axis=-1)
