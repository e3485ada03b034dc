"""The NumPy twin of the model, against transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import (
    FLOAT64,
    LLAMA3_SCALING,
    model_configs,
    random_weights,
    relative_error,
    small_config,
    transformers_model,
)

from llmcl import reference

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("name", list(model_configs()))
def test_forward_is_transformers(name: str) -> None:
    config = model_configs()[name]
    weights = random_weights(config, seed=22)
    token_ids = np.random.default_rng(23).integers(0, config.vocab_size, 37)
    actual = reference.forward(config, weights, token_ids)
    assert actual.dtype == np.float64 and actual.shape == (37, config.vocab_size)
    # transformers' norms and rotary tables stay in float32 in its float64 model too: hence not 1e-12.
    for dtype, tolerance in (("float64", 1e-6), ("float32", 5e-6)):
        model = transformers_model(config, weights, dtype)
        with torch.no_grad():
            expected = model(torch.from_numpy(token_ids)[None]).logits[0].numpy()
        assert relative_error(actual, expected) < tolerance, dtype


def test_forward_rope_scaling_and_every_weight_matter() -> None:
    """Each part changed alone moves the logits far beyond that tolerance: none can be wrong unseen."""
    config = small_config(rope_scaling=LLAMA3_SCALING)
    weights = random_weights(config, seed=24)
    token_ids = np.random.default_rng(25).integers(0, config.vocab_size, 37)
    logits = reference.forward(config, weights, token_ids)
    unscaled = reference.forward(small_config(), weights, token_ids)
    assert relative_error(unscaled, logits) > 1e-3
    for name in weights:
        changed = weights | {name: weights[name] * np.float32(1.05)}
        assert relative_error(reference.forward(config, changed, token_ids), logits) > 1e-4, name


@pytest.mark.parametrize("kv_dtype", ["float16", "bfloat16"])
def test_forward_with_a_reduced_cache_is_transformers_with_one(kv_dtype: str) -> None:
    from transformers import DynamicCache

    class ReducedCache(DynamicCache):
        def update(self, key_states: Any, value_states: Any, *args: Any, **options: Any) -> Any:
            reduced = getattr(torch, kv_dtype)
            rounded = (x.float().to(reduced).to(x.dtype) for x in (key_states, value_states))
            return super().update(*rounded, *args, **options)

    config = model_configs()["gqa3_dim64_untied"]
    weights = random_weights(config, seed=26)
    token_ids = np.random.default_rng(27).integers(0, config.vocab_size, 37)
    model = transformers_model(config, weights, "float64")
    with torch.no_grad():
        ids = torch.from_numpy(token_ids)[None]
        expected = model(ids, past_key_values=ReducedCache(config=model.config), use_cache=True).logits[0].numpy()
    actual = reference.forward(config, weights, token_ids, kv_dtype=kv_dtype)
    full = reference.forward(config, weights, token_ids)
    cost = relative_error(actual, full)
    # The two differ by 5e-7 before rounding, so one value in a thousand is rounded the other way.
    assert relative_error(actual, expected) < 0.2 * cost
    assert 1e-5 < cost < 2e-2


def test_forward_in_float32_stays_close_to_float64() -> None:
    config = small_config()
    weights = random_weights(config, seed=28)
    token_ids = [1, 5, 130, 77, 5]
    wide = reference.forward(config, weights, token_ids)
    narrow = reference.forward(config, weights, token_ids, dtype=np.float32)
    assert narrow.dtype == np.float32
    assert 0 < relative_error(narrow, wide) < 1e-5


def test_forward_is_causal() -> None:
    config = small_config()
    weights = random_weights(config, seed=29)
    token_ids = [3, 1, 4, 1, 5, 9, 2, 6]
    whole = reference.forward(config, weights, token_ids)
    for n in (1, 3, 7):
        assert relative_error(reference.forward(config, weights, token_ids[:n]), whole[:n]) < FLOAT64
