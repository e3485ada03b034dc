"""The memory that kernel tests run in (tests/guard_pages.py)."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import numpy as np
import pytest

from llmcl.runtime.device import Device


@pytest.mark.parametrize("nbytes", [1, 64, 100, 4096, 5000])
def test_nothing_may_be_read_behind_a_buffer(nbytes: int, device: Device) -> None:
    if not (sys.platform == "linux" and (device.entry.fact("is_intel_cpu") or device.entry.fact("is_pocl"))):
        pytest.skip("only buffers of the CPU drivers from pip lie in memory of the tests' own")
    buffer = device.alloc(nbytes, "x")
    assert device.read(buffer, np.uint8, (nbytes,)).tolist() == [0xFF] * nbytes
    memory = buffer.cl.hostbuf
    assert isinstance(memory, np.ndarray)
    end = memory.ctypes.data + -(-nbytes // 64) * 64
    rights = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, access, *_ = line.split()
        rights[int(span.partition("-")[0], 16)] = access
    assert end % mmap.PAGESIZE == 0 and rights[end].startswith("---")
