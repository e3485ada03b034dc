"""Pixels and prompt texts of the models with a SigLIP tower against the processors in transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from PIL import Image

from llmcl.architectures.config.reader import Reader
from llmcl.vision.gemma3 import Gemma3Processor
from llmcl.vision.idefics3 import Idefics3Processor
from llmcl.vision.normalize import Normalizer

SIZES = [
    (1, 1),
    (48, 48),
    (49, 48),
    (48, 49),
    (300, 20),
    (20, 300),
    (131, 97),
    (97, 131),
    (500, 1),
    (3, 700),
    (144, 96),
]
SPECIAL = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}


def picture(width: int, height: int) -> Image.Image:
    pixels = np.random.default_rng(width * height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def tokenizer(**special: str) -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"<unk>": 0}, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", extra_special_tokens=special)


def normalizer(resample: int, **settings: Any) -> Normalizer:
    values = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.25, 0.2], "resample": resample, **settings}
    return Normalizer.from_hf(Reader(values, "preprocessor_config.json"), Image.Resampling.BICUBIC)


@pytest.mark.parametrize("size", SIZES)
def test_gemma3(size: tuple[int, int]) -> None:
    from transformers import Gemma3Processor as Processor
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    expected = Gemma3ImageProcessorPil(
        size={"height": 48, "width": 48}, image_mean=[0.5, 0.4, 0.3], image_std=[0.5, 0.25, 0.2]
    )
    pixels = Gemma3Processor(normalizer(2), 48, 16).pixels(picture(*size))
    np.testing.assert_array_equal(pixels.values, expected(picture(*size), return_tensors="np")["pixel_values"])
    processor = Processor(expected, tokenizer(**SPECIAL), image_seq_length=16)
    assert pixels.text == processor.full_image_sequence


@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_idefics3(size: tuple[int, int], splits: bool) -> None:
    from transformers import Idefics3Processor as Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    settings: dict[str, Any] = {
        "size": {"longest_edge": 144},
        "max_image_size": {"longest_edge": 48},
        "image_mean": [0.5, 0.4, 0.3],
        "image_std": [0.5, 0.25, 0.2],
        "do_image_splitting": splits,
        "return_row_col_info": True,
    }
    pixels = Idefics3Processor(normalizer(1), 48, 144, splits, 16).pixels(picture(*size))
    for kind in (Idefics3ImageProcessorPil, SmolVLMImageProcessorPil):
        expected = kind(**settings)(picture(*size), return_tensors="np")
        np.testing.assert_array_equal(pixels.values, expected["pixel_values"][0])
        assert expected["pixel_attention_mask"].all()
    processor = Processor(Idefics3ImageProcessorPil(**settings), tokenizer(), image_seq_len=16)
    assert pixels.text == processor.replace_image_token(expected, 0)
    assert pixels.text.count(processor.image_token) == 16 * len(pixels.values)


def test_the_largest_picture() -> None:
    """A longer side beyond 4096 pixels is cut to 4096, and every tile is there."""
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    expected = Idefics3ImageProcessorPil(size={"longest_edge": 5000}, max_image_size={"longest_edge": 256})
    settings = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    pixels = Idefics3Processor(normalizer(1, **settings), 256, 5000, True, 4).pixels(picture(60, 3))
    np.testing.assert_array_equal(pixels.values, expected(picture(60, 3), return_tensors="np")["pixel_values"][0])
