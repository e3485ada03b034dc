"""ModelConfig: what it reads, what it refuses."""

from __future__ import annotations

import math

import numpy as np
import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from made_configs import GGUF_METADATA, HF_CONFIG, LLAMA3_SCALING, from_gguf, hf

from llmcl.architectures.config import ModelConfig, config_from_gguf, config_from_hf
from llmcl.architectures.families.blocks import Attention, GatedMlp
from llmcl.errors import CheckpointError, UnsupportedModelError


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
        ({"eos_token_id": [7, None]}, (7,)),
        ({"eos_token_id": [7, 49152, -1]}, (7,)),
        ({"eos_token_id": 49152}, (2,)),
    ],
)
def test_generation_config_decides_which_ids_end_a_text(generation_config, expected):
    assert config_from_hf(HF_CONFIG, generation_config).eos_token_ids == expected


def test_dtype_has_an_old_and_a_new_name():
    assert hf(torch_dtype="float16").dtype == "float16"
    assert hf(torch_dtype=None, dtype="bfloat16").dtype == "bfloat16"


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


def test_an_answer_of_glm_ends_where_anothers_turn_begins():
    tokens = ["a", "<|endoftext|>", "<|user|>", "<|observation|>", "b"]
    ended = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.eos_token_id": 1}
    assert from_gguf(ended).eos_token_ids == (1, 2, 3)
    assert from_gguf({**ended, "tokenizer.ggml.eom_token_id": 4}).eos_token_ids == (1, 4, 2, 3)
    assert from_gguf({**ended, "tokenizer.ggml.tokens": ["a", "b", "<|user|>"]}).eos_token_ids == (1,)


def test_an_answer_of_gemma_ends_where_a_tools_result_begins():
    tokens = ["a", "<eos>", "<turn|>", "<|tool_response>", "b"]
    assert from_gguf({"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.eos_token_id": 1}).eos_token_ids == (1, 2, 3)


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
        ({"model_type": "qwen3_mo"}, "'qwen3_mo'; the nearest it runs is qwen3_moe"),
        ({"model_type": "mamba"}, "architecture 'mamba', which has state-space layers .*`llmcl models`"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"model_type": "mistral", "architectures": None, "attention_bias": True}, "attention_bias"),
        ({"model_type": "mistral", "architectures": None, "mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"sliding_window": 4096}, "sliding_window 4096"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"rope_scaling": {"type": "su"}}, "'su'; it supports .*yarn"),
        ({"model_type": "phi3", "architectures": None, "partial_rotary_factor": 0.01}, "partial rotary"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ between layers"),
        ({"partial_rotary_factor": 0.5}, "partial rotary"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial rotary"),
        ({"head_dim": 40}, "head_dim 40"),
        ({"hidden_size": 580, "head_dim": 64}, "hidden_size 580"),
        ({"intermediate_size": 100}, "intermediate_size 100"),
        ({"quantization_config": {"quant_method": "hqq"}}, "'hqq'"),
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
        ("eos_token_id", 2.5),
        ("eos_token_id", [2, "3"]),
        ("bos_token_id", "1"),
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
        ({"general.architecture": "mamba"}, UnsupportedModelError, "GGUF architecture 'mamba', which has state-space"),
        ({"llama.expert_count": 8}, CheckpointError, "llama.expert_used_count is missing"),
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
        ({"tokenizer.ggml.bos_token_id": 0.5}, CheckpointError, "bos_token_id"),
        ({"general.architecture": "clip"}, UnsupportedModelError, "mmproj"),
        ({"llama.rope.scaling.type": "longrope"}, CheckpointError, "rope_factors_short.weight .* missing"),
    ],
)
def test_gguf_metadata_is_refused(changes, error, message):
    with pytest.raises(error, match=message):
        from_gguf(changes)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=examples(300), deadline=None)
@given(st.dictionaries(st.sampled_from([*HF_CONFIG, "head_dim", "rope_parameters", "dtype"]), JSON_VALUES, max_size=3))
def test_any_json_value_is_read_or_refused(changes):
    try:
        config = config_from_hf({**HF_CONFIG, **changes}, {**changes})
    except CheckpointError as error:
        assert str(error)
    else:
        assert np.isfinite(config.inv_freq()).all()
        assert config.n_parameters() < 1 << 50


@settings(max_examples=examples(300), deadline=None)
@given(st.dictionaries(st.sampled_from(list(GGUF_METADATA)), JSON_VALUES, max_size=3))
def test_any_gguf_value_is_read_or_refused(changes):
    try:
        config = from_gguf(changes)
    except CheckpointError as error:
        assert str(error)
    else:
        assert np.isfinite(config.inv_freq()).all()
