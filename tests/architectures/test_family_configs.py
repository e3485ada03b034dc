"""What each family reads of config.json and of GGUF metadata, and what it refuses."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from expert_weights import experts_of
from helpers import windows_of
from made_configs import GGUF_METADATA, HF_CONFIG, from_gguf, gguf_of, hf

from llmcl.architectures.config import GgufFactors, ModelConfig, RopeScaling, config_from_gguf, config_from_hf
from llmcl.architectures.config.encoder import ENCODERS
from llmcl.architectures.families import FAMILIES
from llmcl.architectures.families.blocks import Attention, Experts, ExpertSettings, Heads, QueryScale
from llmcl.architectures.families.plain_mlp import PlainMlp
from llmcl.architectures.families.recurrent import DeltaNet, DeltaSettings, Mamba, MambaSettings, ShortConv
from llmcl.errors import CheckpointError, UnsupportedModelError
from llmcl.models.kv_cache import kv_bytes_per_position


def test_mistral_without_an_active_window_is_read():
    changes = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    assert hf(**changes, sliding_window=8192).architecture == "mistral"
    assert hf(**changes, sliding_window=None).architecture == "mistral"


def test_every_family_has_the_defaults_of_transformers():
    """Of keys that config.json leaves out."""
    import transformers

    required = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")
    for model_type in sorted(FAMILIES.keys() - {*ENCODERS}):
        family = FAMILIES[model_type]
        sparse = {key: HF_CONFIG[key] for key in required} | {"num_attention_heads": 32, "hidden_size": 2048}
        if model_type == "deepseek_v2":
            sparse["moe_intermediate_size"] = 1408  # 1407 unless it says so, which no model has
        if family.recurrent == "mamba":  # of whose layers none has attention unless they are listed
            key = "layers_block_type" if family.single_blocks else "layer_types"
            sparse[key] = ["full_attention"] * HF_CONFIG["num_hidden_layers"]
        theirs = transformers.CONFIG_MAPPING[model_type](**sparse)
        if family.own_heads:
            theirs.allow_global_per_layer_attribute_access = True
            sizes = [of_layer.head_dim for of_layer in theirs.per_layer_config]
            assert [config_from_hf({"model_type": model_type, **sparse}).heads(i).size for i in range(30)] == sizes
        config = config_from_hf({"model_type": model_type, **sparse})
        if hasattr(theirs, "kv_lora_rank"):  # one row for all heads
            assert (config.n_kv_heads, config.head_dim) == (1, theirs.kv_lora_rank + theirs.qk_rope_head_dim)
        else:
            assert config.head_dim == (getattr(theirs, "head_dim", None) or 64), model_type
            assert config.n_kv_heads == theirs.num_key_value_heads, model_type
        assert config.max_position == theirs.max_position_embeddings, model_type
        assert config.tie_embeddings == getattr(theirs, "tie_word_embeddings", False), model_type
        eps_key = {
            "lfm2": "norm_eps",
            "lfm2_moe": "norm_eps",
            "nemotron_h": "layer_norm_epsilon",
            "cohere": "layer_norm_eps",
            "cohere2": "layer_norm_eps",
        }
        assert config.rms_norm_eps == getattr(theirs, eps_key.get(model_type, "rms_norm_eps")), model_type
        assert config.logit_scale == getattr(theirs, "logit_scale", None) or not family.logit_scale, model_type
        rope = {"rope_theta": 10000.0} if family.rotates == "never" else theirs.rope_parameters
        assert config.rope_theta == rope.get("full_attention", rope)["rope_theta"], model_type
        if family.local_rope:
            assert config.local_rope_theta == rope["sliding_attention"]["rope_theta"], model_type
        first = config.attention_layers[0]
        assert config.attention(first).soft_cap == getattr(theirs, "attn_logit_softcapping", None), model_type
        assert config.logit_soft_cap == getattr(theirs, "final_logit_softcapping", None), model_type
        scalar = getattr(theirs, "query_pre_attn_scalar", None)
        multiplier = getattr(theirs, "attention_multiplier", None)
        usual = family.attention_scale if multiplier is None else multiplier
        if hasattr(theirs, "kv_lora_rank"):
            stretch = 0.1 * math.log(rope.get("factor", 1.0)) + 1.0  # of YaRN, which one has by default
            usual = pytest.approx(stretch**2 * (theirs.qk_nope_head_dim + theirs.qk_rope_head_dim) ** -0.5)
        if hasattr(theirs, "qk_scale_factor"):
            usual = theirs.qk_scale_factor * theirs.head_dim**-0.5
            assert (config.logit_scale, config.post_norm_eps) == (theirs.output_multiplier, theirs.post_norm_eps)
        assert config.attention_scale == (usual if scalar is None else scalar**-0.5), model_type
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
        ({"model_type": "smollm3", "sliding_window": 100}, (None,) * 3),
        (
            {
                "model_type": "smollm3",
                "sliding_window": 100,
                "use_sliding_window": True,
                "no_rope_layers": [1, 0, 1],
            },
            (None, 100, None),
        ),
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


def test_the_scale_of_queries():
    def scale_of(**rope: Any) -> QueryScale | None:
        settings = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, **rope}
        return hf(model_type="ministral3", architectures=None, rope_parameters=settings).attention(0).query_scale

    assert scale_of(llama_4_scaling_beta=0.25) == QueryScale(0.25, 256)
    assert scale_of(llama_4_scaling_beta=0) is scale_of() is None
    with pytest.raises(CheckpointError, match="llama_4_scaling_beta"):
        scale_of(llama_4_scaling_beta="1")
    values = {"attention.temperature_scale": 0.25, "rope.scaling.original_context_length": 256}
    config = config_from_gguf(gguf_of("mistral3", **{f"mistral3.{key}": value for key, value in values.items()}), [])
    assert config.attention(0).query_scale == QueryScale(0.25, 256)
    given = {key: value for key, value in HF_CONFIG.items() if not key.startswith("rope")}
    default = config_from_hf(given | {"model_type": "ministral3", "architectures": None})
    assert default.attention(0).query_scale == QueryScale(0.1, 16384)
    assert default.rope_scaling is not None and default.rope_scaling.amplitude == 1.0


def test_olmo3_in_a_gguf_file_is_olmo2_with_a_window():
    assert config_from_gguf(gguf_of("olmo2"), []).architecture == "olmo2"
    config = config_from_gguf(gguf_of("olmo2", **{"olmo2.attention.sliding_window": 64}), [])
    assert config.architecture == "olmo3" and windows_of(config)[:5] == (64, 64, 64, None, 64)
    assert config.local_rope_theta == config.rope_theta


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50"),
        (
            {"model_type": "olmo3", "rope_parameters": {"sliding_attention": {"rope_type": "yarn"}}},
            "'yarn' in layers with a window",
        ),
        ({"model_type": "gemma3", "text_config": {"model_type": "mamba"}}, "'mamba'"),
        ({"model_type": "mistral3", "architectures": ["X"]}, "supports Mistral3ForConditionalGeneration"),
    ],
)
def test_features_that_a_family_does_not_have_are_refused(changes, message):
    with pytest.raises(UnsupportedModelError, match=message):
        hf(**{"architectures": None, **changes})


def test_the_text_part_of_a_model_with_images():
    """A published Gemma 3 of 4 billion weights says no more than this."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    text |= {"model_type": "gemma3_text", "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    beside = {"vision_config": {"hidden_size": 1152}, "eos_token_id": [1, 106], "torch_dtype": "bfloat16"}
    config = config_from_hf({"model_type": "gemma3", "text_config": text, **beside})
    assert config.architecture == "gemma3_text"
    assert (config.n_q_heads, config.n_kv_heads, config.head_dim, config.vocab_size) == (8, 4, 256, 262208)
    assert (config.dtype, config.eos_token_ids, config.tie_embeddings) == ("bfloat16", (1, 106), True)
    assert config.rope_scaling == RopeScaling("linear", 8.0)
    with pytest.raises(CheckpointError, match="hidden_size is missing"):
        config_from_hf({"model_type": "mistral3"})
    with pytest.raises(CheckpointError, match="text_config is 3"):
        config_from_hf({"model_type": "mistral3", "text_config": 3})


