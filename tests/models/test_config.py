"""ModelConfig: what it reads, what it refuses, and its rotary frequencies against transformers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from helpers import windows_of
from hypothesis import given, settings
from hypothesis import strategies as st

from llmcl.errors import CheckpointError, UnsupportedModelError
from llmcl.models.config import GgufFactors, ModelConfig, RopeScaling, config_from_gguf, config_from_hf
from llmcl.models.families import FAMILIES
from llmcl.models.families.blocks import Attention, GatedMlp

HF_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "rope_scaling": None,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GGUF_METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 30,
    "llama.context_length": 8192,
    "llama.embedding_length": 576,
    "llama.feed_forward_length": 1536,
    "llama.attention.head_count": 9,
    "llama.attention.head_count_kv": 3,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 100000.0,
    "llama.rope.dimension_count": 64,
    "llama.vocab_size": 49152,
    "tokenizer.ggml.tokens": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}
LLAMA3_SCALING = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def hf(**changes: Any) -> ModelConfig:
    return config_from_hf({**HF_CONFIG, **changes})


def from_gguf(changes: dict[str, Any] | None = None, **kwargs: Any) -> ModelConfig:
    return config_from_gguf({**GGUF_METADATA, **(changes or {})}, ["token_embd.weight"], **kwargs)


def test_hf_config_is_read():
    assert hf() == ModelConfig(
        architecture="llama",
        hidden_size=576,
        intermediate_size=1536,
        layers=((Attention(), GatedMlp()),) * 30,
        n_q_heads=9,
        n_kv_heads=3,
        head_dim=64,
        vocab_size=49152,
        max_position=8192,
        rms_norm_eps=1e-5,
        rope_theta=100000.0,
        rope_scaling=None,
        tie_embeddings=True,
        dtype="bfloat16",
        bos_token_id=1,
        eos_token_ids=(2,),
    )


def test_gguf_metadata_describes_the_same_model():
    by_gguf, by_hf = from_gguf(), hf()
    assert by_gguf.dtype == "quantized"
    assert {**vars(by_gguf), "dtype": None} == {**vars(by_hf), "dtype": None}


def test_absent_keys_have_the_defaults_of_transformers():
    from transformers import LlamaConfig

    required = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")
    sparse = {key: HF_CONFIG[key] for key in required} | {"num_attention_heads": 9}
    config, reference = config_from_hf(sparse), LlamaConfig(**sparse)
    assert config.n_kv_heads == reference.num_key_value_heads == 9
    assert config.head_dim == reference.head_dim == 64
    assert config.max_position == reference.max_position_embeddings
    assert config.rms_norm_eps == reference.rms_norm_eps
    assert config.rope_theta == reference.rope_parameters["rope_theta"]
    assert config.tie_embeddings == reference.tie_word_embeddings
    assert (config.bos_token_id, config.eos_token_ids) == (None, ())


@pytest.mark.parametrize(
    ("generation_config", "expected"),
    [
        (None, (2,)),
        ({}, (2,)),
        ({"eos_token_id": 7}, (7,)),
        ({"eos_token_id": [7, 8, 7]}, (7, 8)),
    ],
)
def test_generation_config_decides_which_ids_end_a_text(generation_config, expected):
    assert config_from_hf(HF_CONFIG, generation_config).eos_token_ids == expected


def test_dtype_has_an_old_and_a_new_name():
    assert hf(torch_dtype="float16").dtype == "float16"
    assert hf(torch_dtype=None, dtype="bfloat16").dtype == "bfloat16"


def test_mistral_without_an_active_window_is_read():
    changes = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    assert hf(**changes, sliding_window=8192).architecture == "mistral"
    assert hf(**changes, sliding_window=None).architecture == "mistral"


def test_every_family_has_the_defaults_of_transformers():
    """Of keys that config.json leaves out."""
    import transformers

    required = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")
    for model_type, family in FAMILIES.items():
        sparse = {key: HF_CONFIG[key] for key in required} | {"num_attention_heads": 32, "hidden_size": 2048}
        theirs = transformers.CONFIG_MAPPING[model_type](**sparse)
        config = config_from_hf({"model_type": model_type, **sparse})
        assert config.head_dim == getattr(theirs, "head_dim", 64), model_type
        assert config.n_kv_heads == theirs.num_key_value_heads, model_type
        assert config.max_position == theirs.max_position_embeddings, model_type
        assert config.tie_embeddings == theirs.tie_word_embeddings, model_type
        assert config.rms_norm_eps == theirs.rms_norm_eps, model_type
        rope = theirs.rope_parameters
        assert config.rope_theta == rope.get("full_attention", rope)["rope_theta"], model_type
        if family.local_rope:
            assert config.local_rope_theta == rope["sliding_attention"]["rope_theta"], model_type
        assert config.attention(0).soft_cap == getattr(theirs, "attn_logit_softcapping", None), model_type
        assert config.logit_soft_cap == getattr(theirs, "final_logit_softcapping", None), model_type
        scalar = getattr(theirs, "query_pre_attn_scalar", None)
        multiplier = getattr(theirs, "attention_multiplier", None)
        assert config.attention_scale == (multiplier if scalar is None else scalar**-0.5), model_type
        window = getattr(theirs, "sliding_window", None)
        types = getattr(theirs, "layer_types", None) or ["sliding_attention"] * 30
        windows = tuple(window if kind == "sliding_attention" else None for kind in types)
        assert windows_of(config) == windows, model_type


def biases_of(config: ModelConfig) -> set[str]:
    """The projections of the first layer that add a bias."""
    names = (name for name in config.tensors() if name.startswith("model.layers.0.") and name.endswith("_proj.bias"))
    return {name.split(".")[-2].removesuffix("_proj") for name in names}


def test_biases_are_read():
    assert biases_of(hf(attention_bias=True)) == {"q", "k", "v", "o"}
    assert biases_of(hf(mlp_bias=True)) == {"gate", "up", "down"}
    assert biases_of(hf()) == set()
    names = ["token_embd.weight", *(f"blk.{i}.attn_q.bias" for i in range(30)), "blk.0.ffn_gate.bias"]
    assert biases_of(config_from_gguf(GGUF_METADATA, names)) == {"q", "k", "v", "gate", "up", "down"}


@pytest.mark.parametrize(
    ("changes", "unrotated"),
    [
        ({}, {3, 7}),
        ({"no_rope_layer_interval": 3}, {2, 5}),
        ({"no_rope_layers": [0, 1, 1, 1, 1, 1, 1, 0]}, {0, 7}),
        ({"no_rope_layers": [1] * 8}, set()),
    ],
)
def test_layers_that_do_not_rotate(changes, unrotated):
    config = hf(model_type="smollm3", architectures=None, num_hidden_layers=8, **changes)
    assert {i for i in range(8) if config.attention(i).rotation == "none"} == unrotated


def test_multipliers_are_read():
    keys = {"embedding_multiplier": 12, "residual_multiplier": 0.5, "attention_multiplier": 0.25, "logits_scaling": 8}
    config = hf(model_type="granite", architectures=None, **keys)
    scales = config.embedding_scale, config.residual_scale, config.attention_scale, config.logit_scale
    assert scales == (12.0, 0.5, 0.25, 0.125)
    values = {"embedding_scale": 12.0, "residual_scale": 0.5, "attention.scale": 0.25, "logit_scale": 8.0}
    by_gguf = config_from_gguf(gguf_of("granite", **{f"granite.{key}": value for key, value in values.items()}), [])
    assert scales == (by_gguf.embedding_scale, by_gguf.residual_scale, by_gguf.attention_scale, by_gguf.logit_scale)
    assert (config.stream_scale, config.stream_eps) == (24.0, 4e-5)
    assert config_from_gguf(gguf_of("granite"), []).attention_scale is None
    assert hf(**keys) == hf()  # Llama has none


@pytest.mark.parametrize(
    "key", ["embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"]
)
@pytest.mark.parametrize("value", [0, -1.0, math.nan, 1e300, "1"])
def test_multipliers_are_checked(key, value):
    with pytest.raises(CheckpointError, match=key):
        hf(model_type="granite", architectures=None, **{key: value})


@pytest.mark.parametrize("flags", [3, [1, 0], [2] * 30, ["1"] * 30])
def test_flags_of_layers_that_do_not_rotate_are_checked(flags):
    with pytest.raises(CheckpointError, match="no_rope_layers"):
        hf(model_type="smollm3", architectures=None, no_rope_layers=flags)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"model_type": "mistral", "sliding_window": 100}, (100, 100, 100)),
        ({"model_type": "mistral", "sliding_window": None}, (None,) * 3),
        ({"model_type": "qwen2", "sliding_window": 100, "max_window_layers": 1}, (None,) * 3),
        (
            {"model_type": "qwen2", "sliding_window": 100, "max_window_layers": 1, "use_sliding_window": True},
            (None, 100, 100),
        ),
        ({"model_type": "gemma2", "sliding_window": 100}, (100, None, 100)),
        ({"model_type": "gemma3_text", "sliding_window": 100}, (100, 100, 100)),
        ({"model_type": "gemma3_text", "sliding_window": 100, "sliding_window_pattern": 2}, (100, None, 100)),
        ({"model_type": "olmo3", "num_hidden_layers": 5, "sliding_window": 100}, (100, 100, 100, None, 100)),
        ({"model_type": "phi3", "sliding_window": 100}, (100, 100, 100)),
        (
            {
                "model_type": "gemma2",
                "sliding_window": 100,
                "layer_types": ["full_attention", "full_attention", "sliding_attention"],
            },
            (None, None, 100),
        ),
    ],
)
def test_the_window_of_each_layer(changes, windows):
    assert windows_of(hf(**{"architectures": None, "num_hidden_layers": 3, **changes})) == windows


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"layer_types": ["sliding_attention"]}, CheckpointError, "layer_types"),
        ({"layer_types": ["sliding_attention"] * 30, "sliding_window": None}, CheckpointError, "sliding_window"),
        ({"attn_logit_softcapping": -1.0}, CheckpointError, "attn_logit_softcapping"),
        ({"query_pre_attn_scalar": 0}, CheckpointError, "query_pre_attn_scalar"),
        ({"hidden_activation": "gelu"}, UnsupportedModelError, "'gelu' .hidden_activation.*gelu_pytorch_tanh"),
        ({"use_bidirectional_attention": True}, UnsupportedModelError, "use_bidirectional_attention"),
        ({"architectures": ["Gemma3ForCausalLM"]}, UnsupportedModelError, "supports Gemma2ForCausalLM"),
    ],
)
def test_gemma2_is_refused(changes, error, message):
    with pytest.raises(error, match=message):
        hf(**{"model_type": "gemma2", "architectures": None, **changes})


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


def test_gguf_vocabulary_size_may_come_from_the_tokens():
    metadata = {key: value for key, value in GGUF_METADATA.items() if key != "llama.vocab_size"}
    assert config_from_gguf(metadata, []).vocab_size == 3


def test_gguf_end_of_turn_counts_beside_the_end_of_the_document():
    tokens = ["a", "<|end_of_text|>", "<|eot_id|>", "b"]
    named = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.eot_token_id": 3,
    }
    assert from_gguf(named).eos_token_ids == (1, 3, 2)


@pytest.mark.parametrize("tied", [True, False])
def test_n_parameters(tied):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 100, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    config = hf(**sizes, tie_word_embeddings=tied)
    model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=tied))
    assert config.n_parameters() == model.num_parameters()
    assert config.n_parameters() == sum(math.prod(shape) for shape in config.tensors().values())
    names = {name for name, _ in model.named_parameters()}
    assert set(config.tensors()) == names


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "architecture 'mamba'; it supports .*gemma2, .*llama, mistral, .*qwen2, qwen3"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"model_type": "qwen3", "architectures": None, "attention_bias": True}, "attention_bias"),
        ({"model_type": "mistral", "architectures": None, "mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"sliding_window": 4096}, "sliding_window 4096"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"rope_scaling": {"type": "proportional"}}, "'proportional'; it supports .*yarn"),
        ({"model_type": "phi3", "architectures": None, "partial_rotary_factor": 0.01}, "partial rotary"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ between layers"),
        ({"partial_rotary_factor": 0.5}, "partial rotary"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial rotary"),
        ({"head_dim": 40}, "head_dim 40"),
        ({"hidden_size": 580, "head_dim": 64}, "hidden_size 580"),
        ({"intermediate_size": 100}, "intermediate_size 100"),
        ({"quantization_config": {"quant_method": "gptq"}}, "'gptq'"),
        ({"num_local_experts": 8}, "experts"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"num_attention_heads": 4096, "num_key_value_heads": 1, "head_dim": 1024}, "4096 heads of 1024"),
    ],
)
def test_features_that_are_not_there_are_refused_by_name(changes, message):
    with pytest.raises(UnsupportedModelError, match=message):
        hf(**changes)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("vocab_size", 10**9),
        ("vocab_size", 0),
        ("vocab_size", -5),
        ("vocab_size", "49152"),
        ("vocab_size", 49152.0),
        ("vocab_size", True),
        ("vocab_size", None),
        ("vocab_size", 10**400),
        ("hidden_size", [576]),
        ("num_hidden_layers", 10**6),
        ("num_key_value_heads", 4),
        ("num_key_value_heads", 18),
        ("head_dim", 0),
        ("max_position_embeddings", 1 << 60),
        ("rms_norm_eps", math.nan),
        ("rms_norm_eps", -1e-5),
        ("rms_norm_eps", 0),
        ("rms_norm_eps", "1e-5"),
        ("rope_theta", math.inf),
        ("rope_theta", 10**400),
        ("rope_scaling", "linear"),
        ("rope_scaling", {"rope_type": 3}),
        ("rope_scaling", {"rope_type": "linear"}),
        ("rope_scaling", {"rope_type": "linear", "factor": 0}),
        ("rope_scaling", {"rope_type": "linear", "factor": 1e-300}),
        ("rope_scaling", {"rope_type": "llama3", **LLAMA3_SCALING, "high_freq_factor": 1.0}),
        ("tie_word_embeddings", 1),
        ("eos_token_id", 49152),
        ("eos_token_id", [2, -1]),
        ("bos_token_id", 10**9),
        ("hidden_act", 3),
        ("quantization_config", 3),
        ("layer_types", 3),
        ("model_type", None),
    ],
)
def test_senseless_values_are_damage_and_named(key, value):
    with pytest.raises(CheckpointError) as caught:
        hf(**{key: value})
    assert not isinstance(caught.value, UnsupportedModelError)
    assert "config.json" in str(caught.value)
    if not key.startswith(("rope_scaling", "num_key")):
        assert key in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"general.architecture": "mamba"}, UnsupportedModelError, "'mamba'; it supports .*gemma2, .*llama, .*qwen2"),
        ({"llama.expert_count": 8}, UnsupportedModelError, "experts"),
        ({"llama.expert_count": np.array([8, 8])}, CheckpointError, "llama.expert_count"),
        ({"llama.rope.dimension_count": 32}, UnsupportedModelError, "partial rotary"),
        ({"llama.attention.value_length": 32}, UnsupportedModelError, "value_length 32"),
        ({"llama.rope.scaling.type": "cubic"}, UnsupportedModelError, "'cubic'"),
        ({"llama.attention.head_count_kv": np.array([3, 3])}, CheckpointError, "head_count_kv"),
        ({"llama.attention.layer_norm_rms_epsilon": math.nan}, CheckpointError, "rms_epsilon"),
        ({"llama.block_count": 2**60}, CheckpointError, "block_count"),
        ({"llama.vocab_size": 2}, CheckpointError, "3 tokens"),
        ({"tokenizer.ggml.tokens": np.zeros(3)}, CheckpointError, "tokens"),
        ({"tokenizer.ggml.tokens": [["a"]]}, CheckpointError, "tokens"),
        ({"tokenizer.ggml.bos_token_id": 49152}, CheckpointError, "bos_token_id"),
    ],
)
def test_gguf_metadata_is_refused(changes, error, message):
    with pytest.raises(error, match=message):
        from_gguf(changes)


def gguf_of(architecture: str, **changes: Any) -> dict[str, Any]:
    metadata = {key.replace("llama.", f"{architecture}."): value for key, value in GGUF_METADATA.items()}
    return {**metadata, "general.architecture": architecture, **changes}


def test_a_window_in_a_gguf_file():
    assert windows_of(from_gguf({"llama.attention.sliding_window": 4096})) == (4096,) * 30
    gemma2 = config_from_gguf(gguf_of("gemma2", **{"gemma2.attention.sliding_window": 64}), [])
    assert windows_of(gemma2) == (64, None) * 15
    assert windows_of(config_from_gguf(gguf_of("gemma2"), [])) == (4096, None) * 15
    with pytest.raises(UnsupportedModelError, match=r"sliding-window.*qwen2\.attention\.sliding_window 64"):
        config_from_gguf(gguf_of("qwen2", **{"qwen2.attention.sliding_window": 64}), [])


def test_which_layers_of_a_gguf_file_have_a_window():
    key = "gemma3.attention.sliding_window"
    layers = {"gemma3.block_count": 4, key: 64}

    def windows(**changes: Any) -> tuple[int | None, ...]:
        return windows_of(config_from_gguf(gguf_of("gemma3", **layers, **changes), []))

    assert windows() == (64, 64, 64, 64)
    assert windows(**{f"{key}_pattern": 2}) == (64, None, 64, None)
    assert windows(**{f"{key}_pattern": np.array([False, True, True, False])}) == (None, 64, 64, None)
    with pytest.raises(CheckpointError, match=r"sliding_window_pattern.*4 layers"):
        windows(**{f"{key}_pattern": np.array([True])})
    with pytest.raises(CheckpointError, match="sliding_window_pattern"):
        windows(**{f"{key}_pattern": "2"})


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


def test_olmo3_in_a_gguf_file_is_olmo2_with_a_window():
    assert config_from_gguf(gguf_of("olmo2"), []).architecture == "olmo2"
    config = config_from_gguf(gguf_of("olmo2", **{"olmo2.attention.sliding_window": 64}), [])
    assert config.architecture == "olmo3" and windows_of(config)[:5] == (64, 64, 64, None, 64)
    assert config.local_rope_theta == config.rope_theta


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50"),
        ({"model_type": "smollm3", "use_sliding_window": True}, "use_sliding_window True"),
        (
            {"model_type": "olmo3", "rope_parameters": {"sliding_attention": {"rope_type": "yarn"}}},
            "'yarn' in layers with a window",
        ),
        ({"model_type": "gemma3", "text_config": {}}, "'gemma3'"),
    ],
)
def test_features_that_a_family_does_not_have_are_refused(changes, message):
    with pytest.raises(UnsupportedModelError, match=message):
        hf(architectures=None, **changes)


def test_what_gguf_says_of_gemma2():
    config = config_from_gguf(gguf_of("gemma2"), [])
    assert (config.attention(0).soft_cap, config.logit_soft_cap, config.norm_offset) == (50.0, 30.0, 0.0)
    assert (config.embedding_scale, config.attention_scale) == (24.0, None)
    caps = {"gemma2.attn_logit_softcapping": 20.0, "gemma2.final_logit_softcapping": 10.0}
    config = config_from_gguf(gguf_of("gemma2", **caps), [])
    assert (config.attention(0).soft_cap, config.logit_soft_cap) == (20.0, 10.0)
    # The size with 46 layers divides by hidden_size / heads, which the format cannot say.
    large = {"gemma2.block_count": 46, "gemma2.attention.head_count": 3, "gemma2.attention.key_length": 64}
    large |= {"gemma2.attention.value_length": 64}
    config = config_from_gguf(gguf_of("gemma2", **large), [])
    assert config.attention_scale == 192**-0.5


@pytest.mark.parametrize("factors", [[1.0] * 31, [math.nan] * 32, [0.0] * 32, [math.inf] * 32])
def test_gguf_rope_factors_are_checked(factors):
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight"):
        from_gguf(rope_factors=GgufFactors(factors))
    with pytest.raises(CheckpointError, match=r"rope_factors_short\.weight"):
        from_gguf(rope_factors=GgufFactors(short=factors, long=factors))


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from([*HF_CONFIG, "head_dim", "rope_parameters", "dtype"]), JSON_VALUES, max_size=3))
def test_any_json_value_is_read_or_refused(changes):
    try:
        config = config_from_hf({**HF_CONFIG, **changes}, {**changes})
    except CheckpointError as error:
        assert str(error)
    else:
        assert np.isfinite(config.inv_freq()).all()
        assert config.n_parameters() < 1 << 50


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(list(GGUF_METADATA)), JSON_VALUES, max_size=3))
def test_any_gguf_value_is_read_or_refused(changes):
    try:
        config = from_gguf(changes)
    except CheckpointError as error:
        assert str(error)
    else:
        assert np.isfinite(config.inv_freq()).all()
