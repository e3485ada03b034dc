"""Attention in a vision tower: every patch attends to all patches, without a cache beyond the image."""

from __future__ import annotations

from llmcl.kernels.common.attention import AttentionShape
from llmcl.kernels.common.dtype import is_rounded
from llmcl.models.kv_cache import capacity_for


def tower_attention(n_patches: int, n_heads: int, head_dim: int, scale: float, dtype: str) -> AttentionShape:
    """Returns the attention shape for n_patches patches. scale: for the scores. dtype: the weights' storage type."""
    return AttentionShape(
        n_heads,
        n_heads,
        head_dim,
        capacity_for(n_patches),
        "float32" if dtype == "float32" else "float16",
        score_scale=scale,
        exact_queries=not is_rounded("float16", dtype),
        bidirectional=True,
    )
