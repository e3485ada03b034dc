"""Interfaces between a model and its vision tower: pixels, prompt text, rows on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from PIL import Image

from llmcl.models.image_rows import ImageRows


@dataclass(frozen=True, eq=False)
class Pixels:
    """A picture, resized, cut and normalised for a tower."""

    values: np.ndarray  # float32, such as [tiles, 3, height, width] or [patches, values]
    grids: Sequence[tuple[int, int]]  # rows and columns of embeddings, per ImageRows
    text: str  # replaces the marker in the prompt; its image tokens get the rows in order
    digest: bytes  # SHA-256 over values and grids


class Processor(Protocol):
    """Prepares pictures on the host like the family's processor in transformers."""

    marker: str  # written by the chat template for a picture
    image_token: str  # its embedding is replaced by a row

    def pixels(self, picture: Image.Image) -> Pixels:
        """Prepares an RGB picture. Raises UsageError for an unsupported size."""


class Tower(Protocol):
    """A vision tower and its projector on the device."""

    def rows(self, pixels: Pixels) -> list[ImageRows]:
        """Computes the rows on the device, ordered like the image tokens in `pixels.text`."""


@dataclass(frozen=True)
class Vision:
    """Processor and tower of a model. `llmcl.vision.load.load_vision` makes them."""

    processor: Processor
    tower: Tower
