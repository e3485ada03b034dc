"""Host memory in pages of 2 MiB, for what a CPU device reads from end to end in every step: the weights.

A processor that streams through pages of 4 KiB looks up a page for every 64 cache lines and prefetches none beyond.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable

import numpy as np

PAGE = 2 << 20
BLOCK = 16 * PAGE
ALIGNMENT = 4096


class _Block(mmap.mmap):
    """Anonymous memory that is given back only after `before_freeing` was called."""

    before_freeing: Callable[[], None]

    def __del__(self) -> None:
        self.before_freeing()


class HugePages:
    """Cuts blocks of large pages into pieces. A block is given back when nobody holds a piece of it any more."""

    def __init__(self, before_freeing: Callable[[], None]):
        """before_freeing: waits until no device uses what was given out."""
        self._before_freeing = before_freeing
        self._rest = np.empty(0, np.uint8)

    def take(self, nbytes: int) -> np.ndarray | None:
        """Zeros, uint8 [nbytes], at a multiple of 4096; None where the system has no such pages."""
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        if size > len(self._rest):
            if not hasattr(mmap, "MADV_HUGEPAGE"):
                return None
            self._rest = self._block(max(BLOCK, -(-size // PAGE) * PAGE))
        piece, self._rest = self._rest[:nbytes], self._rest[size:]
        return piece

    def _block(self, size: int) -> np.ndarray:
        block = _Block(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        block.before_freeing = self._before_freeing
        block.madvise(mmap.MADV_HUGEPAGE)
        memory = np.frombuffer(block, np.uint8)
        start = -int(memory.__array_interface__["data"][0]) % PAGE
        return memory[start : start + size]
