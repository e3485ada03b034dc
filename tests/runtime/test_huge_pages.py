"""Pieces of large pages: apart from each other, aligned, and given back only when nothing uses them any more."""

from __future__ import annotations

import gc
import itertools
import mmap

import numpy as np
import pytest

from llmcl.runtime.device import Device
from llmcl.runtime.huge_pages import BLOCK, HugePages

needs_huge_pages = pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="the system has no such pages")


def address(piece: np.ndarray | None) -> int:
    assert piece is not None
    return int(piece.__array_interface__["data"][0])


@needs_huge_pages
def test_pieces_are_aligned_and_apart() -> None:
    pages = HugePages(lambda: None)
    pieces = [pages.take(n) for n in (1, 4096, 5000, BLOCK // 2, BLOCK // 2, 3 * BLOCK + 1, 10)]
    ranges = sorted((address(piece), address(piece) + len(piece)) for piece in pieces if piece is not None)
    assert len(ranges) == 7 and all(first % 4096 == 0 for first, _ in ranges)
    assert all(end <= first for (_, end), (first, _) in itertools.pairwise(ranges))
    for piece in pieces:
        assert piece is not None and not piece[[0, -1]].any()
        piece[:] = 1


@needs_huge_pages
def test_a_block_is_given_back_after_its_last_piece_and_the_wait() -> None:
    waits: list[int] = []
    pages = HugePages(lambda: waits.append(1))
    first, second = pages.take(BLOCK - 4096), pages.take(4096)
    pages.take(1)  # a new block, so that the allocator holds nothing of the first
    del first
    gc.collect()
    assert not waits and second is not None
    second[:] = 1
    del second
    gc.collect()
    assert len(waits) == 1


@needs_huge_pages
def test_without_memory_there_is_no_block(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert HugePages(lambda: None).take(1 << 60) is None
    gc.collect()
    assert capsys.readouterr().err == ""


def test_a_buffer_of_large_pages_is_a_buffer_like_others(device: Device) -> None:
    buffer = device.alloc(10_000, "streamed", streamed=True)
    values = np.arange(10_000, dtype=np.int64).astype(np.uint8)
    device.write(buffer, values)
    device.fill(buffer, np.uint32(7), 400, 40)
    values[400:440] = np.full(10, 7, np.uint32).view(np.uint8)
    assert np.array_equal(device.read(buffer, np.uint8, (10_000,)), values)
    buffer.release()
