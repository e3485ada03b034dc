"""The sampling parameters that a checkpoint recommends."""

from __future__ import annotations

import math
from typing import Any

from llmcl.checkpoint.files import optional_json
from llmcl.checkpoint.tensors import Checkpoint
from llmcl.sampling_options import PARAMETERS


def sampling_defaults(checkpoint: Checkpoint) -> dict[str, float]:
    """Returns the recommended values by `LLM.stream` option name. Skips values out of range."""
    metadata = checkpoint.gguf_metadata
    settings = optional_json(checkpoint.path / "generation_config.json") if metadata is None else metadata
    values: dict[str, float] = {}
    for name, parameter in PARAMETERS.items():
        key = parameter.config_key if metadata is None else f"general.sampling.{parameter.gguf_key}"
        value: Any = settings.get(key or "")
        if type(value) not in (int, float) or not math.isfinite(value) or not parameter.accepts(value):
            continue
        if value == parameter.kind(value):
            values[name] = parameter.kind(value)
    return values
