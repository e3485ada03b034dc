"""The NumPy twins of sampling: penalty and threshold against transformers, frequencies against probabilities."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from helpers import normal
from numpy.typing import NDArray

from llmcl import reference

torch = pytest.importorskip("torch")


def test_penalize_is_that_of_transformers() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = normal(17, 50)
    ids = [3, 4, 3, 49, 0, 12]
    last_seen = np.full(50, -1)
    for at, token in enumerate(ids):
        last_seen[token] = at
    processor = RepetitionPenaltyLogitsProcessor(1.3)
    expected = processor(torch.tensor([ids]), torch.from_numpy(logits.copy())[None])[0].numpy()
    actual = reference.penalize(logits, last_seen, position=5, window=64, penalty=1.3)
    assert np.allclose(actual, expected, rtol=1e-14)
    assert np.count_nonzero(actual != logits) == 5


def test_penalize_window_ends() -> None:
    logits = np.array([2.0, 2.0, 2.0, -2.0, 2.0, 2.0, 0.0])
    last_seen = np.array([6, 7, 10, 10, 11, -1, 9])
    actual = reference.penalize(logits, last_seen, position=10, window=4, penalty=2.0)
    assert actual.tolist() == [2.0, 1.0, 1.0, -4.0, 2.0, 2.0, 0.0]
    never = reference.penalize(logits, np.full(7, -1), position=0, window=64, penalty=2.0)
    assert never.tolist() == logits.tolist()


def test_penalize_counts_is_openais_formula() -> None:
    logits, chosen = normal(18, 50), [3, 4, 3, 49, 3]
    expected = [float(logits[j]) - chosen.count(j) * 0.3 - float(chosen.count(j) > 0) * 1.5 for j in range(len(logits))]
    actual = reference.penalize_counts(logits, np.bincount(chosen, minlength=50), 1.5, 0.3)
    assert np.allclose(actual, expected, rtol=1e-14) and np.count_nonzero(actual != logits) == 3


def survivors(logits: NDArray[Any], top_k: int, top_p: float, min_p: float) -> list[int]:
    threshold = reference.sample_threshold(logits, top_k, top_p, min_p)
    assert isinstance(threshold, np.float32)
    return np.flatnonzero(logits >= threshold).tolist()


def sorted_survivors(logits: NDArray[Any], top_k: int, top_p: float, min_p: float) -> list[int]:
    """The chain as it is usually written: sort, cut, renormalise, add up, cut, cut."""
    order = sorted(range(len(logits)), key=lambda i: -float(logits[i]))
    if top_k > 0:
        order = order[:top_k]
    total = sum(math.exp(logits[i]) for i in order)
    if top_p < 1.0:
        mass, kept = 0.0, []
        for i in order:
            kept.append(i)
            mass += math.exp(logits[i]) / total
            if mass >= top_p:
                break
        order = kept
    return sorted(i for i in order if math.exp(logits[i]) >= min_p * math.exp(logits[order[0]]))


def threshold_cases() -> list[tuple[int, float, float]]:
    return [
        (top_k, top_p, min_p)
        for top_k in (0, 1, 2, 7, 40, 60, 1000)
        for top_p in (0.0, 0.1, 0.5, 0.9, 0.999, 1.0)
        for min_p in (0.0, 0.02, 0.2, 1.0)
    ]


def test_sample_threshold_against_sorting() -> None:
    sizes = set()
    for number, case in enumerate(threshold_cases()):
        logits = (normal(100 + number, 60) * (0.3 + number % 5)).astype(np.float32)
        expected = sorted_survivors(logits, *case)
        assert survivors(logits, *case) == expected, case
        sizes.add(len(expected))
    assert len(sizes) > 15


def test_sample_threshold_against_transformers() -> None:
    from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    no_ids = torch.empty((1, 0), dtype=torch.long)
    for number, (top_k, top_p, min_p) in enumerate(threshold_cases()):
        logits = (normal(500 + number, 60) * 2).astype(np.float32)
        scores = torch.from_numpy(logits.astype(np.float64))[None]
        if top_k:
            scores = TopKLogitsWarper(top_k)(no_ids, scores)
        if 0.0 < top_p < 1.0:
            scores = TopPLogitsWarper(top_p)(no_ids, scores)
        if top_p == 0.0:
            scores = TopKLogitsWarper(1)(no_ids, scores)
        if min_p:
            scores = MinPLogitsWarper(min_p)(no_ids, scores)
        expected = np.flatnonzero(np.isfinite(scores[0].numpy())).tolist()
        assert survivors(logits, top_k, top_p, min_p) == expected, (top_k, top_p, min_p)


def test_sample_threshold_ties_and_edges() -> None:
    tied = np.array([1.0, 3.0, 2.0, 3.0, 2.0, 0.0], dtype=np.float32)
    assert survivors(tied, 1, 1.0, 0.0) == [1, 3]
    assert survivors(tied, 3, 1.0, 0.0) == [1, 2, 3, 4]
    assert survivors(tied, 0, 0.01, 0.0) == [1, 3]
    assert survivors(tied, 0, 0.0, 0.0) == [1, 3]
    # Shares of the four survivors of top-k: 0.366, 0.366, 0.134, 0.134.
    assert survivors(tied, 3, 0.73, 0.0) == [1, 3]
    assert survivors(tied, 3, 0.74, 0.0) == [1, 2, 3, 4]
    assert survivors(np.full(9, -7.0, dtype=np.float32), 0, 0.5, 1.0) == list(range(9))
    assert survivors(np.array([-5.0], dtype=np.float32), 3, 0.1, 0.9) == [0]
    masked = np.array([-np.inf, 1.0, -np.inf, 0.0], dtype=np.float32)
    assert survivors(masked, 0, 0.999, 0.0) == [1, 3]
    assert survivors(masked, 2, 1.0, 0.1) == [1, 3]
    assert reference.sample_threshold(tied) == -np.inf
    assert reference.sample_threshold(tied, top_k=6) == -np.inf
    huge = np.array([3e38, -3e38, 2.9e38], dtype=np.float32)
    assert survivors(huge, 0, 0.9, 0.5) == [0]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        pytest.param(0.5, 0, 1.0, 0.0, marks=pytest.mark.slow),
        pytest.param(1.7, 0, 1.0, 0.0, marks=pytest.mark.slow),
        pytest.param(1.0, 8, 1.0, 0.0, marks=pytest.mark.slow),
        pytest.param(0.8, 0, 0.8, 0.0, marks=pytest.mark.slow),
        pytest.param(1.2, 0, 1.0, 0.15, marks=pytest.mark.slow),
        (0.9, 20, 0.9, 0.05),
    ],
)
def test_sample_frequencies(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    logits = (normal(20, 40) * 1.5).astype(np.float32)
    kept = sorted_survivors(logits, top_k, top_p, min_p)
    probability = np.zeros(40)
    probability[kept] = np.exp(logits[kept].astype(np.float64) / temperature)
    probability /= probability.sum()

    threshold = reference.sample_threshold(logits, top_k, top_p, min_p)
    steps = 6000
    drawn = [reference.sample(logits, temperature, threshold, seed=2024, step=i) for i in range(steps)]
    counts = np.bincount(drawn, minlength=40)
    assert set(np.flatnonzero(counts)) <= set(kept)
    expected = probability * steps
    # Rare tokens are counted together: chi-square needs five or so of each.
    rare = expected < 8
    groups = [(counts[i], expected[i]) for i in np.flatnonzero(~rare)]
    if expected[rare].sum() > 1:
        groups.append((counts[rare].sum(), expected[rare].sum()))
    freedom = len(groups) - 1
    chi_square = sum((count - mean) ** 2 / mean for count, mean in groups)
    assert freedom >= 3
    assert (chi_square - freedom) / math.sqrt(2 * freedom) < 4


def test_sample_temperature_zero_ties_and_threshold() -> None:
    logits = np.array([0.5, 2.0, -1.0, 2.0], dtype=np.float32)
    assert {reference.sample(logits, 0.0, -np.inf, seed, 0) for seed in range(20)} == {1}
    assert {reference.sample(logits, 1.0, 2.0, seed, 0) for seed in range(40)} == {1, 3}
    for nothing in (-np.inf, np.inf, np.nan):
        assert {reference.sample(np.full(5, nothing), temperature, -np.inf, 0, 0) for temperature in (0.0, 1.0)} == {5}
    assert reference.sample(np.array([1.0, np.inf, 2.0]), 1.0, -np.inf, 0, 0) == 3
    assert reference.sample(np.array([1.0, np.nan, 2.0]), 0.0, -np.inf, 0, 0) == 2
    # A survivor is drawn even where every other token would win.
    assert reference.sample(np.array([9.0, 1.0, 9.5]), 1.0, 9.5, 0, 0) == 2


def test_sample_is_a_function_of_seed_and_step() -> None:
    logits = normal(21, 200)
    first, again, other = ([reference.sample(logits, 1.0, -np.inf, seed, i) for i in range(60)] for seed in (5, 5, 6))
    assert first == again
    assert sum(a == b for a, b in zip(first, other, strict=True)) < 20
