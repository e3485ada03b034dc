"""Constants and slopes taken out of a score_mod: together they are the function that was traced."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llmcl.attention import masks, tanh, where
from llmcl.attention.tracing.score_form import score_form
from llmcl.attention.tracing.trace import trace_score_mod

BIAS = np.array([0.5, -0.25, 2.0], np.float32)


@pytest.mark.parametrize(
    ("mod", "unit", "factor", "has_slope"),
    [
        (masks.alibi(3), 1.0, 1.0, True),
        (masks.soft_cap(4.0), 0.25, 4.0, False),
        (lambda s, b, h, q_idx, kv_idx: s, 1.0, 1.0, True),
        (lambda s, b, h, q_idx, kv_idx: 0.5 * s, 0.5, 1.0, True),
        (lambda s, b, h, q_idx, kv_idx: s / 4.0 + BIAS[q_idx], 0.25, 1.0, True),
        (lambda s, b, h, q_idx, kv_idx: 3.0 * (s - BIAS[h] * (q_idx - kv_idx)), 1.0, 3.0, True),
        (lambda s, b, h, q_idx, kv_idx: s + -(kv_idx * BIAS[h]), 1.0, 1.0, True),
        (lambda s, b, h, q_idx, kv_idx: -2.0 * s + kv_idx, 1.0, 1.0, False),  # a factor below 0
        (lambda s, b, h, q_idx, kv_idx: s + 0.5 * s, 1.0, 1.0, False),  # two of them
        (lambda s, b, h, q_idx, kv_idx: s * kv_idx, 1.0, 1.0, False),
        (lambda s, b, h, q_idx, kv_idx: s + kv_idx * kv_idx, 1.0, 1.0, False),
        (lambda s, b, h, q_idx, kv_idx: s + abs(q_idx - kv_idx), 1.0, 1.0, False),
        (lambda s, b, h, q_idx, kv_idx: where(q_idx > 1, s * 0.5, s + 1.0), 1.0, 1.0, False),
        (lambda s, b, h, q_idx, kv_idx: kv_idx - q_idx, 1.0, 1.0, False),
    ],
)
def test_what_is_taken_out(mod: Any, unit: float, factor: float, has_slope: bool) -> None:
    form = score_form(trace_score_mod(mod))
    assert (form.unit, form.factor, form.slope is not None) == (unit, factor, has_slope)
    rng = np.random.default_rng(0)
    score, places = rng.uniform(-3, 3, 20), {name: rng.integers(0, 3, 20) for name in ("b", "h", "q_idx", "kv_idx")}

    def value(root: int, **inputs: Any) -> np.ndarray:
        return form.graph.evaluate(root, inputs, np.float64, check_overflow=False)

    expected = trace_score_mod(mod).evaluate(score, **places)
    assert np.allclose(factor * value(form.root, score=unit * score, **places), expected)
    if form.slope is not None:
        first = value(form.root, score=np.zeros(20), **places | {"kv_idx": np.zeros(20, np.int64)})
        along = first + value(form.slope, **places) * places["kv_idx"]
        assert np.allclose(factor * (unit * score + along), expected)


@pytest.mark.parametrize(
    ("mod", "is_soft_cap"),
    [
        (masks.soft_cap(4.0), True),
        (lambda s, b, h, q_idx, kv_idx: tanh(s), True),
        (lambda s, b, h, q_idx, kv_idx: 2.0 * tanh(0.5 * s), True),
        (masks.soft_cap(2000.0), False),
        (lambda s, b, h, q_idx, kv_idx: -2.0 * tanh(s), False),
        (lambda s, b, h, q_idx, kv_idx: 2.0 * tanh(s + 1.0), False),
        (lambda s, b, h, q_idx, kv_idx: 2.0 * tanh(s) + kv_idx, False),
        (masks.alibi(3), False),
        (lambda s, b, h, q_idx, kv_idx: s, False),
    ],
)
def test_what_is_a_soft_cap(mod: Any, is_soft_cap: bool) -> None:
    assert score_form(trace_score_mod(mod)).is_soft_cap == is_soft_cap
