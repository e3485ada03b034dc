"""The sampling parameters that a checkpoint recommends."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from llmcl.checkpoint.files import optional_json
from llmcl.checkpoint.tensors import Checkpoint

# By `LLM.stream` option: the key in generation_config.json, the key in GGUF metadata, and valid values.
_KEYS: dict[str, tuple[str, str, Callable[[float], bool]]] = {
    "temperature": ("temperature", "general.sampling.temp", lambda t: t >= 0),
    "top_k": ("top_k", "general.sampling.top_k", lambda k: 0 <= k < 2**31 and k == int(k)),
    "top_p": ("top_p", "general.sampling.top_p", lambda p: 0 < p <= 1),
    "min_p": ("min_p", "general.sampling.min_p", lambda p: 0 <= p <= 1),
    "repeat_penalty": ("repetition_penalty", "general.sampling.penalty_repeat", lambda r: r > 0),
}


def sampling_defaults(checkpoint: Checkpoint) -> dict[str, float]:
    """Returns the recommended values by `LLM.stream` option name. Skips values out of range."""
    metadata = checkpoint.gguf_metadata
    if metadata is not None:
        return _valid(metadata, {name: keys[1] for name, keys in _KEYS.items()})
    settings = optional_json(checkpoint.path / "generation_config.json")
    return _valid(settings, {name: keys[0] for name, keys in _KEYS.items()})


def _valid(settings: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, float]:
    values: dict[str, Any] = {name: settings.get(key) for name, key in keys.items()}
    return {
        name: int(value) if name == "top_k" else float(value)
        for name, value in values.items()
        if type(value) in (int, float) and math.isfinite(value) and _KEYS[name][2](value)
    }
