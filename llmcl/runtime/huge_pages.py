"""Host memory in 2 MiB pages for the weights, which a CPU device reads from end to end in every step.

A processor streaming through 4 KiB pages needs a page lookup every 64 cache lines and does not prefetch across pages.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable

import numpy as np

PAGE = 2 << 20
BLOCK = 16 * PAGE
ALIGNMENT = 4096


class _Block(mmap.mmap):
    """Anonymous memory, freed only after a call of `before_freeing`."""

    before_freeing: Callable[[], None] = staticmethod(lambda: None)  # mmap may fail before it is set

    def __del__(self) -> None:
        self.before_freeing()


class HugePages:
    """Cuts blocks of huge pages into buffers. A block is freed with its last buffer."""

    def __init__(self, before_freeing: Callable[[], None]):
        """before_freeing: waits until no device uses the memory."""
        self._before_freeing = before_freeing
        self._rest = np.empty(0, np.uint8)

    def take(self, nbytes: int) -> np.ndarray | None:
        """Returns zeros, uint8 [nbytes], at a multiple of 4096; None if the system has no huge pages, or no memory."""
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        if size > len(self._rest):
            if not hasattr(mmap, "MADV_HUGEPAGE"):
                return None
            try:
                self._rest = self._block(max(BLOCK, -(-size // PAGE) * PAGE))
            except OSError:
                return None
        piece, self._rest = self._rest[:nbytes], self._rest[size:]
        return piece

    def _block(self, size: int) -> np.ndarray:
        block = _Block(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        block.before_freeing = self._before_freeing
        block.madvise(mmap.MADV_HUGEPAGE)
        memory = np.frombuffer(block, np.uint8)
        start = -int(memory.__array_interface__["data"][0]) % PAGE
        return memory[start : start + size]
