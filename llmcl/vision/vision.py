"""Interfaces between a model and its vision tower: pixels, prompt text, rows on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from PIL import Image

from llmcl.errors import UnsupportedModelError, shown
from llmcl.models.image_rows import ImageRows

if TYPE_CHECKING:
    from llmcl.tokenizer import Tokenizer

_STAND_IN = "<pad>"  # Gemma 3's GGUF files have no image token; any token will do, because rows replace the embedding


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


def token_in_text(processor: Processor, tokenizer: Tokenizer) -> tuple[str, int]:
    """Returns the token in prompts for a row, and the token's id. Raises UnsupportedModelError if there is none."""
    for token in (processor.image_token, _STAND_IN):
        if (token_id := tokenizer.id_of(token)) is not None:
            return token, token_id
    raise UnsupportedModelError(
        f"the tokenizer has no token {shown(processor.image_token)} for images; use another model"
    )