GEMMA4 = {  # the text part of a published Gemma 4 of 31 billion weights
    **{"model_type": "gemma4_text", "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 60},
    **{"num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 256, "global_head_dim": 512},
    **{"num_global_key_value_heads": 4, "attention_k_eq_v": True, "sliding_window": 1024},
    **{"final_logit_softcapping": 30.0, "hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision"},
}


def test_gemma4_has_larger_heads_where_there_is_no_window():
    config = config_from_hf({"model_type": "gemma4", "text_config": GEMMA4, "vision_config": {}})
    assert config.architecture == "gemma4_text" and config.n_layers == 60
    assert config.heads(0) == Heads(16, 256) and config.heads(5) == Heads(4, 512)
    assert config.attention(5).keys_as_values and not config.attention(0).keys_as_values
    assert config.attention(0).window == 1024 and config.attention(5).window is None
    frequencies = config.inv_freq()
    assert frequencies.shape == (256,) and (frequencies[:64] > 0).all() and (frequencies[64:] == 0).all()
    np.testing.assert_allclose(frequencies[63], 1e6 ** (-126 / 512), rtol=1e-6)
    assert kv_bytes_per_position(config, "float16") == 2 * 2 * (50 * 16 * 256 + 10 * 4 * 512)
    listed = {str(i): {"head_dim": 512, "num_key_value_heads": 4} for i in range(5, 60, 6)}
    assert config_from_hf({**GEMMA4, "per_layer_config": listed}) == config_from_hf(GEMMA4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"per_layer_config": {"60": {"head_dim": 512}}}, "per_layer_config is '60', expected .* layers 0 to 59"),
        ({"per_layer_config": {"5": 512}}, "per_layer_config: 5 is 512"),
        ({"per_layer_config": {"5": {"intermediate_size": 64}}}, "intermediate_size of single layers"),
        ({"per_layer_config": {"5": {"head_dim": 512}}}, "heads of different sizes in layers with the same rotation"),
        ({"num_global_key_value_heads": 5}, "32 attention heads cannot share 5"),
        ({"global_head_dim": 500}, "head_dim 500"),
        ({"hidden_size_per_layer_input": 250}, "hidden_size_per_layer_input 250"),
        ({"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 9}, "embeddings of layers for 9 tokens"),
        ({"num_kv_shared_layers": 56}, "num_kv_shared_layers is 56, expected so few layers"),
        ({"num_kv_shared_layers": 60}, "num_kv_shared_layers is 60"),
        ({"enable_moe_block": True}, "num_experts is missing"),
        ({"use_bidirectional_attention": "all"}, "attention to later tokens"),
        (
            {
                "model_type": "llama",
                "vocab_size": 9,
                "sliding_window": None,
                "per_layer_config": {"1": {"head_dim": 32}},
            },
            "single layers .* in this architecture",
        ),
    ],
)
def test_what_a_gemma4_may_not_say(changes, message):
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        config_from_hf({**GEMMA4, **changes})


def test_gemma4_may_have_experts_beside_its_mlp():
    experts = {"num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704, "intermediate_size": 2112}
    assert not experts_of(config_from_hf({**GEMMA4, **experts}))
    expected = ExpertSettings(128, 8, 704, shared_size=2112)
    blocks = experts_of(config_from_hf({**GEMMA4, **experts, "enable_moe_block": True}))
    assert len(blocks) == 60 and {block.settings for block in blocks.values()} == {expected}
    counts = {"block_count": 2, "expert_count": 128, "expert_used_count": 8, "expert_feed_forward_length": 704}
    counts["feed_forward_length"] = 2112
    config = config_from_gguf(gguf_of("gemma4", **{f"gemma4.{key}": n for key, n in counts.items()}), [])
    assert {block.settings for block in experts_of(config).values()} == {expected}
    assert not experts_of(config_from_gguf(gguf_of("gemma4"), []))


def test_what_gguf_says_of_gemma4():
    changes = {"gemma4.block_count": 6, "gemma4.attention.head_count": 8, "gemma4.attention.sliding_window": 1024}
    changes |= {"gemma4.attention.head_count_kv": np.array([4] * 5 + [2]), "gemma4.rope.dimension_count": 512}
    for name in ("key_length", "value_length"):
        changes |= {f"gemma4.attention.{name}": 512, f"gemma4.attention.{name}_swa": 256}
    values = [f"blk.{i}.attn_v.weight" for i in range(5)]
    factors = GgufFactors([1.0] * 64 + [1e30] * 192)
    config = config_from_gguf(gguf_of("gemma4", **changes), values, factors)
    assert [config.heads(i) for i in range(6)] == [Heads(4, 256)] * 5 + [Heads(2, 512)]
    assert [config.attention(i).keys_as_values for i in range(6)] == [False] * 5 + [True]
    assert (config.head_dim, config.attention_scale, config.norm_offset) == (256, 1.0, 0.0)
    assert (config.inv_freq() > 0).tolist() == [True] * 64 + [False] * 192
    with pytest.raises(UnsupportedModelError, match=r"rope\.dimension_count_swa 128 beside keys of 256"):
        config_from_gguf(gguf_of("gemma4", **changes, **{"gemma4.rope.dimension_count_swa": 128}), values, factors)
    with pytest.raises(CheckpointError, match="numbers of heads for each of 6 layers"):
        config_from_gguf(gguf_of("gemma4", **changes | {"gemma4.attention.head_count_kv": np.array([4] * 5)}), values)


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


# ---- recurrent layers ---------------------------------------------------------------------------------------------


def lengths(config: ModelConfig) -> list[int | None]:
    """The length of each layer's short convolution, None for a layer with attention."""
    found = (layer[0] for layer in config.layers)
    return [block.settings.length if isinstance(block, ShortConv) else None for block in found]


def lfm2(**changes: Any) -> ModelConfig:
    base = {"architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "num_hidden_layers": 3, "norm_eps": 1e-4}
    return hf(**{**base, **changes})


def test_lfm2_says_which_layers_have_attention():
    kinds = ["conv", "full_attention", "conv"]
    assert lengths(lfm2(layer_types=kinds)) == [3, None, 3] == lengths(lfm2(full_attn_idxs=[1]))
    assert lengths(lfm2(layer_types=kinds, conv_L_cache=5)) == [5, None, 5]
    assert lengths(lfm2()) == [None] * 3
    config = lfm2(layer_types=kinds, tie_embedding=False)
    assert (config.rms_norm_eps, config.tie_embeddings, config.attention_layers) == (1e-4, False, (1,))
    assert config.state_bytes == 2 * 4 * 2 * config.hidden_size
    for wrong in (["conv"], ["conv", "mamba", "conv"], "conv"):
        with pytest.raises((CheckpointError, UnsupportedModelError), match="layer_types"):
            lfm2(layer_types=wrong)
    for has_bias in (True, False):
        assert lfm2(layer_types=kinds, conv_bias=has_bias).has_biases == has_bias
    with pytest.raises(CheckpointError, match="conv_L_cache"):
        lfm2(layer_types=kinds, conv_L_cache=1)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"block_auto_adjust_ff_dim": False},
        {"block_ff_dim": 6656},
        {"block_ffn_dim_multiplier": 1.3, "block_multiple_of": 64},
    ],
)
def test_lfm2_adjusts_the_rows_of_its_mlp_as_transformers_does(changes: dict[str, Any]):
    import transformers

    given = {"hidden_size": 64, "intermediate_size": 6912, "num_hidden_layers": 1, "num_attention_heads": 4, **changes}
    theirs = transformers.Lfm2ForCausalLM(transformers.Lfm2Config(vocab_size=32, num_key_value_heads=4, **given))
    rows = theirs.model.layers[0].feed_forward.w1.weight.shape[0]
    assert lfm2(**given, num_key_value_heads=4).intermediate_size == rows


