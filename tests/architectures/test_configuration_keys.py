"""Each key of each family's config.json removed, null, and contradicted, beside transformers' configuration classes.

What transformers resolves such a configuration to is written out in full and read again: both must be the same model.
"""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from llmcl.architectures.config import ModelConfig, config_from_hf
from llmcl.architectures.families import FAMILIES
from llmcl.errors import CheckpointError, UnsupportedModelError

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 131,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
PLAIN = {"rope_type": "default", "rope_theta": 5e3}
LINEAR = {"rope_type": "linear", "factor": 4.0}
# Two spellings of one setting, and settings that depend on each other.
CONTRADICTIONS: dict[str, dict[str, Any]] = {
    "rope_theta beside rope_parameters": {"rope_theta": 7e3, "rope_parameters": PLAIN},
    "rope_theta alone": {"rope_theta": 7e3, "rope_parameters": None},
    "rope_scaling beside rope_parameters": {"rope_scaling": LINEAR, "rope_parameters": PLAIN},
    "rope_scaling alone": {"rope_scaling": LINEAR, "rope_parameters": None},
    "the older type": {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_parameters": None},
    "dtype beside torch_dtype": {"dtype": "bfloat16", "torch_dtype": "float16"},
    "torch_dtype alone": {"torch_dtype": "float16", "dtype": None},
    "a head_dim that is null": {"head_dim": None},
    "a window without a switch": {"sliding_window": 16, "layer_types": None},
    "a window switched off": {"sliding_window": 16, "use_sliding_window": False, "layer_types": None},
    "a window switched on": {"sliding_window": 16, "use_sliding_window": True, "layer_types": None},
    "a window in late layers": {
        "sliding_window": 16,
        "use_sliding_window": True,
        "max_window_layers": 2,
        "layer_types": None,
    },
    "a window that is null": {"sliding_window": None, "use_sliding_window": True, "layer_types": None},
    "layers without rotation": {"no_rope_layers": None, "no_rope_layer_interval": 3},
    "tied embeddings": {"tie_word_embeddings": True},
    "embeddings apart": {"tie_word_embeddings": False},
}

OF_FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "topk_method": "greedy"},
    "gemma4_text": {"vocab_size_per_layer_input": 131},
    "gemma4_unified_text": {"vocab_size_per_layer_input": 131},
}
# Without these llmcl refuses the file, where transformers takes the sizes of some published model.
REQUIRED = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"}
# A missing id is none, where transformers takes one of the same published model.
IDS = {"bos_token_id", "eos_token_id"}
# Where layers with a window have frequencies of their own, no published file has these: llmcl takes rope_theta for both
# kinds and knows the older spelling of a type, and transformers does neither.
NOT_BY_KIND = {"the older type", "rope_theta alone", "rope_theta beside rope_parameters"}


def settings_of(model_type: str) -> dict[str, Any]:
    """All that transformers' class says of a small model, without what it says of every model."""
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    common = PreTrainedConfig().to_dict().keys() - {"tie_word_embeddings", "dtype"}
    settings = CONFIG_MAPPING[model_type](**SIZES | OF_FAMILIES.get(model_type, {})).to_dict()
    return {key: value for key, value in settings.items() if key not in common} | {"model_type": model_type}


def resolved(settings: dict[str, Any]) -> dict[str, Any] | None:
    """What transformers makes of the settings; None: it refuses them."""
    from transformers import CONFIG_MAPPING

    try:
        config = CONFIG_MAPPING[settings["model_type"]].from_dict(copy.deepcopy(settings))
    except Exception:  # of whichever kind its classes raise
        return None
    result: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=str))
    return result | {"architectures": None}


def parsed(settings: dict[str, Any]) -> ModelConfig | str:
    """The model, or why it is refused."""
    try:
        return config_from_hf(settings)
    except (CheckpointError, UnsupportedModelError) as error:
        return str(error)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_keys_that_are_missing_null_or_contradicted_mean_what_they_do_in_transformers(model_type: str) -> None:
    settings, family = settings_of(model_type), FAMILIES[model_type]
    keys = settings.keys() - REQUIRED - IDS
    cases = {f"{key} missing": {k: v for k, v in settings.items() if k != key} for key in keys}
    cases |= {f"{key} null": {**settings, key: None} for key in keys}
    cases |= {
        name: {**settings, **changes}
        for name, changes in CONTRADICTIONS.items()
        if not (family.local_rope and name in NOT_BY_KIND)
    }
    different = {}
    for name, case in cases.items():
        full = resolved(case)
        if full is None or isinstance(expected := parsed(full), str):
            continue
        model = parsed(case)
        if model != expected and (isinstance(model, ModelConfig) or name not in CONTRADICTIONS):
            different[name] = model if isinstance(model, str) else differences(model, expected)
    assert different == {}
    for key in REQUIRED & settings.keys():
        without = parsed({k: v for k, v in settings.items() if k != key})
        assert f"{key} is missing" in str(without) or key == "intermediate_size" or key in family.defaults


def differences(model: ModelConfig, expected: ModelConfig) -> dict[str, tuple[Any, Any]]:
    pairs = {name: (getattr(model, name), getattr(expected, name)) for name in model.__dataclass_fields__}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
