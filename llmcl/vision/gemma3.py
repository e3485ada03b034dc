"""Gemma 3's images: a square tile, read by SigLIP, with cells of patches averaged to 256 rows."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from PIL import Image

from llmcl.architectures.config.reader import Reader
from llmcl.checkpoint.tensors import StoredTensor
from llmcl.errors import UnsupportedModelError
from llmcl.vision.files import VisionFiles
from llmcl.vision.normalize import Normalizer
from llmcl.vision.siglip import MAX_SIDE, Projector, SiglipSettings, SiglipTower, hf_tensors
from llmcl.vision.vision import Pixels, Vision

TOKENS_PER_IMAGE = 256
_CELL = 4  # patches per side of a cell in mmproj files without clip.vision.projector.scale_factor
_PROJECTION, _NORM = "projector.mm_input_projection_weight", "projector.mm_soft_emb_norm.weight"
_MMPROJ_NAMES = {
    "mm.input_projection.weight": _PROJECTION,
    "mm.soft_emb_norm.weight": _NORM,
}


@dataclass(eq=False)
class Gemma3Processor:
    """Resizes the whole picture to a tile. Pan and scan (further tiles) is off, as in transformers."""

    normalizer: Normalizer
    side: int  # pixels
    n_tokens: int
    marker: str = "<start_of_image>"
    image_token: str = "<image_soft_token>"

    def pixels(self, picture: Image.Image) -> Pixels:
        values = self.normalizer.values(self.normalizer.resized(picture, self.side, self.side))[np.newaxis]
        side = int(self.n_tokens**0.5)
        text = f"\n\n{self.marker}{self.image_token * self.n_tokens}<end_of_image>\n\n"
        return Pixels(values, [(side, side)], text, hashlib.sha256(values.tobytes()).digest())


def from_folder(files: VisionFiles) -> Vision:
    vision = files.config.table("vision_config") or Reader({}, "config.json: vision_config")
    rows = files.config.size("mm_tokens_per_image", MAX_SIDE, default=TOKENS_PER_IMAGE)
    settings = SiglipSettings.from_hf(vision, rows=rows, **_SIZES)
    if settings.n_rows != rows:
        files.config.fail("mm_tokens_per_image", rows, f"a square number that divides {settings.side}^2 patches")
    size = files.preprocessing.table("size")
    sides = [size.size(key, MAX_SIDE) for key in ("height", "width")] if size else [settings.tile]
    if any(side != settings.tile for side in sides):
        raise UnsupportedModelError(
            f"{files.preprocessing.source}: size is {sides}; the vision tower reads tiles of {settings.tile} pixels."
        )
    return _vision(files, settings, Normalizer.from_hf(files.preprocessing, Image.Resampling.BILINEAR), offset=1.0)


def from_mmproj(files: VisionFiles) -> Vision:
    settings = SiglipSettings.from_mmproj(files.config, _CELL)
    normalizer = Normalizer.from_mmproj(files.config, Image.Resampling.BILINEAR)
    return _vision(files, settings, normalizer, offset=0.0)  # the converter has added the 1 to the norm's weights


def mmproj_tensors(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    return hf_tensors(stored, _MMPROJ_NAMES)


def _vision(files: VisionFiles, settings: SiglipSettings, normalizer: Normalizer, offset: float) -> Vision:
    tensors, hidden = files.tensors, settings.hidden
    projection = tensors.array(_PROJECTION, hidden, files.hidden_size)
    norm = tensors.array(_NORM, hidden) + np.float32(offset)
    projector = Projector(
        tensors.upload(_PROJECTION, np.ascontiguousarray(projection.T)),
        tensors.device.upload(norm, _NORM),
        settings.eps,
    )
    processor = Gemma3Processor(normalizer, settings.tile, settings.n_rows)
    return Vision(processor, SiglipTower(settings, tensors, projector, two_way=True))


# SiglipVisionConfig's defaults in transformers.
_SIZES = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 16,
}
