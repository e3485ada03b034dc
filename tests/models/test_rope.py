"""Rotary settings as checkpoints state them, and their frequencies against transformers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from made_configs import LLAMA3_SCALING, from_gguf, gguf_of, hf

from llmcl.architectures.config import GgufFactors, RopeScaling, config_from_gguf
from llmcl.errors import CheckpointError


@pytest.mark.parametrize("scaling", [{"factor": 4.0, "rope_type": "linear"}, {"factor": 4.0, "type": "linear"}])
def test_rope_settings_in_old_and_new_form_are_the_same(scaling):
    old = hf(rope_theta=5e5, rope_scaling=scaling)
    new = hf(rope_theta=None, rope_scaling=None, rope_parameters={**scaling, "rope_theta": 5e5})
    assert old == new
    assert old.rope_scaling == RopeScaling("linear", 4.0)


@pytest.mark.parametrize("head_dim", [32, 64, 80, 128])
@pytest.mark.parametrize("theta", [10000.0, 100000.0, 500000.0])
@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "llama3", **LLAMA3_SCALING},
    ],
    ids=lambda scaling: scaling["rope_type"],
)
def test_inv_freq_is_that_of_transformers(head_dim, theta, scaling):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    sizes = {
        "hidden_size": head_dim * 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": head_dim,
    }
    rope = {"rope_parameters": {"rope_theta": theta, **scaling}, "max_position_embeddings": 131072}
    reference = LlamaRotaryEmbedding(LlamaConfig(**sizes, **rope)).inv_freq.numpy()
    inv_freq = hf(**sizes, **rope, rope_theta=None).inv_freq()
    assert inv_freq.dtype == np.float32
    assert inv_freq.shape == (head_dim // 2,)
    # PyTorch's float32 power is itself only good to the last bit, and not the same bit on every processor.
    np.testing.assert_array_max_ulp(inv_freq, reference, maxulp=2)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}


@pytest.mark.parametrize(
    ("scaling", "max_context"),
    [
        ({**YARN}, 1024),
        ({**YARN, "beta_fast": 8.0, "beta_slow": 2.0, "truncate": False}, 1024),
        ({**YARN, "attention_factor": 1.5}, 1024),
        ({**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}, 1024),
        ({**YARN, "mscale": 2.0, "mscale_all_dim": 0.5, "original_max_position_embeddings": 1000000}, 1024),
        ({"rope_type": "dynamic", "factor": 4.0}, 1024),
        ({"rope_type": "dynamic", "factor": 4.0}, 1000),
        ({"rope_type": "dynamic", "factor": 4.0}, 3000),
        ({"rope_type": "longrope", "original_max_position_embeddings": 256}, 256),
        ({"rope_type": "longrope", "original_max_position_embeddings": 256}, 257),
        ({"rope_type": "longrope", "original_max_position_embeddings": 256, "attention_factor": 2.0}, 257),
    ],
)
def test_rotations_that_depend_on_the_context_are_those_of_transformers(scaling, max_context):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    sizes = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}
    if scaling["rope_type"] == "longrope":
        scaling = scaling | {
            "short_factor": [1.0 + i / 8 for i in range(32)],
            "long_factor": [2.0 + i for i in range(32)],
        }
    rope = {"rope_parameters": {"rope_theta": 10000.0, **scaling}, "max_position_embeddings": 1024}
    theirs = LlamaConfig(**sizes, **rope)
    inv_freq, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](theirs, seq_len=max_context)
    ours = hf(**sizes, **rope, rope_theta=None).rotations(max_context)["main"]
    np.testing.assert_allclose(ours[0], inv_freq.numpy(), rtol=1e-6)
    np.testing.assert_allclose(ours[1], factor, rtol=1e-7)


def test_a_share_of_the_head_rotates():
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 24, "long_factor": [2.0] * 24, "rope_theta": 1e4}
    changes = {"model_type": "phi3", "architectures": None, "num_attention_heads": 9, "partial_rotary_factor": 0.75}
    for form in ({"rope_scaling": rope}, {"rope_parameters": {**rope, "partial_rotary_factor": 0.75}}):
        config = hf(**changes, **form, rope_theta=1e4)
        assert (config.head_dim, config.rotary_dim) == (64, 48)
        assert config.rope_scaling is not None and config.rope_scaling.original_max_position == 4096
        rotation = config.rotations(8192)["main"]
        assert rotation.shape == (2, 32) and not rotation[0, 24:].any() and (rotation[1, 24:] == 1).all()
        np.testing.assert_array_equal(2 * rotation[0, :24], config.rotations(4096)["main"][0, :24])
    with pytest.raises(CheckpointError, match="short_factor: 24 values, expected 32"):
        hf(**changes | {"partial_rotary_factor": 1.0}, rope_scaling=rope)
    # The names of scalings in the first checkpoints.
    for kind in ("su", "yarn"):
        assert hf(**changes, rope_scaling={**rope, "rope_type": kind}, rope_theta=1e4) == config


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({**YARN, "factor": 0}, "factor"),
        ({**YARN, "beta_fast": 0.5}, "beta_fast"),
        ({**YARN, "mscale": "1"}, "mscale"),
        ({**YARN, "truncate": 1}, "truncate"),
        ({**YARN, "attention_factor": -1.0}, "attention_factor"),
        ({**YARN, "original_max_position_embeddings": 0}, "original_max_position_embeddings"),
        ({"rope_type": "dynamic"}, "factor"),
        ({"rope_type": "longrope"}, "short_factor"),
        ({"rope_type": "longrope", "short_factor": [1.0] * 32, "long_factor": ["1"] * 32}, "long_factor"),
        ({"rope_type": "longrope", "short_factor": [1.0] * 32, "long_factor": [math.inf] * 32}, "long_factor"),
    ],
)
def test_rotary_settings_are_checked(scaling, message):
    with pytest.raises(CheckpointError, match=message):
        hf(rope_scaling=scaling)


def test_gguf_rope_factors_give_the_frequencies_they_were_made_from():
    # The converter of llama.cpp writes llama3 scaling as the ratio of the unscaled to the scaled frequencies.
    scaled = hf(rope_scaling={"rope_type": "llama3", **LLAMA3_SCALING}).inv_freq()
    factors = hf().inv_freq() / scaled
    config = from_gguf(rope_factors=GgufFactors(factors.tolist()))
    assert config.rope_scaling is not None
    assert config.rope_scaling.kind == "factors"
    np.testing.assert_allclose(config.inv_freq(), scaled, rtol=3e-7)


@pytest.mark.parametrize(
    "changes",
    [
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
        {"llama.rope.scale_linear": 4.0},
    ],
)
def test_gguf_linear_rope_scaling(changes):
    assert from_gguf(changes).rope_scaling == RopeScaling("linear", 4.0)


def test_gguf_factors_and_linear_scaling_multiply():
    config = from_gguf({"llama.rope.scale_linear": 4.0}, rope_factors=GgufFactors([2.0] * 32))
    np.testing.assert_allclose(config.inv_freq(), from_gguf().inv_freq() / 8, rtol=3e-7)


@pytest.mark.parametrize("nested", [False, True])
def test_layers_with_a_window_have_a_rotation_of_their_own(nested):
    scaling = {"rope_type": "linear", "factor": 8.0}
    old = {"rope_theta": 2e6, "rope_local_base_freq": 3e4, "rope_scaling": scaling}
    local = {"rope_type": "default", "rope_theta": 3e4}
    new = {"rope_parameters": {"full_attention": {**scaling, "rope_theta": 2e6}, "sliding_attention": local}}
    config = hf(model_type="gemma3_text", architectures=None, **({"rope_theta": None, **new} if nested else old))
    assert (config.rope_theta, config.local_rope_theta) == (2e6, 3e4)
    assert config.rope_scaling == RopeScaling("linear", 8.0)
    assert [config.attention(i).rotation for i in range(6)] == ["local"] * 5 + ["main"]
    tables = config.rotations()
    np.testing.assert_allclose(tables["local"][0], 3e4 ** -(np.arange(128) / 128), rtol=1e-6)
    np.testing.assert_allclose(tables["main"][0], 2e6 ** -(np.arange(128) / 128) / 8, rtol=1e-6)
    old_gguf = config_from_gguf(gguf_of("gemma3", **{"gemma3.rope.freq_base": 1e6}), [])
    assert (old_gguf.rope_theta, old_gguf.local_rope_theta) == (1e6, 1e4)


@pytest.mark.parametrize("factors", [[1.0] * 31, [math.nan] * 32, [0.0] * 32, [math.inf] * 32])
def test_gguf_rope_factors_are_checked(factors):
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight"):
        from_gguf(rope_factors=GgufFactors(factors))
    with pytest.raises(CheckpointError, match=r"rope_factors_short\.weight"):
        from_gguf(rope_factors=GgufFactors(short=factors, long=factors))
