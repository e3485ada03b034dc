"""Images in SmolVLM, SmolVLM2 and Idefics3: tiles and the whole picture, read by SigLIP, cells of patches joined."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

import numpy as np
from PIL import Image

from llmcl.architectures.config.reader import Reader
from llmcl.checkpoint.tensors import StoredTensor
from llmcl.errors import UnsupportedModelError
from llmcl.vision.files import VisionFiles
from llmcl.vision.normalize import Normalizer
from llmcl.vision.siglip import MAX_SIDE, Projector, SiglipSettings, SiglipTower, hf_tensors
from llmcl.vision.vision import Pixels, Vision

LARGEST = 4096  # pixels per side of a resized picture
_CELL = 2
_PROJECTION = "projector.modality_projection.proj.weight"
_MMPROJ_NAMES = {"mm.model.fc.weight": _PROJECTION}
_FAKE, _GLOBAL = "<fake_token_around_image>", "<global-img>"


@dataclass(eq=False)
class Idefics3Processor:
    """Cuts a picture into tiles, row by row. The whole picture, as one tile, comes last."""

    normalizer: Normalizer
    side: int  # pixels of a tile
    longest: int  # pixels of the resized picture's longer side
    splits: bool  # False: the whole picture only
    n_tokens: int  # per tile
    marker: str = "<image>"
    image_token: str = "<image>"

    def pixels(self, picture: Image.Image) -> Pixels:
        side, normalizer = self.side, self.normalizer
        picture = normalizer.resized(picture, *_longest_side(picture.width, picture.height, self.longest))
        rows = columns = 0
        tiles = []
        if self.splits:
            picture = normalizer.resized(picture, *_whole_tiles(picture.width, picture.height, side))
            if max(picture.size) > side:
                rows, columns = picture.height // side, picture.width // side
                corners = [(side * column, side * row) for row in range(rows) for column in range(columns)]
                tiles = [picture.crop((x, y, x + side, y + side)) for x, y in corners]
        tiles.append(normalizer.resized(picture, side, side))
        values = np.stack([normalizer.values(tile) for tile in tiles])
        grid = int(self.n_tokens**0.5)
        digest = hashlib.sha256(values.tobytes()).digest()
        return Pixels(values, [(grid, grid)] * len(tiles), self._text(rows, columns), digest)

    def _text(self, rows: int, columns: int) -> str:
        image, text = self.image_token * self.n_tokens, ""
        for row in range(rows):
            text += "".join(f"{_FAKE}<row_{row + 1}_col_{column + 1}>{image}" for column in range(columns)) + "\n"
        return f"{text}{chr(10) if rows else ''}{_FAKE}{_GLOBAL}{image}{_FAKE}"


def _longest_side(width: int, height: int, longest: int) -> tuple[int, int]:
    """Returns the size (width, height) whose longer side is `longest`, at most LARGEST. The shorter one is even."""
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2
    else:
        width, height = int(longest * ratio), longest
        width += width % 2
    width, height = max(width, 1), max(height, 1)
    ratio = width / height
    if width >= height and width > LARGEST:
        width, height = LARGEST, int(LARGEST / ratio)
    elif height > width and height > LARGEST:
        width, height = int(LARGEST * ratio), LARGEST
    return max(width, 1), max(height, 1)


def _whole_tiles(width: int, height: int, side: int) -> tuple[int, int]:
    """Returns the size (width, height) rounded up to whole tiles, the longer side first."""
    ratio = width / height
    if width >= height:
        width = ceil(width / side) * side
        height = ceil(int(width / ratio) / side) * side
    else:
        height = ceil(height / side) * side
        width = ceil(int(height * ratio) / side) * side
    return max(width, side), max(height, side)


def from_folder(files: VisionFiles) -> Vision:
    read, preprocessing = files.config, files.preprocessing
    vision = read.table("vision_config") or Reader({}, "config.json: vision_config")
    size, tile = (preprocessing.table(key) for key in ("size", "max_image_size"))
    side = None if tile is None else tile.size("longest_edge", MAX_SIDE)
    cell = read.size("scale_factor", MAX_SIDE, default=_CELL)
    settings = SiglipSettings.from_hf(vision, tile=side, cell=cell, **_SIZES)
    if size is not None and size.get("longest_edge") is None:
        raise UnsupportedModelError(f"{preprocessing.source}: size has no longest_edge; llmcl supports no other size.")
    longest = 4 * settings.tile if size is None else size.size("longest_edge", MAX_SIDE)
    splits = preprocessing.flag("do_image_splitting", default=True)
    normalizer = Normalizer.from_hf(preprocessing, Image.Resampling.LANCZOS)
    return _vision(files, settings, Idefics3Processor(normalizer, settings.tile, longest, splits, settings.n_rows))


def from_mmproj(files: VisionFiles) -> Vision:
    settings = SiglipSettings.from_mmproj(files.config, _CELL)
    longest = files.config.size("clip.vision.preproc_image_size", MAX_SIDE, default=4 * settings.tile)
    normalizer = Normalizer.from_mmproj(files.config, Image.Resampling.LANCZOS)
    return _vision(files, settings, Idefics3Processor(normalizer, settings.tile, longest, True, settings.n_rows))


def mmproj_tensors(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    return hf_tensors(stored, _MMPROJ_NAMES)


def _vision(files: VisionFiles, settings: SiglipSettings, processor: Idefics3Processor) -> Vision:
    k = settings.cell**2 * settings.hidden
    projector = Projector(files.tensors.matrix(_PROJECTION, rows=files.hidden_size, k=k))
    return Vision(processor, SiglipTower(settings, files.tensors, projector))


# The vision configuration's defaults in transformers; SmolVLM2 leaves some sizes out.
_SIZES = {
    "hidden_size": 1152,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "image_size": 224,
    "patch_size": 32,
}
