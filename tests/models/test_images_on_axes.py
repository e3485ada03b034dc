"""Logits after images with positions on several axes, against transformers' Qwen-VL with the same rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ascii_tokenizer import ascii_tokenizer
from late_kernels import compile_when_used
from parameters import slow_except

import llmcl
from llmcl.models.image_rows import ImageRows, PlacedImage
from llmcl.runtime.device import Device

compiled_when_used = pytest.fixture(compile_when_used, scope="module", autouse=True)

BOUND = 1e-4
SIZES: dict[str, Any] = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "vocab_size": 131, "max_position_embeddings": 512},
    **{"bos_token_id": None, "eos_token_id": None, "pad_token_id": None},
}


@pytest.mark.parametrize("name", slow_except(["qwen2_vl", "qwen2_5_vl", "qwen3_vl"], "qwen3_vl"))
def test_logits_are_those_of_transformers(name: str, default_device: Device, tmp_path: Path) -> None:
    """Two images between texts, then decode steps after them."""
    import torch
    import transformers

    axes: dict[str, Any] = {"mrope_section": [2, 3, 3]}
    if name == "qwen3_vl":
        axes = {"mrope_section": [3, 3, 2], "mrope_interleaved": True}
    text = SIZES | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4} | axes}
    text |= {"head_dim": 16} if name == "qwen3_vl" else {}
    tower = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64}
    config = transformers.CONFIG_MAPPING[name](text_config=text, vision_config=tower, attn_implementation="eager")
    torch.manual_seed(3)
    model = transformers.AutoModelForImageTextToText.from_config(config).eval()
    with torch.no_grad():
        for parameter, values in model.named_parameters():
            values.normal_(1.0 if "norm" in parameter else 0.0, 0.1 if values.dim() == 1 else 0.2)
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    ascii_tokenizer().save(str(folder / "tokenizer.json"))
    rng = np.random.default_rng(0)
    ids = rng.integers(5, 99, 60)
    images, grids = [], [(4, 5), (6, 2)]
    rows = [rng.standard_normal((r * c, 64)).astype(np.float32) for r, c in grids]
    types = torch.zeros((1, 60), dtype=torch.int32)
    embeds = model.get_input_embeddings()(torch.tensor(ids)[None]).detach().clone()
    for first, grid, values in zip((3, 30), grids, rows, strict=True):
        placed = PlacedImage(first, ImageRows(default_device.upload(values, "rows"), len(values), b"", grid))
        images.append(placed)
        types[:, placed.first : placed.end] = 1
        embeds[0, placed.first : placed.end] = torch.from_numpy(values)
    thw = torch.tensor([[1, 2 * r, 2 * c] for r, c in grids])
    positions, _ = model.model.get_rope_index(torch.tensor(ids)[None], types, thw)
    with torch.no_grad():
        hidden = model.model.language_model(inputs_embeds=embeds, position_ids=positions).last_hidden_state
        expected = model.lm_head(hidden)[0].numpy()
    options: dict[str, Any] = {"device": default_device, "dtype": "float32", "max_context": 128}
    with llmcl.load(str(folder), **options) as llm:
        core = llm.model
        sequence = core.cache.sequence()
        core.cache.truncate(sequence, 0)
        logits = core.logits(sequence, ids[:50].tolist(), images=images)
        scale = np.abs(expected).max()
        assert np.abs(logits - expected[:50]).max() / scale < BOUND
        for i in range(50, 60):
            core.decode_token(sequence, int(ids[i]))
            row = core.device.read(core.act.logits, np.float32, (131,))
            assert np.abs(row - expected[i]).max() / scale < BOUND
