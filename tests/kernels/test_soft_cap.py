"""soft_cap: largest difference over the cap."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import read_guarded, run, with_poison

from llmcl import reference
from llmcl.ops.soft_cap import soft_cap
from llmcl.runtime.device import Device


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("row", [1, pytest.param(131, marks=pytest.mark.oclgrind), 1024, 5003])
def test_soft_cap(target: Device, row: int, n: int) -> None:
    x = (40.0 * np.random.default_rng(row).standard_normal((n, row))).astype(np.float32)
    x[:, 0] = 1e30  # far beyond the cap, and no NaN
    buffer = with_poison(target, x)
    run(soft_cap(target, buffer, row, 30.0), n)
    actual = read_guarded(target, buffer, np.float32, x.shape)
    assert np.max(np.abs(actual - reference.soft_cap(x, 30.0))) < 30.0 * 1e-6


def test_nothing_is_launched_for_no_cap(target: Device) -> None:
    assert soft_cap(target, with_poison(target, np.zeros(16, np.float32)), 16, None) == []
