"""Towers of Qwen2.5-VL and Qwen3-VL against transformers, from folders."""

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
from llmcl.vision.vision import Vision

HIDDEN = 64
TEXT = {
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]},
}
TOWERS: dict[str, dict[str, Any]] = {
    # Heads of 24 columns, which the device pads to 32; windows of 2 x 2 cells; an MLP of no whole tile.
    "qwen2_5_vl": {
        "depth": 2,
        "hidden_size": 96,
        "num_heads": 4,
        "intermediate_size": 136,
        "out_hidden_size": HIDDEN,
        "patch_size": 6,
        "window_size": 24,
        "fullatt_block_indexes": [1],
    },
    "qwen3_vl": {
        "depth": 3,
        "hidden_size": 96,
        "num_heads": 4,
        "intermediate_size": 160,
        "out_hidden_size": HIDDEN,
        "patch_size": 6,
        "num_position_embeddings": 49,
        "deepstack_visual_indexes": [0, 2],
    },
}
PREPROCESSING: dict[str, Any] = {"size": {"shortest_edge": 12 * 12 * 4, "longest_edge": 12 * 12 * 40}, "patch_size": 6}
# Width and height; after resizing 5 x 7, 3 x 2 and 11 x 3 cells.
PICTURES = [
    Image.fromarray(np.random.default_rng(i).integers(0, 256, (height, width, 3), dtype=np.uint8))
    for i, (width, height) in enumerate([(85, 61), (25, 37), (37, 133)])
]


def random_model(model_type: str) -> Any:
    """The whole model, with random values in every tensor, norms and biases too."""
    import torch
    import transformers

    config = transformers.AutoConfig.for_model(model_type, vision_config=TOWERS[model_type], text_config=TEXT)
    torch.manual_seed(7)
    model = transformers.AutoModelForImageTextToText.from_config(config).eval()
    with torch.no_grad():
        for name, values in model.named_parameters():
            near = 1.0 if values.ndim == 1 and name.endswith("weight") else 0.0
            spread = 0.3 if values.ndim == 1 else values[0].numel() ** -0.5
            values.copy_(near + spread * torch.randn_like(values))
    return model


def loaded(device: Device, folder: Path, model: Any) -> Vision:
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSING))
    with open_checkpoint(str(folder)) as checkpoint:
        vision = load_vision(device, checkpoint)
    assert vision is not None
    return vision


@pytest.mark.parametrize("model_type", slow_except(sorted(TOWERS), "qwen3_vl"))
def test_a_folder(device: Device, tmp_path: Path, model_type: str) -> None:
    import torch
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    model = random_model(model_type)
    vision = loaded(device, tmp_path / "model", model)
    inputs = Qwen2VLImageProcessorPil(**PREPROCESSING)(PICTURES, return_tensors="np")
    with torch.no_grad():
        grids = torch.from_numpy(np.asarray(inputs["image_grid_thw"]))
        expected = model.model.visual(torch.from_numpy(np.asarray(inputs["pixel_values"])), grids)
    deepstack = getattr(expected, "deepstack_features", None) or []
    first = first_patch = 0
    for picture, (_, rows, columns) in zip(PICTURES, inputs["image_grid_thw"], strict=True):
        pixels = vision.processor.pixels(picture)
        assert pixels.grids == [(rows // 2, columns // 2)]
        whole = np.asarray(inputs["pixel_values"])[first_patch : first_patch + rows * columns]
        frames = whole.reshape(-1, 3, 2, 36)
        for frame in (0, 1):
            np.testing.assert_allclose(pixels.values.reshape(-1, 3, 36), frames[:, :, frame], atol=1e-6)
        [image] = vision.tower.rows(pixels)
        assert pixels.text == "<|image_pad|>" * image.n and image.grid == pixels.grids[0]
        assert len(image.deepstack) == len(deepstack)
        for buffer, features in zip([image.rows, *image.deepstack], [expected.pooler_output, *deepstack], strict=True):
            actual = device.read(buffer, np.float32, (image.n, HIDDEN))
            assert relative_error(actual, features[first : first + image.n].numpy()) < 1e-4
        first, first_patch = first + image.n, first_patch + rows * columns
