"""sigmoid_gate: largest difference over the largest expected magnitude."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import read_guarded, relative_error, run, with_poison

from llmcl import reference
from llmcl.ops.sigmoid_gate import sigmoid_gate
from llmcl.runtime.device import Device

TOLERANCE = 2e-6


@pytest.mark.parametrize(("n", "columns"), [(1, 16), (3, 1040), (2, 2064)])
def test_sigmoid_gate(target: Device, n: int, columns: int) -> None:
    x, gate = np.random.default_rng(n).standard_normal((2, n, columns)).astype(np.float32)
    gate[0, :4] = -90.0, 90.0, -200.0, 200.0
    buffer = with_poison(target, x)
    run(sigmoid_gate(target, buffer, with_poison(target, gate), columns=columns), n)
    expected = reference.sigmoid_gate(x, np.clip(gate, -600, 600))
    assert relative_error(read_guarded(target, buffer, np.float32, x.shape), expected) < TOLERANCE


@pytest.mark.parametrize(("n", "columns", "gate_row"), [(1, 16, 1), (3, 1040, 7)])
def test_one_gate_a_row(target: Device, n: int, columns: int, gate_row: int) -> None:
    x, gate = (np.random.default_rng(n).standard_normal((n, size)).astype(np.float32) for size in (columns, gate_row))
    buffer = with_poison(target, x)
    run(sigmoid_gate(target, buffer, with_poison(target, gate), columns=columns, gate_row=gate_row), n)
    expected = reference.sigmoid_gate(x, gate[:, -1:])
    assert relative_error(read_guarded(target, buffer, np.float32, x.shape), expected) < TOLERANCE
