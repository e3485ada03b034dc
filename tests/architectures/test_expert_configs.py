"""What config.json and GGUF metadata say of a mixture of experts, and what of it is refused."""

from __future__ import annotations

from typing import Any

import pytest
from expert_weights import experts_of
from made_configs import gguf_of, hf

from llmcl.architectures.config import ModelConfig, config_from_gguf
from llmcl.architectures.families.blocks import Experts, ExpertSettings
from llmcl.errors import CheckpointError, UnsupportedModelError

QWEN3_MOE = {"model_type": "qwen3_moe", "architectures": None, "num_hidden_layers": 6, "head_dim": 64}


def settings_of(config: ModelConfig) -> ExpertSettings:
    """Of every layer."""
    blocks = experts_of(config)
    assert len(blocks) == config.n_layers
    (settings,) = {block.settings for block in blocks.values()}
    return settings


def by_gguf(arch: str, **changes: Any) -> ModelConfig:
    keys = {"block_count": 4, "expert_count": 8, "expert_used_count": 2, **changes}
    return config_from_gguf(gguf_of(arch, **{f"{arch}.{key}": value for key, value in keys.items()}), [])


def test_experts_of_folders():
    one = {"num_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 192, "norm_topk_prob": True}
    assert settings_of(hf(**QWEN3_MOE, **one)) == ExpertSettings(64, 4, 192)
    assert settings_of(hf(**QWEN3_MOE)) == ExpertSettings(128, 8, 768, renormalize=False)
    assert settings_of(hf(**QWEN3_MOE, num_local_experts=16)).n_experts == 16
    mixtral = {"model_type": "mixtral", "architectures": None, "sliding_window": None}
    assert settings_of(hf(**mixtral)) == ExpertSettings(8, 2, 1536)
    assert settings_of(hf(model_type="olmoe", architectures=None)) == ExpertSettings(64, 8, 1536, renormalize=False)
    shared = {"num_local_experts": 40, "num_experts_per_tok": 8, "shared_intermediate_size": 512}
    granite = hf(model_type="granitemoeshared", architectures=None, **shared)
    assert settings_of(granite) == ExpertSettings(40, 8, 1536, shared_size=512)
    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    sizes |= {"shared_expert_intermediate_size": 80, "intermediate_size": None}
    qwen = hf(model_type="qwen3_5_moe_text", architectures=None, **sizes)
    assert settings_of(qwen) == ExpertSettings(8, 2, 64, shared_size=80) and qwen.intermediate_size == 64
    qwen = hf(model_type="qwen3_next", architectures=None, norm_topk_prob=False, **sizes)
    assert settings_of(qwen) == ExpertSettings(8, 2, 64, renormalize=False, shared_size=80)


def test_experts_of_gguf_files():
    assert settings_of(by_gguf("qwen3moe", expert_feed_forward_length=768)) == ExpertSettings(8, 2, 768)
    assert settings_of(by_gguf("olmoe")) == ExpertSettings(8, 2, 1536, renormalize=False)
    assert settings_of(by_gguf("olmoe", expert_weights_norm=True)).renormalize
    granite = by_gguf("granitemoe", expert_shared_feed_forward_length=512)
    assert settings_of(granite) == ExpertSettings(8, 2, 1536, shared_size=512)
    mixtral = by_gguf("llama")
    assert mixtral.architecture == "mixtral" and settings_of(mixtral) == ExpertSettings(8, 2, 1536)
    assert by_gguf("llama", expert_count=0).architecture == "llama"


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, {0, 1, 2, 3, 4, 5}),
        ({"mlp_only_layers": [0, 5]}, {1, 2, 3, 4}),
        ({"decoder_sparse_step": 2}, {1, 3, 5}),
        ({"decoder_sparse_step": 3, "mlp_only_layers": [2]}, {5}),
    ],
)
def test_which_layers_have_experts(changes: dict[str, Any], layers: set[int]) -> None:
    assert set(experts_of(hf(**QWEN3_MOE, **changes))) == layers


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"num_experts": 0}, CheckpointError, "num_experts is 0"),
        ({"num_experts": "8"}, CheckpointError, "num_experts"),
        ({"num_experts": 10**6}, CheckpointError, "num_experts"),
        ({"num_experts": 4, "num_experts_per_tok": 5}, CheckpointError, "num_experts_per_tok is 5"),
        ({"num_experts": 4096, "num_hidden_layers": 1000}, CheckpointError, "4096000 experts together"),
        ({"moe_intermediate_size": 100}, UnsupportedModelError, "an expert of 100 rows"),
        ({"norm_topk_prob": 1}, CheckpointError, "norm_topk_prob"),
        ({"decoder_sparse_step": 0}, CheckpointError, "decoder_sparse_step"),
        ({"mlp_only_layers": 3}, CheckpointError, "mlp_only_layers"),
        ({"hidden_act": "gelu"}, UnsupportedModelError, "'gelu'"),
        ({"model_type": "olmoe", "clip_qkv": 8.0}, UnsupportedModelError, "clip_qkv"),
        ({"model_type": "qwen3", "num_experts": 8}, UnsupportedModelError, "mixture of experts .*num_experts 8"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        hf(**{**QWEN3_MOE, **changes})


def test_gguf_files_that_are_refused():
    with pytest.raises(UnsupportedModelError, match=r"mixture of experts .*qwen2\.expert_count 8"):
        by_gguf("qwen2")
    with pytest.raises(CheckpointError, match="expert_count is missing"):
        by_gguf("qwen3moe", expert_count=None)
    with pytest.raises(UnsupportedModelError, match="clamp_kqv"):
        by_gguf("olmoe", **{"attention.clamp_kqv": 8.0})


def test_the_tensors_of_an_expert():
    block = Experts(settings=ExpertSettings(2, 1, 32, shared_size=16))
    sizes = hf(hidden_size=64, intermediate_size=96, num_attention_heads=2, num_key_value_heads=1)
    matrices = block.matrices(sizes)
    assert matrices["gate_up"].tensors == (
        "mlp.experts.0.gate_proj.weight",
        "mlp.experts.0.up_proj.weight",
        "mlp.experts.1.gate_proj.weight",
        "mlp.experts.1.up_proj.weight",
    )
    assert {name: (plan.rows, plan.k) for name, plan in matrices.items()} == {
        "router": (2, 64),
        "gate_up": (128, 64),
        "down": (128, 32),
        "shared_gate_up": (32, 64),
        "shared_down": (64, 16),
    }
