"""bias_gelu: largest difference over the largest expected magnitude, 1e-6 in float32."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import read_guarded, relative_error, run, with_poison

from llmcl import reference
from llmcl.ops.bias_gelu import bias_gelu
from llmcl.runtime.device import Device


@pytest.mark.parametrize("tanh", [False, True])
@pytest.mark.parametrize("n", [1, 17])
@pytest.mark.parametrize("columns", [16, pytest.param(80, marks=pytest.mark.oclgrind), 1040])
def test_bias_gelu(target: Device, columns: int, n: int, tanh: bool) -> None:
    rng = np.random.default_rng(columns)
    x = (3.0 * rng.standard_normal((n, columns))).astype(np.float32)
    bias = rng.standard_normal(columns).astype(np.float32)
    buffer = with_poison(target, x)
    run(bias_gelu(target, buffer, target.upload(bias, "bias"), tanh=tanh), n)
    expected = reference.bias_gelu(x, bias, tanh=tanh)
    assert relative_error(read_guarded(target, buffer, np.float32, x.shape), expected) < 1e-6
