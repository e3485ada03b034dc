"""squared_relu: largest difference over the largest expected magnitude."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import read_guarded, relative_error, run, with_poison

from llmcl import reference
from llmcl.ops.squared_relu import squared_relu
from llmcl.runtime.device import Device


@pytest.mark.parametrize(("n", "columns"), [(1, 16), pytest.param(3, 48, marks=pytest.mark.oclgrind), (17, 1104)])
def test_squared_relu(target: Device, n: int, columns: int) -> None:
    x = np.random.default_rng(n).standard_normal((n, columns)).astype(np.float32)
    buffer = with_poison(target, x)
    run(squared_relu(target, buffer, columns), n)
    assert relative_error(read_guarded(target, buffer, np.float32, x.shape), reference.squared_relu(x)) < 1e-6
