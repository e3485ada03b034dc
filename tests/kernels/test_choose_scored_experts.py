"""choose_scored_experts: the ids exactly, the weights as largest difference (they are at most the scale)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import poisoned, read_guarded, run, with_poison

from llmcl import reference
from llmcl.ops.choose_experts import choose_scored_experts
from llmcl.runtime.device import Device

TOLERANCE = 2e-6

small = pytest.mark.oclgrind


def chosen(device: Device, logits: np.ndarray, top_k: int, **how: Any) -> tuple[np.ndarray, np.ndarray]:
    n, n_experts = logits.shape
    ids, weights = poisoned(device, (n, top_k)), poisoned(device, (n, top_k))
    if how.get("correction") is not None:
        how["correction"] = with_poison(device, how["correction"])
    given = with_poison(device, logits), ids, weights
    run(choose_scored_experts(device, *given, n_experts=n_experts, top_k=top_k, **how), n)
    return read_guarded(device, ids, np.int32, (n, top_k)), read_guarded(device, weights, np.float32, (n, top_k))


def check(device: Device, n: int, n_experts: int, top_k: int, *, corrected: bool, **how: Any) -> None:
    rng = np.random.default_rng(n_experts + n)
    logits = (2.0 * rng.standard_normal((n, n_experts))).astype(np.float32)
    correction = (0.5 * rng.standard_normal(n_experts)).astype(np.float32) if corrected else None
    ids, weights = chosen(device, logits, top_k, correction=correction, **how)
    expected_ids, expected = reference.choose_scored_experts(logits, top_k, correction=correction, **how)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(weights, expected, rtol=0, atol=TOLERANCE * how["scale"])


@pytest.mark.parametrize(
    ("n", "n_experts", "top_k", "groups", "sigmoid", "corrected", "renormalize"),
    [  # each size with both values of all three, and each three of them
        *(
            (*size, *how)
            for size in [
                (3, 64, 4, (1, 1, 2)),  # GLM-4.7-Flash
                (2, 256, 8, (8, 4, 2)),  # DeepSeek-V3
                (2, 160, 6, (8, 3, 1)),  # DeepSeek-V2
            ]
            for how in [(True, True, True), (False, False, False)]
        ),
        *(
            pytest.param(*size, *how, marks=marks)
            for size, marks in [((5, 20, 3, (5, 2, 2)), [small]), ((2, 6, 2, (6, 3, 2)), [])]  # the last: groups of one
            for how in [(True, True, False), (True, False, False), (False, False, True)]
        ),
    ],
)
def test_choose_scored_experts(
    target: Device,
    n: int,
    n_experts: int,
    top_k: int,
    groups: tuple[int, int, int],
    sigmoid: bool,
    corrected: bool,
    renormalize: bool,
) -> None:
    n_groups, top_groups, per_group = groups
    how = {"n_groups": n_groups, "top_groups": top_groups, "per_group": per_group}
    how |= {"sigmoid": sigmoid, "renormalize": renormalize, "scale": 1.8 if renormalize else 1.0}
    check(target, n, n_experts, top_k, corrected=corrected, **how)


def test_a_group_counts_by_its_best_experts_and_a_correction_only_for_the_choice(target: Device) -> None:
    logits = np.array([[3.0, -9.0, 1.0, 1.0, -3.0, -3.0]], np.float32)  # in pairs
    correction = np.array([0.0, 0.0, 0.0, 0.0, 2.0, 0.0], np.float32)
    how: dict[str, Any] = {"sigmoid": True, "renormalize": False, "n_groups": 3}
    assert chosen(target, logits, 2, **how, top_groups=1, per_group=1)[0].tolist() == [[0, 1]]
    assert chosen(target, logits, 2, **how, top_groups=1, per_group=2)[0].tolist() == [[2, 3]]
    ids, weights = chosen(target, logits, 2, **how, top_groups=1, per_group=2, correction=correction)
    assert ids.tolist() == [[4, 5]]
    np.testing.assert_allclose(weights, 1.0 / (1.0 + np.exp(3.0)), atol=TOLERANCE)


def test_logits_that_are_not_finite_choose_experts_that_there_are(target: Device) -> None:
    """Their ids are addresses of weights."""
    logits = np.array([[np.nan, 1.0, -np.nan, np.inf, np.nan, 0.0], [np.nan] * 6, [-np.inf] * 6], np.float32)
    for sigmoid in (False, True):
        how = {"sigmoid": sigmoid, "renormalize": True, "n_groups": 3, "top_groups": 2, "per_group": 2}
        ids, _ = chosen(target, logits, 3, **how)
        assert all(len(set(row)) == 3 and set(row) <= set(range(6)) for row in ids.tolist())
