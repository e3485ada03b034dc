"""biased_gate: largest difference over the largest expected magnitude."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import poisoned, read_guarded, relative_error, run, with_poison

from llmcl import reference
from llmcl.ops.biased_gate import biased_gate
from llmcl.runtime.device import Device


@pytest.mark.parametrize("gate", ["swiglu", "geglu"])
@pytest.mark.parametrize("n", [1, 17])
@pytest.mark.parametrize("columns", [16, pytest.param(80, marks=pytest.mark.oclgrind), 1040])
def test_biased_gate(target: Device, columns: int, n: int, gate: str) -> None:
    rng = np.random.default_rng(columns)
    rows = (3.0 * rng.standard_normal((2, n, columns))).astype(np.float32)
    bias = rng.standard_normal((2, columns)).astype(np.float32)
    tiles = np.ascontiguousarray(rows.reshape(2, n, -1, 16).transpose(1, 2, 0, 3))
    out = poisoned(target, (n, columns))
    run(biased_gate(target, with_poison(target, tiles), target.upload(bias, "bias"), out, gate), n)
    expected = reference.biased_gate(rows[0], rows[1], bias, gate)
    assert relative_error(read_guarded(target, out, np.float32, (n, columns)), expected) < 1e-6
