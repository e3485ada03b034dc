"""mean_rows: largest difference over the largest expected magnitude."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import poisoned, read_guarded, relative_error, run

from llmcl import reference
from llmcl.ops.mean_rows import mean_rows
from llmcl.runtime.device import Device


@pytest.mark.parametrize("n", [1, 17])
@pytest.mark.parametrize("columns", [16, pytest.param(80, marks=pytest.mark.oclgrind), 1152])
@pytest.mark.parametrize("n_rows", [1, 16])
def test_mean_rows(target: Device, columns: int, n_rows: int, n: int) -> None:
    x = np.random.default_rng(columns).standard_normal((n * n_rows, columns)).astype(np.float32)
    out = poisoned(target, (n, columns))
    run(mean_rows(target, target.upload(x, "x"), out, n_rows=n_rows, columns=columns), n)
    actual = read_guarded(target, out, np.float32, (n, columns))
    assert relative_error(actual, reference.mean_rows(x, n_rows)) < 1e-6
