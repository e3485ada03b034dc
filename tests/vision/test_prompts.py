"""From a prompt with pictures to rows beside token ids, with a model's own tower."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from ascii_tokenizer import ascii_tokenizer
from fake_vision import TEMPLATE
from PIL import Image
from tokenizers import AddedToken
from vision_models import image_features, random_model, save_vision

import llmcl
from llmcl.engine.images import PromptWithImages
from llmcl.errors import UsageError
from llmcl.runtime.device import Device

MARKERS = {"gemma3": ("<start_of_image>", "<image_soft_token>"), "smolvlm": ("<image>", "<image>")}


def save_model(folder: Path, model_type: str) -> Path:
    """A random model with a tokenizer of characters; its image token has the configuration's id, 300."""
    marker, token = MARKERS[model_type]
    save_vision(folder, model_type)
    tokenizer = ascii_tokenizer()
    others = [name for name in (marker, "<end_of_image>", "<fake_token_around_image>", "<global-img>") if name != token]
    fillers = [f"<unused{i}>" for i in range(300 - tokenizer.get_vocab_size() - len(others))]
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in (*others, *fillers, token)])
    assert tokenizer.token_to_id(token) == 300
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("<start_of_image>", marker))
    return folder


@pytest.mark.parametrize("model_type", MARKERS)
def test_a_prompt_has_the_rows_of_its_pictures(model_type: str, default_device: Device, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", model_type)
    picture = Image.fromarray(np.random.default_rng(3).integers(0, 256, (40, 60, 3), dtype=np.uint8))
    picture.save(tmp_path / "a.png")
    with llmcl.load(str(folder), device=default_device.entry.index, max_context=512) as llm:
        text = llm.encode("What?")
        assert llm.images._vision is None  # no tower for texts
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
        with pytest.raises(UsageError, match="cannot read them yet"):
            llm.generate(prompt)
    with (
        llmcl.load(str(folder), device=default_device.entry.index, max_context=512, mmproj=False) as llm,
        pytest.raises(UsageError, match=r"takes no images: they are switched off \(--no-mmproj"),
    ):
        llm.encode("What?", images=[picture])
