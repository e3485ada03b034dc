"""Samplers that leave the logits in an interval: logits [vocab], kept bool [vocab] -> the tokens still kept.

Ties survive together. llama.cpp keeps one of two tied tokens at the end of a sorted list.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np

from llmcl.reference.arrays import Array, Bool, Float64, wide
from llmcl.reference.sampling import sample_threshold, uniform

DRY_LARGEST = 1e6  # finite, unlike in llama.cpp: a grammar may demand a token that DRY repels
XTC_NOISE = 0xFFFFFFFF  # the token id whose noise decides whether XTC applies


def log_shares(logits: Array, kept: Array) -> Float64:
    """log softmax over the kept tokens; -inf for the rest."""
    masked = np.where(kept, wide(logits), -np.inf)
    shifted = masked - np.max(masked)
    with np.errstate(divide="ignore"):
        return np.asarray(shifted - np.log(np.sum(np.exp(shifted))))


def entropy(logits: Array, kept: Array) -> float:
    log_p = log_shares(logits, kept)
    log_p = log_p[np.isfinite(log_p)]
    return float(-np.sum(np.exp(log_p) * log_p))


def dry(
    logits: Array,
    text: Sequence[int],
    multiplier: float,
    base: float,
    allowed_length: int,
    last_n: int = -1,
    breakers: Collection[tuple[int, ...]] = (),
) -> Float64:
    """DRY: logits [vocab] after a text -> [vocab]; breakers: sequences of tokens at which a repetition ends."""
    window = tuple(text) if last_n < 0 else tuple(text)[max(0, len(text) - last_n) :]
    limit, result = len(window), wide(logits).copy()
    for head in reversed(range(len(window))):
        if ends := [head + len(each) for each in breakers if window[head : head + len(each)] == tuple(each)]:
            limit = len(window) - max(ends)
            break
    longest: dict[int, int] = {}
    for at in range(1, len(window)):
        n = 0
        while n < min(limit, at) and window[at - 1 - n] == window[-1 - n]:
            n += 1
        longest[window[at]] = max(n, longest.get(window[at], 0))
    for token, n in longest.items():
        if n >= allowed_length and (token,) not in breakers:
            growth = math.exp(min((n - allowed_length) * math.log(base), 700.0))
            result[token] -= min(multiplier * growth, DRY_LARGEST)
    return result


def top_n_sigma(logits: Array, kept: Array, n: float) -> Bool:
    """Keeps logits at most n standard deviations of the finite logits below the largest; 0 keeps all."""
    finite = wide(logits)[kept & np.isfinite(logits)]
    return np.asarray(kept & (wide(logits) >= np.max(finite) - n * np.std(finite))) if n > 0 else np.asarray(kept)


def typical_p(logits: Array, kept: Array, p: float) -> Bool:
    """Keeps the tokens whose surprise is nearest to the entropy, as few as reach the probability p together."""
    if p >= 1:
        return np.asarray(kept)
    log_p = log_shares(logits, kept)
    distance = np.where(kept, np.abs(-log_p - entropy(logits, kept)), np.inf)
    order = np.argsort(distance, kind="stable")
    reached = int(np.searchsorted(np.cumsum(np.exp(log_p[order])), p))
    return np.asarray(kept & (distance <= distance[order][min(reached, len(order) - 1)]))


def truncated(logits: Array, kept: Array, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Bool:
    """Top-k, top-p and min-p among the kept tokens."""
    masked = np.where(kept, wide(logits), -np.inf)
    return np.asarray(kept & (masked.astype(np.float32) >= sample_threshold(masked, top_k, top_p, min_p)))


def xtc(logits: Array, kept: Array, threshold: float) -> Bool:
    """Drops the tokens that are likelier than the least likely one with a probability of at least `threshold`."""
    above = kept & (np.exp(log_shares(logits, kept)) >= threshold)
    if threshold > 0.5 or np.sum(above) < 2:
        return np.asarray(kept)
    return np.asarray(kept & (wide(logits) <= np.min(wide(logits)[above])))


def xtc_applies(probability: float, seed: int, step: int) -> bool:
    return probability > 0 and float(uniform(seed, step, np.array([XTC_NOISE]))[0]) <= probability


def dynamic_temperature(logits: Array, kept: Array, temperature: float, delta: float, exponent: float) -> float:
    """temperature - delta to temperature + delta, by the entropy as a share of log(number of kept tokens)."""
    n = int(np.sum(kept & np.isfinite(logits)))
    if n < 2 or delta == 0:
        return temperature
    least = max(0.0, temperature - delta)
    return least + (temperature + delta - least) * math.pow(entropy(logits, kept) / math.log(n), exponent)


def mirostat(logits: Array, kept: Array, temperature: float, mu: float) -> Bool:
    """Keeps the tokens with a surprise of at most mu bits at this temperature, but at least the likeliest."""
    surprise = -log_shares(wide(logits) / temperature, kept) / math.log(2)
    return np.asarray(kept & (surprise <= max(mu, np.min(surprise))))


def mirostat_mu(logits: Array, kept: Array, temperature: float, token: int, mu: float, tau: float, eta: float) -> float:
    """Mirostat 2's state after `token` was chosen from the kept tokens. It begins as 2 tau."""
    surprise = -log_shares(wide(logits) / temperature, kept)[token] / math.log(2)
    return mu - eta * (float(surprise) - tau)
