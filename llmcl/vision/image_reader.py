"""Prepares pictures for a model and computes their rows. Both are kept: a conversation brings its images again."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:  # imported late: needs Pillow
    from llmcl.models.image_rows import ImageRows
    from llmcl.vision.vision import Pixels, Processor, Vision

MAX_KEPT_BYTES = 256 << 20  # of pixels in the host's memory, and of rows in the device's

T = TypeVar("T")


class _Kept(Generic[T]):
    """The most recently used values by key, limited by size."""

    def __init__(self, size: Callable[[T], int]):
        self._size = size
        self._values: OrderedDict[bytes, T] = OrderedDict()
        self._lock = Lock()

    def get(self, key: bytes) -> T | None:
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def add(self, key: bytes, value: T) -> None:
        with self._lock:
            self._values[key] = value
            while sum(map(self._size, self._values.values())) > MAX_KEPT_BYTES and len(self._values) > 1:
                self._values.popitem(last=False)

    def clear(self) -> None:
        with self._lock:
            self._values.clear()


class ImageReader:
    """Reads images for a model. Any thread may call it; the tower runs for one at a time."""

    def __init__(self, vision: Vision):
        self._vision = vision
        self._pixels: _Kept[Pixels] = _Kept(lambda pixels: pixels.values.nbytes)
        self._rows: _Kept[Sequence[ImageRows]] = _Kept(_n_bytes)
        self._tower = Lock()

    @property
    def processor(self) -> Processor:
        return self._vision.processor

    def pixels(self, data: bytes) -> Pixels:
        """Prepares a picture file. Raises UsageError for one that is damaged, too large or of another type."""
        from llmcl.vision.picture import read_picture

        key = hashlib.sha256(data).digest()
        if (pixels := self._pixels.get(key)) is None:
            pixels = self.processor.pixels(read_picture(data, "the image"))
            self._pixels.add(key, pixels)
        return pixels

    def rows(self, pixels: Pixels) -> Sequence[ImageRows]:
        """Returns what stands in place of the embeddings of an image's tokens."""
        with self._tower:
            if (rows := self._rows.get(pixels.digest)) is None:
                rows = self._vision.tower.rows(pixels)
                self._rows.add(pixels.digest, rows)
            return rows

    def give_back(self) -> None:
        """Releases rows that no request uses. The device asks for it when memory is scarce."""
        self._rows.clear()


def _n_bytes(rows: Sequence[ImageRows]) -> int:
    return sum(buffer.nbytes for each in rows for buffer in (each.rows, *each.deepstack))
