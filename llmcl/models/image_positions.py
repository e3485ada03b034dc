"""Rotary positions on three axes (time, row, column) in texts with images, as Qwen-VL models have them.

    token        a  b  image of 2 x 3   c  d
    cache        0  1  2  3  4  5  6  7  8  9
    time         0  1  2  2  2  2  2  2  5  6
    row          0  1  2  2  2  3  3  3  5  6
    column       0  1  2  3  4  2  3  4  5  6

A text token has the same position on all axes. An image takes as many positions as its longer side, so the tokens after
it have smaller rotary positions than cache positions: their difference is the offset, here -3.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llmcl.models.image_rows import PlacedImage

N_AXES = 3


def rotary_offset(images: Sequence[PlacedImage], position: int) -> int:
    """Returns the rotary position minus the cache position of a text token at `position`. images: in order."""
    before = (image for image in images if image.end <= position)
    return sum(max(image.image.grid) - image.image.n for image in before if image.image.grid is not None)


def on_one_axis(images: Sequence[PlacedImage], first: int, n_tokens: int) -> bool:
    """Returns whether the n_tokens from `first` on have equal positions on all axes, one after the other."""
    end = first + n_tokens
    return not any(image.image.grid and image.first < end and first < image.end for image in images)


def rotary_positions(images: Sequence[PlacedImage], first: int, n_tokens: int) -> np.ndarray:
    """Returns the positions of the n_tokens from `first` on, int32 [n_tokens, 3]. images: of the whole text, in order.

    An image without a grid has the positions of text.
    """
    positions = np.repeat(np.arange(first, first + n_tokens, dtype=np.int32)[:, None], N_AXES, axis=1)
    for placed in images:
        if (grid := placed.image.grid) is None or placed.first >= first + n_tokens:
            continue
        inside = slice(max(placed.first - first, 0), max(placed.end - first, 0))
        start = placed.first + rotary_offset(images, placed.first)
        _, columns = grid
        i = np.arange(placed.image.n, dtype=np.int32)[max(first - placed.first, 0) :][: n_tokens - inside.start]
        positions[inside] = start + np.stack([np.zeros_like(i), i // columns, i % columns], axis=1)
        positions[inside.stop :] += max(grid) - placed.image.n
    return positions