def test_lfm2_moe_has_experts_after_its_first_layers():
    base = {"architectures": ["Lfm2MoeForCausalLM"], "model_type": "lfm2_moe", "num_hidden_layers": 3}
    config = hf(**base, num_dense_layers=1, num_experts=8, use_expert_bias=False, routed_scaling_factor=2.0)
    assert [*experts_of(config)] == [1, 2]
    settings = experts_of(config)[1].settings
    assert (settings.n_experts, settings.top_k, settings.size) == (8, 4, 1792) and settings.scores is not None
    assert (settings.scores.scale, settings.scores.corrected) == (2.0, False)
    corrected = experts_of(hf(**base))[2].settings.scores
    assert corrected is not None and corrected.corrected


def mamba_of(config: ModelConfig) -> list[MambaSettings | None]:
    return [layer[0].settings if isinstance(layer[0], Mamba) else None for layer in config.layers]


def granite_4(**changes: Any) -> ModelConfig:
    """As Granite 4.0 H Tiny's config.json has it, in three layers."""
    sizes = {"hidden_size": 1536, "intermediate_size": 512, "shared_intermediate_size": 1024, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 12, "num_key_value_heads": 4, "num_local_experts": 64, "num_experts_per_tok": 6}
    mamba = {"mamba_n_heads": 48, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1}
    scales = {"embedding_multiplier": 12, "residual_multiplier": 0.22, "logits_scaling": 6}
    names = {"architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid"}
    kinds = {"layer_types": ["mamba", "attention", "mamba"], "position_embedding_type": "nope"}
    base = {**sizes, **heads, **mamba, **scales, **names, **kinds, "attention_multiplier": 0.0078125, "head_dim": None}
    return hf(**{**base, **changes})


