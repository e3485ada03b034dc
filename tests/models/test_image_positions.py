"""Positions of texts with images against transformers' `get_rope_index`."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llmcl.models.image_positions import on_one_axis, rotary_offset, rotary_positions
from llmcl.models.image_rows import ImageRows, PlacedImage

NO_ROWS: Any = None  # positions need no buffer
# texts between images, and the images' rows and columns
TEXTS: dict[str, tuple[list[int], list[tuple[int, int]]]] = {
    "begins with an image": ([0, 9], [(4, 6)]),
    "image in the middle": ([5, 7], [(3, 8)]),
    "ends with an image": ([6, 0], [(7, 3)]),
    "three images": ([2, 1, 4, 3], [(1, 1), (5, 2), (1, 17)]),
    "one token between images": ([1, 1, 1], [(2, 2), (9, 11)]),
}


def placed(texts: list[int], grids: list[tuple[int, int]]) -> tuple[list[PlacedImage], int]:
    """Returns the images and the number of tokens."""
    images, first = [], texts[0]
    for grid, text in zip(grids, texts[1:], strict=True):
        images.append(PlacedImage(first, ImageRows(NO_ROWS, grid[0] * grid[1], b"", grid)))
        first = images[-1].end + text
    return images, first


def of_transformers(family: str, name: str, images: list[PlacedImage], n_tokens: int) -> tuple[np.ndarray, int]:
    import torch

    kind = getattr(import_module(f"transformers.models.{family}.modeling_{family}"), name)
    types = torch.zeros((1, n_tokens), dtype=torch.int32)
    for image in images:
        types[:, image.first : image.end] = 1
    grids = torch.tensor(
        [[1, 2 * image.image.grid[0], 2 * image.image.grid[1]] for image in images if image.image.grid]
    )
    model = SimpleNamespace(config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2)))
    model.config.vision_config.tokens_per_second = 2
    model.get_vision_position_ids = partial(kind.get_vision_position_ids, model)
    positions, delta = kind.get_rope_index(model, torch.zeros((1, n_tokens), dtype=torch.int64), types, grids)
    return positions[:, 0].T.numpy(), int(delta[0, 0])


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize(
    ("family", "model"),
    [("qwen2_vl", "Qwen2VLModel"), ("qwen2_5_vl", "Qwen2_5_VLModel"), ("qwen3_vl", "Qwen3VLModel")],
)
def test_positions_are_those_of_transformers(family: str, model: str, name: str) -> None:
    images, n_tokens = placed(*TEXTS[name])
    expected, delta = of_transformers(family, model, images, n_tokens)
    np.testing.assert_array_equal(rotary_positions(images, 0, n_tokens), expected)
    assert rotary_offset(images, n_tokens) == delta


@pytest.mark.parametrize("name", TEXTS)
def test_a_chunk_has_the_positions_of_the_whole_text(name: str) -> None:
    images, n_tokens = placed(*TEXTS[name])
    whole = rotary_positions(images, 0, n_tokens)
    for first in range(n_tokens):
        for n in range(1, n_tokens - first + 1):
            chunk = rotary_positions(images, first, n)
            np.testing.assert_array_equal(chunk, whole[first : first + n])
            in_a_row = first + rotary_offset(images, first) + np.arange(n)
            plain = (chunk == in_a_row[:, None]).all()
            assert plain or not on_one_axis(images, first, n)


def test_an_image_without_a_grid_has_positions_of_text() -> None:
    images = [PlacedImage(2, ImageRows(NO_ROWS, 6, b""))]
    np.testing.assert_array_equal(rotary_positions(images, 1, 9), np.repeat(np.arange(1, 10)[:, None], 3, axis=1))
    assert rotary_offset(images, 10) == 0 and on_one_axis(images, 0, 10)
