"""Finds texts that mark answer parts and are special tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmcl.tokenizer.tokenizer import Tokenizer


def special_markers(markers: Sequence[str], tokenizer: Tokenizer) -> dict[int, str]:
    """Returns id -> text for the markers that are special tokens."""
    texts = {}
    for text in markers:
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) == 1 and not tokenizer.token_bytes(ids[0]) and ids[0] not in tokenizer.eos_token_ids:
            texts[ids[0]] = text
    return texts
