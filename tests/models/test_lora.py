"""Models with LoRA adapters against transformers with the sum of weights and adapters."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers import random_weights, relative_error, save_folder, small_config, transformers_logits, transformers_model
from late_kernels import compile_when_used
from lora_adapters import changed, factors_of, save_peft

import llmcl
from llmcl.runtime.device import Device

compiled_when_used = pytest.fixture(compile_when_used, scope="module", autouse=True)

BOUND = 1e-4
CONFIG = small_config(n_layers=2)
WEIGHTS = random_weights(CONFIG, 3)
IDS = [int(i) for i in np.random.default_rng(0).integers(3, 131, 40)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tmp_path_factory.mktemp("base"), CONFIG, WEIGHTS)


def test_merged_adapters_equal_transformers(device: Device, base: Path, tmp_path: Path) -> None:
    first, second = factors_of(CONFIG, seed=1), factors_of(CONFIG, ("q_proj", "down_proj"), seed=2)
    paths = [save_peft(tmp_path / "first", first), save_peft(tmp_path / "second", second)]
    weights = changed(changed(WEIGHTS, first), second, -0.5 * 12 / 4)
    expected = transformers_logits(transformers_model(CONFIG, weights), IDS)
    assert relative_error(transformers_logits(transformers_model(CONFIG, WEIGHTS), IDS), expected) > 0.1
    with llmcl.load(str(base), device=device, lora=[str(paths[0]), f"{paths[1]}:-0.5"]) as llm:
        assert relative_error(llm.model.logits(llm.sequence, IDS), expected) < BOUND
