"""pool: a mean in float32 within 1e-6 of the twin relative to the rows; the other poolings copy, and so are exact."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import read_guarded, relative_error, run, with_poison

from llmcl import reference
from llmcl.architectures.embedding import POOLINGS, Pooling
from llmcl.kernels.common.step_state import StepState
from llmcl.ops.pool import pool
from llmcl.runtime.device import Device

ROW = 2


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("hidden", [16, pytest.param(80, marks=pytest.mark.oclgrind), 1040])
@pytest.mark.parametrize("steps", [(1,), pytest.param((17, 1, 5), marks=pytest.mark.oclgrind), (577,)])
def test_pool(target: Device, pooling: Pooling, hidden: int, steps: tuple[int, ...]) -> None:
    """A text of several steps, in a row behind two others."""
    rows = np.random.default_rng(hidden).standard_normal((sum(steps), hidden)).astype(np.float32)
    step = StepState(target, max(steps))
    pooled = with_poison(target, np.full((ROW + 1, hidden), np.nan, np.float32))
    done = 0
    for n in steps:
        x = with_poison(target, rows[done : done + n])
        step.write_tokens([0] * n, done)
        run([pool(target, step, x, pooled, pooling, ROW, hidden)], n)
        done += n
    found = read_guarded(target, pooled, np.float32, (ROW + 1, hidden))
    assert np.isnan(found[:ROW]).all()
    assert relative_error(found[ROW], reference.pool(rows, pooling)) < (1e-6 if pooling == "mean" else 1e-12)
