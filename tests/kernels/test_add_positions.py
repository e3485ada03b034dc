"""add_positions: two additions in float32, within 2e-7 of the largest value."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import read_guarded, relative_error, run, step_state_at, with_poison

from llmcl import reference
from llmcl.ops.add_positions import add_positions
from llmcl.runtime.device import Device


@pytest.mark.parametrize(("n", "position", "second"), [(1, 0, 99), (17, 3, 99), (17, 3, 10)])
@pytest.mark.parametrize("columns", [16, pytest.param(80, marks=pytest.mark.oclgrind), 1040])
def test_add_positions(target: Device, columns: int, n: int, position: int, second: int) -> None:
    rng = np.random.default_rng(columns)
    x, positions = (rng.standard_normal((rows, columns)).astype(np.float32) for rows in (n, position + n))
    types = rng.standard_normal((2 if second < 99 else 1, columns)).astype(np.float32)
    buffer, step = with_poison(target, x), step_state_at(target, position=position, n_tokens=n)
    tables = with_poison(target, positions), with_poison(target, types), target.upload(np.int32([second]), "second")
    run(add_positions(target, step, buffer, *tables, columns), n)
    expected = reference.add_positions(x, positions, types, position, second)
    assert relative_error(read_guarded(target, buffer, np.float32, x.shape), expected) < 2e-7
