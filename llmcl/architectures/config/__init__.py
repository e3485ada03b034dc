"""Describes a model: sizes and constants, read from config.json or GGUF metadata.

Features that llmcl does not compute exactly are refused here by name, so later modules need no checks. `families.py`
describes each architecture.
"""

from __future__ import annotations

from llmcl.architectures.config.gguf import config_from_gguf
from llmcl.architectures.config.hf import config_from_hf
from llmcl.architectures.config.model_config import ModelConfig
from llmcl.architectures.config.rope import GgufFactors, RopeScaling

__all__ = ["GgufFactors", "ModelConfig", "RopeScaling", "config_from_gguf", "config_from_hf"]
