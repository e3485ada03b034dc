"""Pixtral's tower with Mistral 3's projector against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import relative_error
from parameters import slow_except
from PIL import Image

from llmcl.checkpoint import open_checkpoint
from llmcl.runtime.device import Device
from llmcl.vision.load import load_vision

TEXT = {
    "model_type": "mistral",
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 64,
    "rms_norm_eps": 1e-3,
}
TOWER = {
    "model_type": "pixtral",
    "hidden_size": 96,
    "intermediate_size": 136,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "patch_size": 6,
    "image_size": 96,
    "hidden_act": "silu",
}
PREPROCESSING: dict[str, Any] = {"size": {"longest_edge": 96}}
# Width and height: smaller than the longest side, and shrunk to it.
PICTURES = [
    Image.fromarray(np.random.default_rng(i).integers(0, 256, (height, width, 3), dtype=np.uint8))
    for i, (width, height) in enumerate([(61, 35), (50, 133)])
]


@pytest.mark.parametrize("bias", slow_except([False, True], True))
def test_a_folder(device: Device, tmp_path: Path, bias: bool) -> None:
    import torch
    import transformers
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    config = transformers.Mistral3Config(text_config=TEXT, vision_config=TOWER, multimodal_projector_bias=bias)
    torch.manual_seed(3)
    model = transformers.Mistral3ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, values in model.named_parameters():
            near = 1.0 if values.ndim == 1 and name.endswith("weight") else 0.0
            spread = 0.3 if values.ndim == 1 else values[0].numel() ** -0.5
            values.copy_(near + spread * torch.randn_like(values))
    model.save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PREPROCESSING))
    with open_checkpoint(str(tmp_path)) as checkpoint:
        vision = load_vision(device, checkpoint)
    assert vision is not None

    # The processor in transformers gets the size of a cell as its patch size, as in Mistral 3's processor.
    inputs = PixtralImageProcessorPil(**PREPROCESSING, patch_size=12)(PICTURES, return_tensors="np")
    with torch.no_grad():
        expected = model.model.get_image_features(
            torch.from_numpy(np.asarray(inputs["pixel_values"])), image_sizes=torch.tensor(inputs["image_sizes"])
        ).pooler_output
    for picture, whole, (height, width), rows in zip(
        PICTURES, inputs["pixel_values"], inputs["image_sizes"], expected, strict=True
    ):
        pixels = vision.processor.pixels(picture)
        assert pixels.grids == [(1, width // 12)] * (height // 12)
        cells = pixels.values.reshape(height // 12, width // 12, 2, 2, 3, 6, 6)
        laid_out = cells.transpose(4, 0, 2, 5, 1, 3, 6).reshape(3, height, width)
        np.testing.assert_allclose(laid_out, np.asarray(whole)[:, :height, :width], atol=1e-6)
        row = "[IMG]" * (width // 12) + "[IMG_BREAK]"
        assert pixels.text == (row * (height // 12)).removesuffix("[IMG_BREAK]") + "[IMG_END]"
        lines = vision.tower.rows(pixels)
        assert [(line.n, line.start) for line in lines] == [(width // 12, i * (width // 12)) for i in range(len(lines))]
        actual = device.read(lines[0].rows, np.float32, (sum(line.n for line in lines), 48))
        assert relative_error(actual, rows.numpy()) < 1e-4
