"""A small model as a folder, and the GGUF file that llmcl convert makes of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import random_weights, save_folder, small_config
from made_tokenizers import byte_level_gguf

from llmcl.convert import convert
from llmcl.tokenizer import gguf_tokenizer

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
# Rows of 256 values suit every format.
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "n_q_heads": 4, "n_kv_heads": 2, "head_dim": 64}


@pytest.fixture(scope="session")
def make_folder() -> Callable[..., Path]:
    """make_folder(folder, tokenizer=metadata, **changes of the configuration) writes a small model; its folder.

    tokenizer: as GGUF has it. The chat template is TEMPLATE.
    """

    def make(folder: Path, tokenizer: dict[str, Any] | None = None, **changes: Any) -> Path:
        metadata = tokenizer or byte_level_gguf()
        tokens = metadata["tokenizer.ggml.tokens"]
        ids = {"bos_token_id": tokens.index("<s>"), "eos_token_ids": (tokens.index("</s>"),)}
        config = small_config(vocab_size=len(tokens) + 5, **{**SIZES, **ids, **changes})
        save_folder(folder, config, random_weights(config, seed=5))
        backend, _ = gguf_tokenizer.build(metadata)
        backend.save(str(folder / "tokenizer.json"))
        settings = {"chat_template": TEMPLATE, "bos_token": "<s>", "eos_token": "</s>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
        return folder

    return make


@pytest.fixture(scope="session")
def folder(make_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("folder"))


@pytest.fixture(scope="session")
def gguf_file(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(str(folder), tmp_path_factory.mktemp("gguf") / "float32.gguf", dtype="float32")
