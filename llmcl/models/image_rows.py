"""Images in a text: rows that stand in place of the embeddings of their tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import shake_128

import numpy as np

from llmcl.runtime.device import Buffer


@dataclass(frozen=True, eq=False)
class ImageRows:
    """An image, or a tile of one, as the model reads it. Its tokens follow one another in the text.

    Source: the output of a vision tower after its projector.
    """

    rows: Buffer  # float32 [n, hidden] on the model's device
    n: int
    digest: bytes  # of the pixels and of how they were prepared; equal digests have equal rows
    grid: tuple[int, int] | None = None  # rows and columns, for rotary positions on several axes; None: as text
    deepstack: tuple[Buffer, ...] = ()  # float32 [n, hidden] each, added after the first layers (Qwen3-VL)
    start: int = 0  # index of its first row in the buffer
    two_way: bool = False  # its tokens attend to each other in both directions (Gemma 3)


@dataclass(frozen=True, eq=False)
class PlacedImage:
    """An image at its place in a text."""

    first: int  # index of its first token in the text
    image: ImageRows
    token: int = 0  # id of its tokens, once `keyed` has replaced them in the text

    @property
    def end(self) -> int:
        return self.first + self.image.n


def images_before(images: Iterable[PlacedImage], position: int) -> list[PlacedImage]:
    """Returns the images of a text's first `position` tokens. An image at the cut keeps its first rows."""
    kept = [placed for placed in images if placed.first < position]
    if kept and kept[-1].end > position:
        last = kept.pop()
        kept.append(replace(last, image=replace(last.image, n=position - last.first)))
    return kept


def keyed(token_ids: Sequence[int], images: Sequence[PlacedImage]) -> tuple[list[int], list[PlacedImage]]:
    """Returns the text with negative ids for image tokens, from the image's digest, and the images with their token.

    Texts with equal ids then have equal keys and values, so caches compare ids alone.
    """
    ids, placed = [*token_ids], []
    for image in images:
        values = np.frombuffer(shake_128(image.image.digest).digest(4 * image.image.n), "<u4") >> 1
        ids[image.first : image.end] = (-1 - values.astype(np.int64)).tolist()
        placed.append(replace(image, token=int(token_ids[image.first])))
    return ids, placed


def on_device(token_ids: Sequence[int], images: Sequence[PlacedImage], first: int) -> Sequence[int]:
    """Returns the text from position `first` on with the vocabulary's ids for image tokens. images: of the text."""
    if not images:
        return token_ids
    ids, end = [*token_ids], first + len(token_ids)
    for image in images:
        start, stop = max(image.first, first) - first, min(image.end, end) - first
        if start < stop:
            ids[start:stop] = [image.token] * (stop - start)
    return ids


def not_inside(images: Iterable[PlacedImage], position: int) -> int:
    """Returns the position, or the start of an image with two-way attention if the position lies inside."""
    inside = (image.first for image in images if image.image.two_way and image.first < position < image.end)
    return next(inside, position)