def test_granite_4_says_which_layers_are_mamba():
    config = granite_4()
    settings = MambaSettings(48, 64, 1, 128)
    assert mamba_of(config) == [settings, None, settings] and config.attention_layers == (1,)
    assert config.attention(1).rotation == "none" and config.attention_scale == 0.0078125
    assert granite_4(position_embedding_type="rope").attention(1).rotation == "main"
    assert mamba_of(granite_4(layer_types=["linear_attention", "full_attention", "mamba"])) == mamba_of(config)
    assert mamba_of(granite_4(mamba_d_head="auto")) == mamba_of(config)
    experts = experts_of(config)[2].settings
    assert (experts.n_experts, experts.top_k, experts.size, experts.shared_size) == (64, 6, 512, 1024)
    dense = granite_4(num_local_experts=0, num_experts_per_tok=0)
    assert not experts_of(dense) and dense.intermediate_size == 1024
    attends = granite_4(layer_types=["attention"] * 3)
    assert attends.attention_layers == (0, 1, 2) and attends.state_bytes == 0
    inner, state = 48 * 64, 48 * 64 * 128
    assert config.state_bytes == 2 * 4 * (3 * (inner + 2 * 128) + state)


def test_limits_of_time_steps():
    def limits(value: Any) -> tuple[float, float]:
        settings = mamba_of(granite_4(time_step_limit=value))[0]
        assert settings is not None
        return settings.least_step, settings.most_step

    assert limits([0.0, math.inf]) == limits([0, {"__float__": "Infinity"}]) == limits(None) == (0.0, math.inf)
    assert limits([0.001, 0.1]) == (0.001, 0.1)
    for wrong in ([1.0], [0.1, 0.001], [-1.0, 1.0], "inf", [0.0, True], [0.0, math.nan]):
        with pytest.raises(CheckpointError, match="time_step_limit"):
            limits(wrong)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"mamba_proj_bias": True}, UnsupportedModelError, "mamba_proj_bias"),
        ({"mamba_d_state": 40}, UnsupportedModelError, "states of 40"),
        ({"mamba_d_head": 512}, UnsupportedModelError, "heads of 512"),
        ({"mamba_n_groups": 5}, CheckpointError, "48 heads of Mamba cannot share 5 groups"),
        ({"layer_types": ["mamba", "mlp", "mamba"]}, UnsupportedModelError, "'mlp'"),
        ({"layer_types": ["mamba"]}, CheckpointError, "layer_types"),
    ],
)
def test_what_a_granite_4_may_not_say(changes, error, message):
    with pytest.raises(error, match=message):
        granite_4(**changes)


