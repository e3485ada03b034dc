"""last_token: rows are moved bit for bit, and the state with them; what lies between keeps its place."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import read_guarded, run, with_poison

from llmcl.kernels.common.step_state import StepState
from llmcl.ops.last_token import last_row, last_token
from llmcl.runtime.device import Device


@pytest.mark.oclgrind
@pytest.mark.parametrize("n", [1, 2, 5])
def test_last_token(device: Device, n: int) -> None:
    rng = np.random.default_rng(n)
    x, qkv = (rng.standard_normal((n, k)).astype(np.float32) for k in (48, 301))
    step = StepState(device, n, 2)
    device.write(step.state, np.array([7, n, 3, 11, 12], np.int32))
    buffers = with_poison(device, x), with_poison(device, qkv)
    run(last_token(device, step, *buffers, hidden=48, columns=301), n)
    for buffer, rows in zip(buffers, (x, qkv), strict=True):
        expected = rows.copy()
        expected[0] = rows[-1]
        np.testing.assert_array_equal(read_guarded(device, buffer, np.float32, rows.shape), expected)
    np.testing.assert_array_equal(device.read(step.state, np.int32, (5,)), [6 + n, 1, 3, 11, 12])


@pytest.mark.oclgrind
def test_last_row_leaves_the_state(device: Device) -> None:
    rows = np.random.default_rng(0).standard_normal((5, 301)).astype(np.float32)
    step = StepState(device, 5)
    device.write(step.state, np.array([7, 5, 3], np.int32))
    buffer = with_poison(device, rows)
    run(last_row(device, step, buffer, 301), 5)
    expected = rows.copy()
    expected[0] = rows[-1]
    np.testing.assert_array_equal(read_guarded(device, buffer, np.float32, rows.shape), expected)
    np.testing.assert_array_equal(device.read(step.state, np.int32, (3,)), [7, 5, 3])
