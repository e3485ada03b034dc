"""What several files of tests of tokenizers use."""

from __future__ import annotations

from typing import Any

import pytest
from made_tokenizers import from_gguf, sentencepiece_gguf

from llmcl.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def sentencepiece() -> tuple[Tokenizer, dict[str, Any]]:
    metadata = sentencepiece_gguf()
    return from_gguf(metadata, bos_token_id=1, eos_token_ids=(2,)), metadata
