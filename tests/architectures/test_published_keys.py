"""What published config.json files of several families say, as far as it decides how they are computed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from expert_weights import experts_of
from helpers import windows_of

from llmcl.architectures.config import config_from_gguf, config_from_hf
from llmcl.architectures.families.blocks import ExpertSettings, QueryScale, Scores
from llmcl.errors import CheckpointError, UnsupportedModelError

GLM_45_AIR: dict[str, Any] = {
    **{"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "attention_bias": True, "head_dim": 128},
    **{"hidden_size": 4096, "intermediate_size": 10944, "num_hidden_layers": 46, "num_nextn_predict_layers": 1},
    **{"num_attention_heads": 96, "num_key_value_heads": 8, "partial_rotary_factor": 0.5, "rope_theta": 1000000},
    **{"n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 1408},
    **{"n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0, "rope_scaling": None},
    **{"first_k_dense_replace": 1, "use_qk_norm": False, "vocab_size": 151552, "max_position_embeddings": 131072},
}
EXAONE_32B: dict[str, Any] = {
    **{"architectures": ["Exaone4ForCausalLM"], "model_type": "exaone4", "head_dim": 128, "hidden_size": 5120},
    **{"intermediate_size": 27392, "num_hidden_layers": 8, "num_attention_heads": 40, "num_key_value_heads": 8},
    **{"sliding_window": 4096, "sliding_window_pattern": "LLLG", "vocab_size": 102400, "rope_theta": 1000000},
    "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 2,
}
QWEN25_VL: dict[str, Any] = {
    **{"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "hidden_size": 3584},
    **{"intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4},
    **{"rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "max_window_layers": 28, "use_sliding_window": False},
    **{"sliding_window": 32768, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 152064},
    **{"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "vision_config": {"depth": 32}},
}
MINIMAX: dict[str, Any] = {
    **{"architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "head_dim": 128, "hidden_size": 3072},
    **{"intermediate_size": 1536, "num_hidden_layers": 62, "num_attention_heads": 48, "num_key_value_heads": 8},
    **{"num_experts_per_tok": 8, "num_local_experts": 256, "rotary_dim": 64, "rope_theta": 5000000},
    **{"scoring_func": "sigmoid", "use_qk_norm": True, "use_routing_bias": True, "vocab_size": 200064},
}
ERNIE: dict[str, Any] = {
    **{"architectures": ["Ernie4_5_MoeForCausalLM"], "model_type": "ernie4_5_moe", "hidden_size": 2560},
    **{"intermediate_size": 12288, "num_hidden_layers": 28, "num_attention_heads": 20, "num_key_value_heads": 4},
    **{"moe_num_experts": 64, "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_intermediate_size": 1536},
    **{"moe_k": 6, "moe_layer_interval": 1, "moe_use_aux_free": True, "rope_theta": 500000.0, "use_bias": False},
    **{"tie_word_embeddings": True, "vocab_size": 103424},
}


HUNYUAN: dict[str, Any] = {
    **{"architectures": ["HunYuanMoEV1ForCausalLM"], "model_type": "hunyuan_v1_moe", "attention_head_dim": 128},
    **{"head_dim": 128, "hidden_size": 4096, "intermediate_size": 3072, "moe_intermediate_size": [3072] * 32},
    **{"moe_topk": [8] * 32, "num_experts": 64, "num_shared_expert": [1] * 32, "num_attention_heads": 32},
    **{"num_hidden_layers": 32, "num_key_value_heads": 8, "moe_layer_num_skipped": 0, "rope_theta": 10000.0},
    **{"rope_scaling": {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "type": "dynamic"}},
    **{"use_cla": False, "use_qk_norm": True, "max_position_embeddings": 32768, "vocab_size": 128167},
}
COMMAND_R7B: dict[str, Any] = {
    **{"architectures": ["Cohere2ForCausalLM"], "model_type": "cohere2", "head_dim": 128, "hidden_size": 4096},
    **{"intermediate_size": 14336, "layer_norm_eps": 1e-05, "logit_scale": 0.25, "num_attention_heads": 32},
    **{"num_hidden_layers": 32, "num_key_value_heads": 8, "rotary_pct": 1.0, "sliding_window": 4096},
    **{"sliding_window_pattern": 4, "use_parallel_block": True, "use_qk_norm": False, "vocab_size": 256000},
    **{"rope_theta": 50000, "rope_scaling": None, "max_position_embeddings": 132096},
}


def test_hunyuan_lists_the_same_number_for_each_layer() -> None:
    config = config_from_hf(HUNYUAN)
    assert experts_of(config)[0].settings == ExpertSettings(64, 8, 3072, shared_size=3072)
    assert config.rope_scaling is None and config.rope_theta == pytest.approx(11158839.9251)
    with pytest.raises(UnsupportedModelError, match="moe_topk that differs between layers"):
        config_from_hf({**HUNYUAN, "moe_topk": [8] * 31 + [4]})
    with pytest.raises(UnsupportedModelError, match="num_shared_expert 2"):
        config_from_hf({**HUNYUAN, "num_shared_expert": [2] * 32})
    with pytest.raises(UnsupportedModelError, match="use_cla True"):
        config_from_hf({**HUNYUAN, "use_cla": True})


def test_command_r7b() -> None:
    config = config_from_hf(COMMAND_R7B)
    assert (config.logit_scale, config.rms_norm_eps, config.tie_embeddings) == (0.25, 1e-5, True)
    assert windows_of(config) == (4096, 4096, 4096, None) * 8
    assert [config.attention(i).rotation for i in range(4)] == ["main", "main", "main", "none"]
    assert [len(layer) for layer in config.layers] == [2] * 31 + [3]
    with pytest.raises(UnsupportedModelError, match="use_qk_norm True"):
        config_from_hf({**COMMAND_R7B, "use_qk_norm": True})
    with pytest.raises(UnsupportedModelError, match=r"rotary_pct 0\.5"):
        config_from_hf({**COMMAND_R7B, "rotary_pct": 0.5})


LLAMA4: dict[str, Any] = {  # the text part of Maverick
    **{"model_type": "llama4_text", "attention_chunk_size": 8192, "attn_scale": 0.1, "attn_temperature_tuning": True},
    **{"floor_scale": 8192, "head_dim": 128, "hidden_size": 5120, "interleave_moe_layer_step": 2, "moe_layers": None},
    **{"intermediate_size": 8192, "intermediate_size_mlp": 16384, "no_rope_layers": [], "num_attention_heads": 40},
    **{"num_experts_per_tok": 1, "num_hidden_layers": 48, "num_key_value_heads": 8, "num_local_experts": 128},
    **{"use_qk_norm": False, "vocab_size": 202048, "rope_scaling": None},
}


def test_llama4() -> None:
    outer = {"architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4", "vision_config": {}}
    config = config_from_hf({**outer, "text_config": LLAMA4})
    assert config.intermediate_size == 16384 and [*experts_of(config)] == [*range(1, 48, 2)]
    expected = ExpertSettings(128, 1, 8192, False, shared_size=8192, scores=Scores(corrected=False))
    assert experts_of(config)[1].settings == expected and experts_of(config)[1].scaled_inputs
    first, fourth = config.attention(0), config.attention(3)
    assert (first.rotation, first.chunk, first.query_scale) == ("main", 8192, None)
    assert (fourth.rotation, fourth.chunk, fourth.query_scale) == ("none", None, QueryScale(0.1, 8192, offset=1))
    assert not first.head_norms
    scout = config_from_hf({**LLAMA4, "use_qk_norm": True, "interleave_moe_layer_step": 1})
    assert len(experts_of(scout)) == 48
    assert [scout.attention(i).head_norms for i in range(4)] == [True, True, True, False]
    types = ["chunked_attention"] * 3 + ["full_attention"]
    assert config_from_hf({**LLAMA4, "layer_types": types * 12}) == config_from_hf(LLAMA4)
    with pytest.raises(UnsupportedModelError, match="layer_types"):
        config_from_hf({**LLAMA4, "layer_types": ["full_attention"] * 48})
    with pytest.raises(UnsupportedModelError, match="num_experts_per_tok 2"):
        config_from_hf({**LLAMA4, "num_experts_per_tok": 2})
    with pytest.raises(CheckpointError, match="moe_layers is 3, expected a list of layers"):
        config_from_hf({**LLAMA4, "moe_layers": 3})
    with pytest.raises(UnsupportedModelError, match=r"'llama4', which has no keys .*take the safetensors\); choose"):
        config_from_gguf({"general.architecture": "llama4"}, [])


def test_muse_glimmer_counts_from_its_last_layer() -> None:
    text: dict[str, Any] = {
        **{"model_type": "muse_glimmer_text", "hidden_size": 6656, "intermediate_size": 19968, "num_hidden_layers": 6},
        **{"num_attention_heads": 32, "vocab_size": 202048},
    }
    config = config_from_hf({"model_type": "muse_glimmer", "text_config": text, "vision_config": {}})
    assert windows_of(config) == (2048, None, 2048, 2048, 2048, None)
    assert [config.attention(i).rotation for i in (0, 1, 5)] == ["main", "none", "none"]
    assert [len(layer) for layer in config.layers] == [3, 2, 2, 2, 2, 2] and config.post_norm_eps == 1e-8
    thetas = [1e4, 1e4, 1e4, 1e4, 1e4, 0]
    config = config_from_hf({**text, "layer_rope_theta": thetas})
    assert [config.attention(i).rotation for i in (0, 1, 5)] == ["main", "main", "none"]
    with pytest.raises(UnsupportedModelError, match="rotary settings that differ between layers"):
        config_from_hf({**text, "layer_rope_theta": [5e5, *thetas[1:]]})
    with pytest.raises(CheckpointError, match=r"layer_rope_theta is .*, expected a number for each of 6 layers"):
        config_from_hf({**text, "layer_rope_theta": [0]})


def test_glm_45_air() -> None:
    config = config_from_hf(GLM_45_AIR)
    assert config.rotary_dim == 64 and config.rope_theta == 1e6 and config.n_layers == 46
    blocks = experts_of(config)
    assert [*blocks] == [*range(1, 46)]
    assert blocks[1].settings == ExpertSettings(128, 8, 1408, shared_size=1408, scores=Scores())
    attention = config.attention(0)
    assert attention.bias and not attention.output_bias and not attention.head_norms
    assert config_from_hf({**GLM_45_AIR, "use_qk_norm": True}).attention(0).head_norms


def test_exaone_rotates_where_it_has_a_window() -> None:
    config = config_from_hf(EXAONE_32B)
    assert windows_of(config) == (4096, 4096, 4096, None) * 2
    assert [config.attention(i).rotation for i in range(4)] == ["main", "main", "main", "none"]
    small = {**EXAONE_32B, "sliding_window": None, "sliding_window_pattern": None}
    config = config_from_hf({**small, "layer_types": ["full_attention"] * 8})
    assert windows_of(config) == (None,) * 8 and config.attention(3).rotation == "main"
    with pytest.raises(CheckpointError, match="sliding_window_pattern is 'LLLG'"):
        config_from_hf({**EXAONE_32B, "layer_types": None})


def test_qwen25_vl_without_a_text_config() -> None:
    config = config_from_hf(QWEN25_VL)
    assert (config.architecture, config.rope_scaling, config.head_dim) == ("qwen2_5_vl_text", None, 128)
    assert config.attention(0).bias and not config.has_windows and not config.tie_embeddings
    inside = {key: value for key, value in QWEN25_VL.items() if key not in ("architectures", "vision_config")}
    later = {"architectures": QWEN25_VL["architectures"], "model_type": "qwen2_5_vl", "vision_config": {}}
    assert config_from_hf({**later, "text_config": {**inside, "model_type": "qwen2_5_vl_text"}}) == config
    tied = {**inside, "model_type": "qwen2_5_vl_text", "tie_word_embeddings": True}
    assert config_from_hf({**later, "text_config": tied}).tie_embeddings


AXES: dict[str, Any] = {"mrope_section": [24, 20, 20], "mrope_interleaved": True, "rope_type": "default"}
QWEN3_VL = QWEN25_VL | {"architectures": ["Qwen3VLTextModel"], "model_type": "qwen3_vl_text"}
QWEN3_VL |= {"head_dim": 128, "rope_scaling": AXES, "sliding_window": None}


def test_qwen_vl_says_which_pairs_rotate_by_which_axis() -> None:
    assert config_from_hf(QWEN25_VL).rope_axes == (0,) * 16 + (1,) * 24 + (2,) * 24
    assert config_from_hf({**QWEN25_VL, "rope_scaling": None}).rope_axes == config_from_hf(QWEN25_VL).rope_axes
    assert config_from_hf(QWEN3_VL).rope_axes == (0, 1, 2) * 20 + (0,) * 4
    assert config_from_hf({**QWEN3_VL, "head_dim": 64, "rope_scaling": None}).rope_axes == ()  # 32 pairs, not 64
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "mrope_section": [16, 24, 24]}
    config = config_from_hf({**QWEN25_VL, "rope_scaling": yarn})
    assert config.rope_axes.count(1) == 24 and config.rope_scaling is not None and config.rope_scaling.kind == "yarn"


@pytest.mark.parametrize(
    ("published", "changes", "error"),
    [
        (QWEN3_VL, {"mrope_section": [24, 20, 16]}, r"mrope_section is \[24, 20, 16\].* in all 64"),
        (QWEN3_VL, {"mrope_section": [32, 32]}, "mrope_section is .*time, rows and columns"),
        (QWEN3_VL, {"mrope_section": [84, -40, 20]}, "mrope_section is"),
        (QWEN3_VL, {"mrope_section": "24"}, "mrope_section is '24'"),
        (QWEN3_VL, {"mrope_section": [24, 20, 10, 10]}, "mrope_section is"),
        (QWEN3_VL, {"mrope_interleaved": False}, "mrope_interleaved is False, expected true in Qwen3VLTextModel"),
        (QWEN25_VL, {"mrope_interleaved": True, "type": "mrope"}, "expected false in Qwen2_5_VLTextModel"),
        (QWEN3_VL, {"mrope_interleaved": "yes"}, "mrope_interleaved is 'yes', expected true or false"),
    ],
)
def test_contradicting_axes_are_refused(published: dict[str, Any], changes: dict[str, Any], error: str) -> None:
    with pytest.raises(CheckpointError, match=error):
        config_from_hf({**published, "rope_scaling": AXES | {"mrope_section": [16, 24, 24]} | changes})


def test_gguf_says_which_pairs_rotate_by_which_axis() -> None:
    sizes = {"embedding_length": 3584, "block_count": 28, "attention.head_count": 28, "attention.head_count_kv": 4}
    sizes |= {"feed_forward_length": 18944, "context_length": 128000, "vocab_size": 152064}

    def of(arch: str, sections: list[int] | None) -> tuple[int, ...]:
        keys: dict[str, Any] = {f"{arch}.{key}": value for key, value in sizes.items()}
        keys |= {f"{arch}.attention.layer_norm_rms_epsilon": 1e-6, "general.architecture": arch}
        keys |= {} if sections is None else {f"{arch}.rope.dimension_sections": np.array(sections, np.int32)}
        return config_from_gguf(keys, []).rope_axes

    assert of("qwen2vl", [16, 24, 24, 0]) == config_from_hf(QWEN25_VL).rope_axes
    assert of("qwen3vl", [24, 20, 20, 0]) == of("qwen3vl", None) == config_from_hf(QWEN3_VL).rope_axes
    with pytest.raises(CheckpointError, match=r"qwen3vl.rope.dimension_sections is .*in all 64"):
        of("qwen3vl", [24, 20, 10, 10])


@pytest.mark.slow
def test_axes_are_those_of_transformers() -> None:
    import torch
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

    for sections in ([24, 20, 20], [11, 11, 10], [3, 3, 2], [8, 2, 6], [16, 0, 0]):
        n = sum(sections)
        whole = torch.arange(3.0).reshape(3, 1, 1, 1).repeat(1, 1, 1, n)
        expected = Qwen3VLTextRotaryEmbedding.recomposition_frequencies(SimpleNamespace(mrope_section=sections), whole)
        scaling = AXES | {"mrope_section": sections}
        config = config_from_hf({**QWEN3_VL, "head_dim": 2 * n, "rope_scaling": scaling})
        assert [*config.rope_axes] == expected[0, 0, :n].tolist()


def test_minimax_says_how_much_of_a_head_rotates() -> None:
    config = config_from_hf(MINIMAX)
    assert config.rotary_dim == 64 and config.attention(0).row_norms
    assert experts_of(config)[0].settings == ExpertSettings(256, 8, 1536, scores=Scores())
    assert config_from_hf({**MINIMAX, "rotary_dim": None, "partial_rotary_factor": 0.25}).rotary_dim == 32
    with pytest.raises(CheckpointError, match="rotary_dim is 200, expected a whole number from 1 to 128"):
        config_from_hf({**MINIMAX, "rotary_dim": 200})
    with pytest.raises(UnsupportedModelError, match="scoring_func 'softmax'"):
        config_from_hf({**MINIMAX, "scoring_func": "softmax"})


def test_ernie_has_experts_in_all_layers_but_the_first() -> None:
    config = config_from_hf(ERNIE)
    assert [*experts_of(config)] == [*range(1, 28)] and config.head_dim == 128
    expected = ExpertSettings(64, 6, 1536, shared_size=3072, scores=Scores("softmax"))
    assert experts_of(config)[1].settings == expected
    with pytest.raises(UnsupportedModelError, match="use_bias True"):
        config_from_hf({**ERNIE, "use_bias": True})
    with pytest.raises(UnsupportedModelError, match="moe_layer_interval 2"):
        config_from_hf({**ERNIE, "moe_layer_interval": 2})
