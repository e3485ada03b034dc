"""center_rows: largest difference over the largest expected magnitude."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import read_guarded, relative_error, run, with_poison

from llmcl import reference
from llmcl.ops.center_rows import center_rows
from llmcl.runtime.device import Device

TOLERANCE = 1e-6


@pytest.mark.parametrize("n", [1, 17])
@pytest.mark.parametrize("columns", [16, pytest.param(80, marks=pytest.mark.oclgrind), 1040])
def test_center_rows(target: Device, columns: int, n: int) -> None:
    x = (np.random.default_rng(columns).standard_normal((n, columns)) + np.arange(n)[:, None]).astype(np.float32)
    buffer = with_poison(target, x)
    run(center_rows(target, buffer, columns), n)
    actual = read_guarded(target, buffer, np.float32, x.shape)
    assert relative_error(actual, reference.center_rows(x)) < TOLERANCE
