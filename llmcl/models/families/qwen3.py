"""Qwen 3: a norm of query and key heads, and heads of 128."""

from __future__ import annotations

from llmcl.models.families import qwen2
from llmcl.models.families.family import Family

FAMILY = Family(
    "Qwen3ForCausalLM",
    "qwen3",
    qk_norm=True,
    windows="late",
    defaults={**qwen2.FAMILY.defaults, "head_dim": 128},
)
