"""From a prompt with pictures to rows beside token ids, with a model's own tower."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from image_models import save_model
from late_kernels import compile_when_used
from PIL import Image
from vision_models import image_features, random_model

import llmcl
from llmcl.engine.images import PromptWithImages
from llmcl.errors import UsageError
from llmcl.runtime.device import Device

compiled_when_used = pytest.fixture(compile_when_used, scope="module", autouse=True)


@pytest.mark.parametrize("model_type", ["gemma3", "smolvlm"])
def test_a_prompt_has_the_rows_of_its_pictures(model_type: str, default_device: Device, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", model_type)
    picture = Image.fromarray(np.random.default_rng(3).integers(0, 256, (40, 60, 3), dtype=np.uint8))
    picture.save(tmp_path / "a.png")
    with llmcl.load(str(folder), device=default_device.entry.index, max_context=512) as llm:
        text = llm.encode("What?")
        assert llm.images._reader is None  # no tower for texts
        prompt = llm.encode("What?", images=[tmp_path / "a.png"])
        assert isinstance(prompt, PromptWithImages)
        covered = [i for each in prompt.images for i in range(each.first, each.end)]
        assert covered == [i for i, token in enumerate(prompt) if token == 300]
        assert prompt[:6] == text[:6] and prompt[-6:] == text[-6:]
        pixels = llm.images.vision().processor.pixels(picture)
        hidden = llm.config.hidden_size
        rows = [llm.devices[0].read(each.image.rows, np.float32, (each.image.n, hidden)) for each in prompt.images]
        expected = image_features(random_model(model_type), pixels.values)
        np.testing.assert_allclose(np.concatenate(rows), expected, atol=1e-4 * np.abs(expected).max())
    with (
        llmcl.load(str(folder), device=default_device.entry.index, max_context=512, mmproj=False) as llm,
        pytest.raises(UsageError, match=r"takes no images: they are switched off \(--no-mmproj"),
    ):
        llm.encode("What?", images=[picture])
