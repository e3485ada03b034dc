"""On a device that runs ahead a host learns of the end of a step while the next one runs; on others it must not rely on
that.
"""

from __future__ import annotations

import gc
import time
import weakref

import numpy as np
import pyopencl as cl
import pytest
from which_devices import taken

from llmcl.runtime.device import Device
from llmcl.runtime.platforms import DeviceEntry
from llmcl.runtime.staging import send

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
    seconds = []
    for _ in range(5):  # the least: a busy system delays some
        start = time.perf_counter()
        launch.enqueue()
        device.finish()
        seconds.append(time.perf_counter() - start)
    n_next = 1 + int(NEXT_S / min(seconds))
    launch.enqueue()
    read = device.read_async(result, np.empty(groups, np.float32))
    for _ in range(n_next):
        event = launch.enqueue()
    device.flush()
    read()
    assert event is not None and event.command_execution_status != cl.command_execution_status.COMPLETE
    device.finish()


def test_what_is_sent_to_a_device_that_works_does_not_keep_it_open(cl_entry: DeviceEntry) -> None:
    """Not even until the collector comes, since a closed model gives its memory back at once."""
    device = Device(taken(cl_entry, "as a GPU"))
    buffer, given = device.alloc(12, "numbers"), np.arange(3, dtype=np.int32)
    gc.disable()
    try:
        send(device, buffer, given)
        np.testing.assert_array_equal(device.read(buffer, np.int32, (3,)), given)
        gone = weakref.ref(device)
        del buffer, device
        assert gone() is None
    finally:
        gc.enable()
