"""Memory for CPU drivers that ends where a page begins that nobody may touch, and holds NaNs at first."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np

from llmcl.runtime.huge_pages import HugePages, _Block

ALIGNMENT = 64  # of a buffer's first byte, which vectors are read from


def take_guarded(pages: HugePages, nbytes: int) -> np.ndarray:
    """As `HugePages.take`; the guard begins right behind the last byte, rounded up to 64 bytes."""
    size = -(-nbytes // ALIGNMENT) * ALIGNMENT
    block = _Block(-1, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE + mmap.PAGESIZE)
    block.before_freeing = pages._before_freeing
    memory = np.frombuffer(block, np.uint8)
    memory[:] = 0xFF
    end = len(memory) - mmap.PAGESIZE
    guard = ctypes.c_void_p(memory.ctypes.data + end)
    if ctypes.CDLL(None).mprotect(guard, ctypes.c_size_t(mmap.PAGESIZE), 0):
        raise OSError("mprotect failed")
    return memory[end - size :][:nbytes]
