"""Resizes pictures with Pillow and normalises their pixels, with the settings of preprocessor_config.json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from llmcl.architectures.config.reader import Reader
from llmcl.errors import UnsupportedModelError

_MAX_SCALE = 1e4


@dataclass(frozen=True, eq=False)
class Normalizer:
    resample: Image.Resampling
    table: np.ndarray  # float32 [channels, 256]: the normalised value for each byte

    @classmethod
    def of(cls, resample: int, scale: float, mean: Sequence[float], std: Sequence[float]) -> Normalizer:
        rescaled = (np.arange(256) * scale).astype(np.float32)[np.newaxis]
        mean32, std32 = (np.array(values, np.float32)[:, np.newaxis] for values in (mean, std))
        return cls(Image.Resampling(resample), (rescaled - mean32) / std32)

    @classmethod
    def from_hf(cls, read: Reader, resample: Image.Resampling) -> Normalizer:
        """Reads preprocessor_config.json. resample: the family's default."""
        for step in ("do_resize", "do_rescale", "do_normalize"):
            if not read.flag(step, default=True):
                raise UnsupportedModelError(f"{read.source}: {step} is false; llmcl supports models that need it.")
        return cls.of(
            read.size("resample", max(Image.Resampling), default=resample, minimum=0),
            read.number("rescale_factor", 0.0, _MAX_SCALE, default=1 / 255),
            _three(read, "image_mean"),
            _three(read, "image_std"),
        )

    @classmethod
    def from_mmproj(cls, read: Reader, resample: Image.Resampling) -> Normalizer:
        return cls.of(resample, 1 / 255, _three(read, "clip.vision.image_mean"), _three(read, "clip.vision.image_std"))

    def resized(self, picture: Image.Image, width: int, height: int) -> Image.Image:
        return picture.resize((width, height), self.resample)

    def values(self, picture: Image.Image) -> np.ndarray:
        """Returns an RGB picture as float32 [3, height, width]."""
        pixels = np.asarray(picture)
        return np.stack([self.table[channel][pixels[:, :, channel]] for channel in range(3)])


def _three(read: Reader, key: str) -> list[float]:
    """Reads a number for each colour. Left out: 0.5, as SigLIP was trained with."""
    values = read.get(key, [0.5] * 3)
    values = values.tolist() if isinstance(values, np.ndarray) else values
    is_list = isinstance(values, list) and len(values) == 3
    if not is_list or not all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in values):
        read.fail(key, values, "three numbers")
    if key.endswith("std") and not all(0 < x <= _MAX_SCALE for x in values):
        read.fail(key, values, "three numbers above 0")
    return [float(x) for x in values]
