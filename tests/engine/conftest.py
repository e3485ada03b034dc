"""The default device taken for both kinds of device that an engine treats differently; a small model on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers import random_weights, save_folder, small_config
from which_devices import taken

import llmcl
from llmcl.engine.llm import LLM
from llmcl.runtime.device import Device
from llmcl.runtime.platforms import DeviceEntry


@pytest.fixture(scope="module", params=["as it is", pytest.param("as a GPU", marks=pytest.mark.slow)])
def either_entry(request: pytest.FixtureRequest, default_entry: DeviceEntry) -> DeviceEntry:
    """The default device as it is, and taken for a GPU."""
    return taken(default_entry, request.param)


@pytest.fixture(scope="session")
def small_llm(default_device: Device, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A small model with a tokenizer of characters, without a chat template, and with a context of 64 tokens."""
    config = small_config()
    folder = save_folder(tmp_path_factory.mktemp("small"), config, random_weights(config, seed=7))
    with llmcl.load(str(folder), device=default_device.entry.index, max_context=64) as llm:
        yield llm
