"""A model whose keys and values are held in 8 bits: what it costs, what it takes, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import random_weights, relative_error, save_folder, small_config
from late_kernels import compile_when_used

import llmcl
from llmcl import reference
from llmcl.checkpoint.quantize import quantize_rows
from llmcl.engine.llm import LLM
from llmcl.errors import UsageError
from llmcl.runtime.device import Device

pytestmark = pytest.mark.usefixtures("separate_launches_in_module")
compiled_when_used = pytest.fixture(compile_when_used, scope="module", autouse=True)

CONFIG = small_config()
OPTIONS: dict[str, Any] = {"dtype": "float32", "activation_dtype": "float32", "kv_dtype": "q8_0", "max_context": 100}
TEXT = (
    "The sky is blue because molecules of air scatter the shorter waves of sunlight more than the longer ones. "
    "At dusk the light crosses more air, most of the blue is lost on the way, and what arrives is red. "
) * 3


def test_the_twin_of_the_format_is_that_of_weights() -> None:
    x = np.random.default_rng(0).standard_normal((4, 48, 96)).astype(np.float32)
    x[0, 0, :32] = 0.0
    blocks = quantize_rows(x.reshape(-1, 96), "Q8_0")
    rounded = reference.round_to(x, "q8_0")
    np.testing.assert_array_equal(rounded.reshape(-1, 96), reference.dequantize("Q8_0", blocks))
    np.testing.assert_array_equal(reference.unpack_keys(reference.pack_keys(x)), rounded)
    np.testing.assert_array_equal(reference.unpack_values(reference.pack_values(x)), rounded)


# As a GPU the same device gets the portable kernels.
@pytest.mark.parametrize("kind", ["cpu", pytest.param("gpu", marks=pytest.mark.slow)])
def test_a_model_with_a_rounded_cache_is_its_twin(tmp_path: Path, default_device: Device, kind: str) -> None:
    weights = random_weights(CONFIG, seed=3)
    folder = save_folder(tmp_path / "model", CONFIG, weights)
    ids = [int(i) for i in np.random.default_rng(1).integers(0, CONFIG.vocab_size, 70)]
    twin, unrounded = (reference.forward(CONFIG, weights, ids, kv_dtype=kv_dtype) for kv_dtype in ("q8_0", None))
    device = Device(dataclasses.replace(default_device.entry, kind=kind))
    with llmcl.load(str(folder), device=device, **OPTIONS) as llm:
        prefilled = llm.logits(ids)
        llm.reset()
        llm.model.prefill(llm.sequence, ids[:40])
        for token in ids[40:]:
            llm.model.decode_token(llm.sequence, token)
        decoded = llm.device.read(llm.model.act.logits, np.float32, (CONFIG.vocab_size,))
    # Where float32 and float64 round to different sides, a number of the cache is one step off.
    assert relative_error(prefilled, twin) < 2e-3 < relative_error(unrounded, twin)
    assert relative_error(decoded, twin[-1]) < 2e-3


@pytest.mark.slow
def test_the_demo_model_is_as_good_as_with_float16(smollm2: LLM) -> None:
    ids = smollm2.encode(TEXT, raw=True)
    with llmcl.load(
        "smollm2", device=smollm2.device.entry.index, dtype="float32", kv_dtype="q8_0", max_context=1024
    ) as llm:
        assert llm.kv_dtype == "q8_0"
        assert llm.kv_bytes_per_position == smollm2.kv_bytes_per_position * 34 // 128
        answer = llm.generate("Why is the sky blue?", max_tokens=40).text
        actual, expected = llm.logits(ids), smollm2.logits(ids)
    assert "light" in answer
    assert relative_error(actual, expected) < 0.035  # queries are rounded, too, by processors with 8-bit dot products
    assert np.mean(actual.argmax(axis=1) == expected.argmax(axis=1)) > 0.97


def test_heads_that_the_format_cannot_hold_are_refused(tmp_path: Path, default_device: Device) -> None:
    shape = tmp_path / "config.json"
    sizes = {"hidden_size": 160, "intermediate_size": 160, "num_attention_heads": 2, "num_hidden_layers": 1}
    shape.write_text(json.dumps({"model_type": "llama", "vocab_size": 64, "rms_norm_eps": 1e-5, **sizes}))
    with pytest.raises(UsageError, match=r"head_dim of 80, which a q8_0 KV cache cannot hold.*multiple of 32"):
        llmcl.load_random(str(shape), device=default_device, kv_dtype="q8_0", max_context=64)
