"""layer_norm: largest difference over the largest expected magnitude, 1e-5 in float32."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import read_guarded, relative_error, run, with_poison

from llmcl import reference
from llmcl.ops.layer_norm import layer_norm
from llmcl.runtime.device import Device


@pytest.mark.parametrize("n", [1, 17])
@pytest.mark.parametrize("hidden", [16, pytest.param(80, marks=pytest.mark.oclgrind), 1040])
@pytest.mark.parametrize("mean", [0.0, 30.0])
def test_layer_norm(target: Device, hidden: int, n: int, mean: float) -> None:
    """Of rows far from 0, too, where mean(x^2) - mean(x)^2 would lose digits."""
    rng = np.random.default_rng(hidden)
    x = (mean + rng.standard_normal((n, hidden))).astype(np.float32)
    weight, bias = rng.standard_normal((2, hidden)).astype(np.float32)
    buffer = with_poison(target, x)
    run(layer_norm(target, buffer, target.upload(weight, "weight"), target.upload(bias, "bias"), 1e-12), n)
    expected = reference.layer_norm(x, weight, bias, 1e-12)
    assert relative_error(read_guarded(target, buffer, np.float32, x.shape), expected) < 1e-5