def nemotron(pattern: str = "M-M*E", **changes: Any) -> ModelConfig:
    """As Nemotron 3 Nano's config.json has it."""
    sizes = {"hidden_size": 2688, "num_attention_heads": 32, "num_key_value_heads": 2, "intermediate_size": 1856}
    mamba = {"mamba_num_heads": 64, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4}
    experts = {"n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856}
    experts |= {"moe_shared_expert_intermediate_size": 3712, "n_shared_experts": 1, "num_local_experts": None}
    names = {"architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "hybrid_override_pattern": pattern}
    others = {"routed_scaling_factor": 2.5, "layer_norm_epsilon": 1e-5, "head_dim": 128, "num_hidden_layers": 5}
    limits = {"time_step_limit": [0.0, math.inf], "mlp_hidden_act": "relu2", "hidden_act": None}
    return hf(**{**sizes, **mamba, **experts, **names, **others, **limits, **changes})


def test_nemotron_has_one_block_a_layer():
    config = nemotron()
    kinds = [type(block) for (block,) in config.layers]
    assert kinds == [Mamba, PlainMlp, Mamba, Attention, Experts] and config.rms_norm_eps == 1e-5
    assert config.heads(3) == Heads(2, 128) and config.attention(3).rotation == "none"
    assert config.layers[0][0] == Mamba(settings=MambaSettings(64, 64, 8, 128))
    settings = experts_of(config)[4].settings
    assert (settings.n_experts, settings.top_k, settings.size, settings.shared_size) == (128, 6, 1856, 3712)
    assert settings.scores is not None and settings.scores.scale == 2.5 and settings.scores.corrected
    named = ["mamba", "mlp", "linear_attention", "full_attention", "moe"]
    assert nemotron(layers_block_type=named, hybrid_override_pattern=None) == config
    assert nemotron(head_dim=None, attention_head_dim=128) == config
    assert not experts_of(nemotron("M-*-", n_routed_experts=None))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"pattern": "M-X"}, CheckpointError, "layers_block_type"),
        ({"moe_latent_size": 1024}, UnsupportedModelError, "moe_latent_size"),
        ({"use_bias": True}, UnsupportedModelError, "use_bias"),
        ({"mlp_hidden_act": "silu"}, UnsupportedModelError, "'silu' .mlp_hidden_act"),
        ({"mlp_bias": True}, UnsupportedModelError, "mlp_bias"),
        ({"mamba_hidden_act": "gelu"}, UnsupportedModelError, "mamba_hidden_act"),
    ],
)
def test_what_a_nemotron_may_not_say(changes, error, message):
    with pytest.raises(error, match=message):
        nemotron(**changes)


