"""choose_experts: the ids exactly, the weights as largest difference (they are at most 1)."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import poisoned, read_guarded, run, with_poison

from llmcl import reference
from llmcl.ops.choose_experts import choose_experts
from llmcl.runtime.device import Device

TOLERANCE = 1e-6

small = pytest.mark.oclgrind


def chosen(
    device: Device, logits: np.ndarray, top_k: int, *, renormalize: bool, bias: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    n, n_experts = logits.shape
    ids, weights = poisoned(device, (n, top_k)), poisoned(device, (n, top_k))
    how = {"n_experts": n_experts, "top_k": top_k, "renormalize": renormalize}
    given = None if bias is None else with_poison(device, bias)
    run(choose_experts(device, with_poison(device, logits), ids, weights, **how, bias=given), n)
    return read_guarded(device, ids, np.int32, (n, top_k)), read_guarded(device, weights, np.float32, (n, top_k))


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(
    ("n", "n_experts", "top_k"),
    [(1, 128, 8), (3, 8, 2), (17, 40, 8), (2, 5, 5), (2, 200, 6), pytest.param(2, 20, 3, marks=small)],
)
def test_choose_experts(target: Device, n: int, n_experts: int, top_k: int, renormalize: bool) -> None:
    logits = (3.0 * np.random.default_rng(n_experts).standard_normal((n, n_experts))).astype(np.float32)
    ids, weights = chosen(target, logits, top_k, renormalize=renormalize)
    expected_ids, expected = reference.choose_experts(logits, top_k, renormalize=renormalize)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(weights, expected, rtol=0, atol=TOLERANCE)


def test_a_bias_is_part_of_the_logits(target: Device) -> None:
    rng = np.random.default_rng(3)
    logits, bias = rng.standard_normal((2, 9)).astype(np.float32), (2.0 * rng.standard_normal(9)).astype(np.float32)
    for renormalize in (False, True):
        ids, weights = chosen(target, logits, 3, renormalize=renormalize, bias=bias)
        expected_ids, expected = reference.choose_experts(logits, 3, renormalize=renormalize, bias=bias)
        np.testing.assert_array_equal(ids, expected_ids)
        np.testing.assert_allclose(weights, expected, rtol=0, atol=TOLERANCE)


def test_what_follows_the_logits_in_a_row_does_not_count(target: Device) -> None:
    rows = np.random.default_rng(5).standard_normal((3, 12)).astype(np.float32)
    rows[:, 9:] = 99.0
    ids, weights = poisoned(target, (3, 2)), poisoned(target, (3, 2))
    given = {"n_experts": 9, "top_k": 2, "renormalize": False, "row": 12}
    run(choose_experts(target, with_poison(target, rows), ids, weights, **given), 3)
    expected_ids, expected = reference.choose_experts(rows[:, :9], 2, renormalize=False)
    np.testing.assert_array_equal(read_guarded(target, ids, np.int32, (3, 2)), expected_ids)
    np.testing.assert_allclose(read_guarded(target, weights, np.float32, (3, 2)), expected, rtol=0, atol=TOLERANCE)


def test_of_equal_logits_the_lower_experts_are_chosen(target: Device) -> None:
    logits = np.array([[1.0, 2.0, 2.0, 2.0, 0.0, 2.0]], np.float32)
    ids, weights = chosen(target, logits, 3, renormalize=True)
    assert ids.tolist() == [[1, 2, 3]]
    np.testing.assert_allclose(weights, 1 / 3, atol=TOLERANCE)


def test_large_logits_do_not_overflow(target: Device) -> None:
    logits = np.array([[-3e38, 3e38, 2e38, 0.0]], np.float32)
    ids, weights = chosen(target, logits, 2, renormalize=False)
    assert ids.tolist() == [[1, 2]]
    assert weights.tolist() == [[1.0, 0.0]]


def test_logits_that_are_not_finite_choose_experts_that_there_are(target: Device) -> None:
    """Their ids are addresses of weights; the weights tell that something is wrong."""
    logits = np.array([[np.nan, 1.0, -np.nan, np.inf, np.nan], [np.nan] * 5, [-np.inf] * 5], np.float32)
    ids, weights = chosen(target, logits, 3, renormalize=True)
    assert all(len(set(row)) == 3 and set(row) <= set(range(5)) for row in ids.tolist())
    assert np.isnan(weights).all()
