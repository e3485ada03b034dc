"""Configurations as llama.cpp takes them: what both engines read of a GGUF file in the same way."""

from __future__ import annotations

import dataclasses
from typing import Any

from helpers import with_blocks

from llmcl.architectures.config import ModelConfig
from llmcl.architectures.families.blocks import Attention


def as_llama_cpp_reads(config: ModelConfig) -> ModelConfig:
    """The configuration, but for what llama.cpp does not read or does not have."""
    changes: dict[str, Any] = {}
    if config.architecture in ("mistral", "mixtral", "phi3"):  # it knows no windows of these
        config = with_blocks(config, lambda block: {"window": None} if isinstance(block, Attention) else {})
    if config.architecture.startswith("gemma"):  # the format has no key for another scale
        changes["attention_scale"] = config.head_dim**-0.5
    if config.architecture == "llama" and config.rope_scaling is not None and config.rope_scaling.kind == "yarn":
        changes["rope_scaling"] = dataclasses.replace(config.rope_scaling, beta_fast=32.0)  # it does not read the key
    if config.architecture in ("olmo2", "olmo3", "olmoe", "gpt_oss"):  # it has none whose output is tied
        changes["tie_embeddings"] = False
    if config.architecture in ("phi3", "olmo2", "olmo3", "qwen2", "lfm2"):  # heads of no other size
        changes["head_dim"] = size = config.hidden_size // config.n_q_heads
        changes["rotary_dim"] = config.rotary_dim and min(config.rotary_dim, size)
    if config.architecture == "gpt_oss":  # it rounds the bounds of YaRN's ramp, which this family does not
        changes["rope_scaling"] = None
    if config.architecture == "olmoe":  # it has none with groups of queries
        changes["n_kv_heads"] = config.n_q_heads
    return dataclasses.replace(config, **changes)
