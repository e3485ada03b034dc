"""arithmetic_peak: every round of every chain is computed, or the sums would differ."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import poisoned, read_guarded, relative_error, run

from llmcl.runtime.device import Device
from llmcl.runtime.roofline import CHAINS, arithmetic_peak


@pytest.mark.parametrize("width", [1, 16])
@pytest.mark.parametrize("rounds", [1, pytest.param(5, marks=pytest.mark.oclgrind)])
def test_arithmetic_peak(device: Device, width: int, rounds: int) -> None:
    n = 6
    result = poisoned(device, (n,))
    launch = device.launch(
        "portable/arithmetic_peak.cl",
        "arithmetic_peak",
        {"WIDTH": width, "ROUNDS": rounds, "CHAINS": CHAINS},
        [result, np.float32(0.5), np.float32(3.0)],
        groups=(n // 2,),
        local=(2,),
    )
    run([launch])
    x = np.arange(n)[:, None] + np.arange(CHAINS, dtype=np.float64)
    for _ in range(rounds):
        x = x * 0.5 + 3.0
    assert relative_error(read_guarded(device, result, np.float32, (n,)), x.sum(1)) < 1e-6


def test_measured_peak_is_a_speed(default_device: Device) -> None:
    assert 1e8 < arithmetic_peak(default_device) < 1e17
