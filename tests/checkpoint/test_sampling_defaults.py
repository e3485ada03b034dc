"""The sampling parameters that a checkpoint recommends."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gguf import constants

from llmcl.checkpoint.sampling_defaults import sampling_defaults
from llmcl.sampling_options import PARAMETERS


def test_generation_config(tmp_path: Path) -> None:
    folder = SimpleNamespace(path=tmp_path, gguf_metadata=None)
    assert sampling_defaults(folder) == {}  # type: ignore[arg-type]
    # As Qwen3-8B's generation_config.json has it.
    settings = {"do_sample": True, "eos_token_id": [151645, 151643], "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    (tmp_path / "generation_config.json").write_text(json.dumps(settings | {"repetition_penalty": 1.1}))
    expected = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repeat_penalty": 1.1}
    assert sampling_defaults(folder) == expected  # type: ignore[arg-type]


def test_gguf_keys_are_those_of_the_gguf_package() -> None:
    keys = constants.Keys.General
    expected = {
        "temperature": keys.SAMPLING_TEMP,
        "top_k": keys.SAMPLING_TOP_K,
        "top_p": keys.SAMPLING_TOP_P,
        "min_p": keys.SAMPLING_MIN_P,
        "repeat_penalty": keys.SAMPLING_PENALTY_REPEAT,
        "repeat_window": keys.SAMPLING_PENALTY_LAST_N,
        "xtc_probability": keys.SAMPLING_XTC_PROBABILITY,
        "xtc_threshold": keys.SAMPLING_XTC_THRESHOLD,
        "mirostat": keys.SAMPLING_MIROSTAT,
        "mirostat_tau": keys.SAMPLING_MIROSTAT_TAU,
        "mirostat_eta": keys.SAMPLING_MIROSTAT_ETA,
    }
    table = {name: each.gguf_key for name, each in PARAMETERS.items() if each.gguf_key is not None}
    assert {name: f"general.sampling.{key}" for name, key in table.items()} == expected
    file = SimpleNamespace(gguf_metadata={keys.SAMPLING_TEMP: 0.7, keys.SAMPLING_TOP_K: 20, "general.name": "x"})
    assert sampling_defaults(file) == {"temperature": 0.7, "top_k": 20}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temp", -1),
        ("temp", "hot"),
        ("temp", True),
        ("temp", float("nan")),
        ("top_k", 2.5),
        ("top_p", 0),
        ("min_p", 2.0),
        ("penalty_repeat", 0.0),
    ],
)
def test_values_out_of_range_are_skipped(key: str, value: Any) -> None:
    assert sampling_defaults(SimpleNamespace(gguf_metadata={f"general.sampling.{key}": value})) == {}  # type: ignore[arg-type]
