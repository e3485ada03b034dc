"""The NumPy twins of a layer's ops, against PyTorch and transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import (
    FLOAT64,
    LLAMA3_SCALING,
    normal,
    random_weights,
    relative_error,
    small_config,
    tensor,
    transformers_model,
)

from llmcl import reference

torch = pytest.importorskip("torch")


def test_embed() -> None:
    table = normal(0, 7, 16).astype(np.float32)
    ids = [6, 0, 6, 3]
    expected = torch.nn.functional.embedding(torch.tensor(ids), tensor(table)).numpy()
    actual = reference.embed(table, ids)
    assert actual.dtype == np.float64
    assert np.array_equal(actual, expected)


@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e4])
def test_rms_norm(scale: float) -> None:
    x, weight = normal(1, 5, 48) * scale, normal(2, 48)
    expected = torch.nn.functional.rms_norm(tensor(x), (48,), tensor(weight), 1e-5).numpy()
    assert relative_error(reference.rms_norm(x, weight, 1e-5), expected) < FLOAT64


def test_linear_computes_float32_input_in_float64() -> None:
    x, weight = normal(3, 4, 32).astype(np.float32), normal(4, 21, 32).astype(np.float32)
    expected = torch.nn.functional.linear(tensor(x).double(), tensor(weight).double()).numpy()
    assert relative_error(reference.linear(x, weight), expected) < FLOAT64


def test_swiglu() -> None:
    gate, up = normal(5, 3, 40) * 10, normal(6, 3, 40)
    gate[0, :4] = [0.0, 800.0, -800.0, -40.0]
    expected = (torch.nn.functional.silu(tensor(gate)) * tensor(up)).numpy()
    with np.errstate(all="raise", under="ignore"):
        actual = reference.swiglu(gate, up)
    assert np.allclose(actual, expected, rtol=1e-12, atol=1e-300)


@pytest.mark.parametrize("scaling", [None, LLAMA3_SCALING])
def test_rope_table_and_rope_are_those_of_transformers(scaling: Any) -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    config = small_config(head_dim=32, rope_scaling=scaling, max_position=1 << 17)
    # Far positions tell float32 angles from exact ones: the two differ by 4e-3 there.
    positions = np.array([0, 1, 2, 63, 577, 4099, 99991, 131071])
    rotary = transformers_model(config, random_weights(config, 0)).model.rotary_emb
    x = normal(7, len(positions), 3, 32)
    cos_hf, sin_hf = rotary(tensor(x[None]).float(), torch.from_numpy(positions)[None])
    cos, sin = reference.rope_table(positions, config.inv_freq())
    assert cos.shape == sin.shape == (len(positions), 16)
    assert relative_error(cos, cos_hf[0, :, :16].numpy()) < 2e-7
    assert relative_error(sin, sin_hf[0, :, :16].numpy()) < 2e-7

    wide_cos, wide_sin = (tensor(np.concatenate([t, t], axis=-1)[None]) for t in (cos, sin))
    expected, _ = apply_rotary_pos_emb(tensor(x[None]), tensor(x[None]), wide_cos, wide_sin, unsqueeze_dim=2)
    assert relative_error(reference.rope(x, cos, sin), expected[0].numpy()) < FLOAT64
