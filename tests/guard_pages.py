"""Buffers for CPU drivers that end where a page begins that nobody may touch, and hold NaNs at first."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import pyopencl as cl

from llmcl.runtime.device import Buffer, Device

ALIGNMENT = 64  # of a buffer's first byte, which vectors are read from


class _Pages(mmap.mmap):
    """Memory that is given back only when the device has done what was enqueued."""

    queue: cl.CommandQueue

    def __del__(self) -> None:
        self.queue.finish()


def alloc_guarded(device: Device, nbytes: int, name: str) -> Buffer:
    """As `Device.alloc`; the guard begins right behind the last byte, rounded up to 64 bytes."""
    size = -(-max(nbytes, 4) // ALIGNMENT) * ALIGNMENT
    pages = _Pages(-1, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE + mmap.PAGESIZE)
    pages.queue = device.queue
    memory = np.frombuffer(pages, np.uint8)
    memory[:] = 0xFF
    end = len(memory) - mmap.PAGESIZE
    guard = ctypes.c_void_p(memory.ctypes.data + end)
    if ctypes.CDLL(None).mprotect(guard, ctypes.c_size_t(mmap.PAGESIZE), 0):
        raise OSError("mprotect failed")
    flags = cl.mem_flags.READ_WRITE | cl.mem_flags.USE_HOST_PTR
    part = memory[end - size :][: max(nbytes, 4)]
    device.allocated_bytes += nbytes
    device.peak_bytes = max(device.peak_bytes, device.allocated_bytes)
    return Buffer(device, cl.Buffer(device.context, flags, hostbuf=part), nbytes, name)
