"""read_bandwidth: every word is read once, or the xor of what the work-items saw would differ."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import poisoned, read_guarded, run, with_poison

from llmcl.runtime.device import Device
from llmcl.runtime.roofline import read_bandwidth


@pytest.mark.parametrize("width", [1, 64])
@pytest.mark.parametrize(
    ("n", "groups"), [(1, 3), (4, 1), pytest.param(37, 3, marks=pytest.mark.oclgrind), (577, 3), (4096, 7)]
)
def test_read_bandwidth(device: Device, n: int, groups: int, width: int) -> None:
    words = np.random.default_rng(n).integers(0, 1 << 32, n * 16, np.uint32)
    result = poisoned(device, (groups * width,))
    launch = device.launch(
        "portable/read_bandwidth.cl",
        "read_bandwidth",
        {"LOCAL_SIZE": width},
        [with_poison(device, words), result, np.uint64(n)],
        groups=(groups,),
        local=(width,),
    )
    run([launch])
    seen = read_guarded(device, result, np.uint32, (groups * width,))
    assert np.bitwise_xor.reduce(seen) == np.bitwise_xor.reduce(words)


def test_measured_bandwidth_is_a_speed(default_device: Device) -> None:
    assert 1e6 < read_bandwidth(default_device) < 1e14
