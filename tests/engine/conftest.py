"""A small model on the default device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers import random_weights, save_folder, small_config

import llmcl
from llmcl.engine.llm import LLM
from llmcl.runtime.device import Device


@pytest.fixture(scope="session")
def small_llm(default_device: Device, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A small model with a tokenizer of characters, without a chat template, and with a context of 64 tokens."""
    config = small_config()
    folder = save_folder(tmp_path_factory.mktemp("small"), config, random_weights(config, seed=7))
    with llmcl.load(str(folder), device=default_device.entry.index, max_context=64) as llm:
        yield llm