def test_gguf_says_which_layers_of_a_nemotron_are_mlps():
    heads, rows = np.array([0, 0, 3, 0]), np.array([0, 256, 0, 0])
    sizes = {"block_count": 4, "attention.head_count_kv": heads, "feed_forward_length": rows, "ssm.conv_kernel": 4}
    sizes |= {"ssm.state_size": 16, "ssm.group_count": 1, "ssm.time_step_rank": 4, "ssm.inner_size": 64}
    names = {f"nemotron_h.{key}": value for key, value in sizes.items()}
    config = config_from_gguf(gguf_of("nemotron_h", **names), ["token_embd.weight"])
    kinds = [type(block) for (block,) in config.layers]
    assert kinds == [Mamba, PlainMlp, Attention, Mamba] and config.intermediate_size == 256
    with pytest.raises(CheckpointError, match="feed_forward_length"):
        config_from_gguf(gguf_of("nemotron_h", **names | {"nemotron_h.feed_forward_length": 256}), [])


def test_gguf_says_by_its_heads_which_layers_of_lfm2_have_attention():
    def of(heads: Any, **changes: Any) -> ModelConfig:
        names = {"lfm2.block_count": 3, "lfm2.attention.head_count_kv": np.array(heads), "lfm2.shortconv.l_cache": 4}
        return config_from_gguf(gguf_of("lfm2", **names, **changes), ["token_embd.weight"])

    config = of([0, 3, 0])
    assert lengths(config) == [4, None, 4] and config.n_kv_heads == 3
    for wrong in ([0, 0, 0], [3, 0], [1, 3, 0], [0.0, 3.0, 0.0], [-1, 3, 0]):
        with pytest.raises(CheckpointError, match="head_count_kv"):
            of(wrong)
    with pytest.raises(CheckpointError, match="head_count_kv"):
        from_gguf({"llama.block_count": 2, "llama.attention.head_count_kv": np.array([3, 0])})
    assert from_gguf({"llama.block_count": 2, "llama.attention.head_count_kv": np.array([3, 3])}).n_kv_heads == 3


