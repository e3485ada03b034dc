"""Translates LFM2's config.json keys."""

from __future__ import annotations

from typing import Any

from llmcl.architectures.config import limits
from llmcl.architectures.config.reader import Reader

_MAX_FACTOR = 1e3


def lfm2_keys(read: Reader) -> dict[str, Any]:
    """Returns the values under Llama's keys: norm eps, rows of the MLP's gate, tied embeddings."""
    key = "intermediate_size" if read.get("block_ff_dim") is None else "block_ff_dim"
    size = read.size(key, limits.MAX_INTERMEDIATE)
    if read.flag("block_auto_adjust_ff_dim", default=True):
        size = 2 * size // 3
        if read.get("block_ffn_dim_multiplier") is not None:
            size = int(read.number("block_ffn_dim_multiplier", 0.0, _MAX_FACTOR) * size)
            multiple = read.size("block_multiple_of", limits.MAX_INTERMEDIATE)
            size = -(-size // multiple) * multiple
    tied = read.flag("tie_embedding", default=read.flag("tie_word_embeddings", default=True))
    return {"intermediate_size": size, "rms_norm_eps": read.get("norm_eps"), "tie_word_embeddings": tied}
