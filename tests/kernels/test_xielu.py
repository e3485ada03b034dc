"""xielu: largest difference over the largest expected magnitude."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import read_guarded, relative_error, run, with_poison

from llmcl import reference
from llmcl.ops.xielu import xielu
from llmcl.runtime.device import Device

TOLERANCE = 1e-6


@pytest.mark.parametrize("n", [1, 17])
@pytest.mark.parametrize("columns", [16, pytest.param(80, marks=pytest.mark.oclgrind), 1040])
def test_xielu(target: Device, columns: int, n: int) -> None:
    x = (3.0 * np.random.default_rng(columns).standard_normal((n, columns))).astype(np.float32)
    x[0, :4] = 0.0, -1e-7, 1e-7, -40.0
    curve = np.array([0.8, 0.3, 0.5, -1e-6], np.float32)
    buffer = with_poison(target, x)
    run(xielu(target, buffer, target.upload(curve, "curve"), columns), n)
    actual = read_guarded(target, buffer, np.float32, x.shape)
    assert relative_error(actual, reference.xielu(x, *curve)) < TOLERANCE