def delta_nets(config: ModelConfig) -> list[DeltaSettings | None]:
    """Those of each layer, None for a layer with attention."""
    found = (layer[0] for layer in config.layers)
    return [block.settings if isinstance(block, DeltaNet) else None for block in found]


QWEN35 = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 5,
    "rope_parameters": {
        "rope_theta": 1e7,
        "rope_type": "default",
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
    "rope_theta": None,
}


def test_qwen35_says_which_layers_are_delta_nets():
    usual = DeltaSettings(n_k=16, n_v=32, d_k=128, d_v=128, length=4)
    config = hf(**QWEN35)
    assert delta_nets(config) == [usual, usual, usual, None, usual] and config.attention_layers == (3,)
    assert (config.head_dim, config.rotary_dim, config.rope_theta) == (256, 64, 1e7)
    assert config.attention(3).gated and config.attention(3).head_norms and config.norm_offset == 1.0
    assert delta_nets(hf(**QWEN35, full_attention_interval=2)) == [usual, None, usual, None, usual]
    kinds = ["full_attention", "linear_attention", *["full_attention"] * 3]
    assert delta_nets(hf(**QWEN35, layer_types=kinds, linear_num_value_heads=16)) == [
        None,
        DeltaSettings(n_k=16, n_v=16, d_k=128, d_v=128, length=4),
        *[None] * 3,
    ]
    with pytest.raises(CheckpointError, match="24 value heads"):
        hf(**QWEN35, linear_num_value_heads=24)
    for size in (24, 512):
        with pytest.raises(UnsupportedModelError, match=f"heads of {size}"):
            hf(**QWEN35, linear_key_head_dim=size)


def test_gguf_leaves_out_the_layers_of_qwen35_that_draft_tokens():
    names = {
        "qwen35.block_count": 6,
        "qwen35.nextn_predict_layers": 1,
        "qwen35.ssm.conv_kernel": 4,
        "qwen35.ssm.state_size": 64,
        "qwen35.ssm.group_count": 2,
        "qwen35.ssm.time_step_rank": 6,
        "qwen35.ssm.inner_size": 384,
    }
    config = config_from_gguf(gguf_of("qwen35", **names), ["token_embd.weight"])
    usual = DeltaSettings(n_k=2, n_v=6, d_k=64, d_v=64, length=4, in_turn=True, log_decays=False)
    assert delta_nets(config) == [usual, usual, usual, None, usual]
    # Qwen3-Next's projections are joined, or in part where a later converter wrote the file.
    names = {key.replace("qwen35", "qwen3next"): value for key, value in names.items()}
    experts = {"qwen3next.expert_count": 4, "qwen3next.expert_used_count": 2}
    for tensors, joined in ((["ssm_in", "ssm_ba"], ("qkvz", "ba")), (["attn_qkv", "attn_gate", "ssm_ba"], ("ba",))):
        stored = [f"blk.0.{name}.weight" for name in tensors]
        config = config_from_gguf(gguf_of("qwen3next", **names, **experts), stored)
        assert delta_nets(config)[0] == dataclasses.replace(usual, in_turn=False, joined=joined)
    names = {key.replace("qwen3next", "qwen35"): value for key, value in names.items()}
    names["qwen35.nextn_predict_layers"] = 6
    with pytest.raises(CheckpointError, match="nextn_predict_layers"):
        config_from_gguf(gguf_of("qwen35", **names), ["token_embd.weight"])
