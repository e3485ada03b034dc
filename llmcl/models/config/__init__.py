"""What a model is made of: sizes and constants, read from config.json or from GGUF metadata.

Everything that llmcl does not compute exactly is refused here, by the name of the feature, so that no other module has
to ask whether a checkpoint means what the layer stack does. `families.py` says what each architecture has.
"""

from __future__ import annotations

from llmcl.models.config.gguf import config_from_gguf
from llmcl.models.config.hf import config_from_hf
from llmcl.models.config.model_config import ModelConfig
from llmcl.models.config.rope import GgufFactors, RopeScaling

__all__ = ["GgufFactors", "ModelConfig", "RopeScaling", "config_from_gguf", "config_from_hf"]
