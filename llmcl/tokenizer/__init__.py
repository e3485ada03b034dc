"""Converts text and conversations to token ids and back."""

from __future__ import annotations

from llmcl.tokenizer.tokenizer import Tokenizer

__all__ = ["Tokenizer"]
