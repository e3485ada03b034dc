"""Prepares pictures for a model and computes rows. Both are kept: a conversation brings its images again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Generic, TypeVar

from llmcl.models.image_rows import ImageRows
from llmcl.runtime import driver_calls
from llmcl.vision.picture import Source, picture_key, read_picture, whole_file
from llmcl.vision.vision import Pixels, Vision

MAX_KEPT_BYTES = 256 << 20  # pixels in host memory; as much again for rows in device memory

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
    """Reads images for a model, from any thread. The tower runs for one image at a time."""

    def __init__(self, vision: Vision):
        self.vision = vision
        self._pixels: _Kept[Pixels] = _Kept(lambda pixels: pixels.values.nbytes)
        self._rows: _Kept[Sequence[ImageRows]] = _Kept(_n_bytes)
        self._tower = Lock()

    def pixels(self, source: Source, name: str = "the image") -> Pixels:
        """Prepares a picture. name: for messages. Raises the errors of `read_picture`."""
        picture = whole_file(source, name)
        key = picture_key(picture)
        if (pixels := self._pixels.get(key)) is None:
            pixels = self.vision.processor.pixels(read_picture(picture, name))
            self._pixels.add(key, pixels)
        return pixels

    def rows(self, pixels: Pixels) -> Sequence[ImageRows]:
        """Returns the rows that replace the embeddings of image tokens, computed or kept."""
        with self._tower:
            if (rows := self._rows.get(pixels.digest)) is None:
                driver_calls.check()
                rows = self.vision.tower.rows(pixels)
                self._rows.add(pixels.digest, rows)
            return rows

    def give_back(self) -> None:
        """Releases rows that no prompt uses. The device calls this when memory is scarce."""
        self._rows.clear()


def _n_bytes(rows: Sequence[ImageRows]) -> int:
    buffers = {id(buffer): buffer for each in rows for buffer in (each.rows, *each.deepstack)}
    return sum(buffer.nbytes for buffer in buffers.values())
