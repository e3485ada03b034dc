"""Sampling, without sorting: penalties, then one threshold for top-k, top-p, min-p (in this order), then
temperature and Gumbel noise: argmax(logit / temperature + gumbel) is distributed as softmax(logit / temperature).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from llmcl.reference.arrays import Array, Float32, Float64, Scalar, wide


def penalize(logits: Array, last_seen: Array, position: int, window: int, penalty: float) -> Float64:
    """The repetition penalty: logits [vocab], last_seen int [vocab] -> [vocab].

    last_seen is a token's latest position, negative if it never occurred. A token with
    position - window < last_seen <= position has its logit divided by penalty if positive, else multiplied.
    """
    logits, last_seen = wide(logits), np.asarray(last_seen)
    recent = (last_seen >= 0) & (last_seen > position - window) & (last_seen <= position)
    return np.where(recent, np.where(logits > 0, logits / penalty, logits * penalty), logits)


def penalize_counts(logits: Array, counts: Array, presence: float, frequency: float) -> Float64:
    """Presence and frequency penalty: logits [vocab] -> [vocab]; counts int [vocab]: each token's count in the answer.

    l - presence - frequency count where count > 0, as in OpenAI's API.
    """
    counts = np.asarray(counts)
    return wide(logits) - np.where(counts > 0, presence + frequency * counts, 0.0)


def sample_threshold(logits: Array, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> np.float32:
    """The smallest logit that survives: logits [vocab] -> float32 t; a token survives if logit >= t.

    t is the largest of three, each -inf when switched off (top_k = 0 or >= vocab, top_p >= 1, min_p <= 0):
    - t_k: the top_k-th largest logit, so ties with it survive;
    - t_p: with the logits >= t_k in descending order, the smallest logit in the shortest prefix with top_p or more of
    the softmax mass; at least one token, and ties with the last token survive;
    - t_m: max(logits) + log(min_p), that is probability >= min_p * largest probability.
    With min_p <= 1 the largest logit always survives. Logits are rounded to float32 first, as on the device.
    """
    ordered = np.sort(np.asarray(logits).astype(np.float32))[::-1].astype(np.float64)
    largest = ordered[0]
    threshold = -np.inf
    if 0 < top_k < ordered.size:
        threshold = ordered[top_k - 1]
    if top_p < 1.0:
        survivors = ordered[ordered >= threshold]
        mass = np.cumsum(np.exp(survivors - largest))
        threshold = max(threshold, survivors[np.searchsorted(mass, top_p * mass[-1])])
    if min_p > 0.0:
        threshold = max(threshold, largest + math.log(min_p))
    return np.float32(threshold)


def _mix32(x: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """A bijection on 32 bits: each input bit flips each output bit with probability close to 1/2."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x21F0AAAD)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0xD35A2D97)
    return x ^ (x >> np.uint32(15))


def noise_bits(seed: int, step: int, token_ids: Array) -> NDArray[np.uint32]:
    """32 random bits per token in a step: token_ids uint32 [n] -> uint32 [n]; the same on any device.

    kernels/portable/token_scores.cl computes the same (noise_keys, score_of). It only needs 32-bit unsigned arithmetic,
    and all tokens in a step share the two keys. With a single key, two steps or seeds with close keys would get the
    same noise sequence in another order. mix32's constants come from the hash prospector project's search for mixers
    with two multiplications and the smallest bias.
    """
    bits = seed & 0xFFFFFFFFFFFFFFFF
    # Arrays with one element: NumPy wraps arrays silently and warns about scalars.
    seed_lo, seed_hi, count = (np.array([x & 0xFFFFFFFF], dtype=np.uint32) for x in (bits, bits >> 32, step))
    token_key = _mix32(seed_lo + np.uint32(0x9E3779B9))
    step_key = _mix32(_mix32(token_key + seed_hi + np.uint32(0x85EBCA6B)) ^ count)
    return _mix32(_mix32(np.asarray(token_ids, dtype=np.uint32) ^ token_key) + step_key)


def uniform(seed: int, step: int, token_ids: Array) -> Float32:
    """Numbers in the open interval (0, 1): token_ids uint32 [n] -> float32 [n], (top 23 bits + 0.5) / 2^23.

    Exact in float32. 24 bits and the half would need 25: the largest would round to 1, with infinite noise.
    """
    top = (noise_bits(seed, step, token_ids) >> np.uint32(9)).astype(np.float32)
    return (top + np.float32(0.5)) * np.float32(2.0**-23)


def gumbel(seed: int, step: int, token_ids: Array) -> Float64:
    """Standard Gumbel noise -log(-log(uniform)): token_ids uint32 [n] -> [n], between -2.82 and 16.64."""
    return -np.log(-np.log(wide(uniform(seed, step, token_ids))))


def sample_scores(logits: Array, temperature: float, threshold: Scalar, seed: int, step: int) -> Float64:
    """The scores that sample() maximises: logits [vocab] -> [vocab], -inf for tokens under the threshold.

    A float32 kernel may pick another token than the twin only if its score is within rounding of the largest.
    """
    logits = wide(logits)
    if temperature == 0.0:
        scores = logits
    else:
        scores = logits / temperature + gumbel(seed, step, np.arange(logits.size, dtype=np.uint32))
    return np.where(logits >= threshold, scores, -np.inf)


def sample(logits: Array, temperature: float, threshold: Scalar, seed: int, step: int) -> int:
    """The token with the largest logit / temperature + gumbel among logits >= threshold; ties: the lowest id.

    logits [vocab] after penalize(), threshold from sample_threshold(); temperature 0: the largest logit. NaN is never
    chosen. Returns vocab, an invalid token, if no logit is a number or the largest score is infinite.
    """
    scores = sample_scores(logits, temperature, threshold, seed, step)
    scores = np.where(np.isnan(scores), -np.inf, scores)
    best = int(np.argmax(scores))
    return best if np.isfinite(scores[best]) else scores.size


def logprobs(logits: Array, k: int) -> tuple[Float64, list[int]]:
    """log softmax(logits) [vocab], and the k most likely tokens, best first; lower id first on ties."""
    wide_logits = wide(logits)
    shifted = wide_logits - np.max(wide_logits)
    log_p = shifted - np.log(np.sum(np.exp(shifted)))
    return log_p, [int(i) for i in np.lexsort((np.arange(log_p.size), -wide_logits))[:k]]


def logit_bias(logits: Array, bias: Mapping[int, float], allowed: Array | None = None) -> Float64:
    """Adds per-token biases to logits [vocab]; allowed bool [vocab]: -inf where False."""
    result = wide(logits).copy()
    for token, value in bias.items():
        result[token] += value
    return result if allowed is None else np.where(np.asarray(allowed), result, -np.inf)
