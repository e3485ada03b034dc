"""scale_rows: one product in float32, and so exact."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import read_guarded, run, with_poison

from llmcl import reference
from llmcl.ops.scale_rows import scale_rows
from llmcl.runtime.device import Device


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("n", [1, 17])
@pytest.mark.parametrize("columns", [16, pytest.param(80, marks=pytest.mark.oclgrind), 1040])
def test_scale_rows(target: Device, columns: int, n: int, per_row: bool) -> None:
    x = np.random.default_rng(columns).standard_normal((n, columns)).astype(np.float32)
    factor = np.linspace(0.37, 2.0, n if per_row else 1, dtype=np.float32)
    buffer = with_poison(target, x)
    run(scale_rows(target, buffer, target.upload(factor, "factor"), columns, per_row=per_row), n)
    expected = reference.scale_rows(x, factor[:, None]).astype(np.float32)
    np.testing.assert_array_equal(read_guarded(target, buffer, np.float32, x.shape), expected)
