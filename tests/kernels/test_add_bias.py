"""add_bias: one addition in float32, and so exact."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import read_guarded, run, with_poison

from llmcl import reference
from llmcl.ops.add_bias import add_bias
from llmcl.runtime.device import Device


@pytest.mark.parametrize("n", [1, 17])
@pytest.mark.parametrize("columns", [16, pytest.param(80, marks=pytest.mark.oclgrind), 1040])
def test_add_bias(target: Device, columns: int, n: int) -> None:
    rng = np.random.default_rng(columns)
    x = rng.standard_normal((n, columns)).astype(np.float32)
    bias = rng.standard_normal(columns).astype(np.float32)
    buffer = with_poison(target, x)
    run(add_bias(target, buffer, target.upload(bias, "bias")), n)
    expected = reference.add_bias(x, bias).astype(np.float32)
    np.testing.assert_array_equal(read_guarded(target, buffer, np.float32, x.shape), expected)
