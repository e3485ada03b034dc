"""On a device that runs ahead a host learns of the end of a step while the next one runs; on others it must not rely on
that.
"""

from __future__ import annotations

import time

import numpy as np
import pyopencl as cl
import pytest

from llmcl.runtime.device import Device

NEXT_S = 0.3  # that the next step takes, more than a busy system keeps the host waiting


def test_a_step_is_read_while_the_next_one_runs(device: Device) -> None:
    if not device.runs_ahead:
        pytest.skip("its host waits for a step before it enqueues the next one")
    groups = 64 * device.compute_units
    result = device.alloc(4 * groups, "result")
    args = [result, np.float32(0.5), np.float32(1.0)]
    constants = {"WIDTH": 1, "CHAINS": 8, "ROUNDS": 1 << 12}
    launch = device.launch(
        "portable/arithmetic_peak.cl", "arithmetic_peak", constants, args, groups=(groups,), local=(1,)
    )
    launch.enqueue()
    device.finish()
    start = time.perf_counter()
    launch.enqueue()
    device.finish()
    n_next = 1 + int(NEXT_S / (time.perf_counter() - start))
    launch.enqueue()
    read = device.read_async(result, np.empty(groups, np.float32))
    for _ in range(n_next):
        event = launch.enqueue()
    device.flush()
    read()
    assert event is not None and event.command_execution_status != cl.command_execution_status.COMPLETE
    device.finish()
