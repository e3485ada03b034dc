"""Adapters read from files, their errors, and their sums with float weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers import random_weights, relative_error, save_folder, small_config, transformers_model
from lora_adapters import changed, factors_of, save_gguf_adapter, save_peft

from llmcl.checkpoint import open_checkpoint
from llmcl.checkpoint.lora import Adapter, LoraRequest, merge, open_adapter
from llmcl.errors import CheckpointError, UnsupportedModelError, UsageError

CONFIG = small_config(n_layers=1)
WEIGHTS = random_weights(CONFIG, 3)
FACTORS = factors_of(CONFIG)
Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tmp_path_factory.mktemp("base"), CONFIG, WEIGHTS)


def opened(base: Path, adapter: Path) -> Adapter:
    checkpoint = open_checkpoint(str(base))
    return open_adapter(LoraRequest.parse(str(adapter)), checkpoint.config, checkpoint.tensors)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("adapters/fr", LoraRequest("fr", "adapters/fr")),
        ("a/fr.gguf", LoraRequest("fr", "a/fr.gguf")),
        ("x=a/fr:0.5", LoraRequest("x", "a/fr", 0.5)),
        ("a/fr:-2", LoraRequest("fr", "a/fr", -2.0)),
        ("C:\\fr", LoraRequest("C-fr", "C:\\fr")),
        ("./a=b/fr", LoraRequest("fr", "./a=b/fr")),
    ],
)
def test_the_users_text_is_parsed(text: str, expected: LoraRequest) -> None:
    assert LoraRequest.parse(text) == expected


@pytest.mark.parametrize("text", ["", "x=", "a:nan", "a:inf", "a:1e9", "..."])
def test_a_senseless_text_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="adapter"):
        LoraRequest.parse(text)


def test_sums_equal_b_times_a_with_alpha_over_rank(base: Path, tmp_path: Path) -> None:
    ranks = {"rank_pattern": {"v_proj": 2}, "alpha_pattern": {r"layers\.0\.mlp\.down_proj": 6.0}}
    factors = dict(FACTORS)
    v, down = "model.layers.0.self_attn.v_proj", "model.layers.0.mlp.down_proj"
    factors[v] = factors[v][0][:2], factors[v][1][:, :2].copy()
    adapter = opened(base, save_peft(tmp_path / "a", factors, **ranks))
    expected = changed(WEIGHTS, factors)
    expected |= {
        k: changed(WEIGHTS, {k[:-7]: factors[k[:-7]]}, s)[k] for k, s in ((f"{v}.weight", 6.0), (f"{down}.weight", 1.5))
    }
    with open_checkpoint(str(base)) as checkpoint:
        merge(checkpoint, [(adapter, 1.0)])
        for name in checkpoint.tensors:
            assert relative_error(checkpoint.array(name), expected[name]) < 1e-6, name


def test_rank_stabilised_adapters_divide_by_the_root(base: Path, tmp_path: Path) -> None:
    low = opened(base, save_peft(tmp_path / "a", FACTORS, use_rslora=True)).matrices[f"{Q}.weight"]
    np.testing.assert_allclose(low.b, FACTORS[Q][1] * 6.0, rtol=1e-6)


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"bias": "all"}, "bias"),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"peft_type": "IA3"}, "'IA3', expected 'LORA'"),
        ({"alora_invocation_tokens": [1, 2]}, "activated LoRA"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters"),
        ({"rank_pattern": {"(a+)+": 2}}, "too complex"),
    ],
)
def test_adapters_that_change_more_are_refused(base: Path, tmp_path: Path, settings: dict, what: str) -> None:
    with pytest.raises(UnsupportedModelError, match=what):
        opened(base, save_peft(tmp_path / "a", FACTORS, **settings))


@pytest.mark.parametrize(
    ("tensor", "what"),
    [
        (f"base_model.model.{Q}.lora_magnitude_vector", "DoRA"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", "token embedding"),
        (f"base_model.model.{Q}.lora_B.bias", "bias"),
        ("base_model.model.lm_head.weight", "no matrix of a LoRA adapter"),
    ],
)
def test_other_tensors_are_refused(base: Path, tmp_path: Path, tensor: str, what: str) -> None:
    with pytest.raises(UnsupportedModelError, match=what):
        opened(base, save_peft(tmp_path / "a", FACTORS, {tensor: np.ones((4, 4), np.float32)}))


def test_another_models_adapter_names_tensor_and_shapes(base: Path, tmp_path: Path) -> None:
    wide = save_peft(tmp_path / "wide", factors_of(small_config(n_layers=1, hidden_size=128), ("q_proj",)))
    with pytest.raises(
        CheckpointError, match=r"'model.layers.0.self_attn.q_proj' has the shape \[4, 128\], expected \[4, 64\]"
    ):
        opened(base, wide)
    deep = save_peft(tmp_path / "deep", factors_of(small_config(n_layers=2)))
    with pytest.raises(CheckpointError, match=r"model\.layers\.1.*does not have.*'org/base'"):
        opened(base, deep)


def test_damaged_adapters_are_refused(base: Path, tmp_path: Path) -> None:
    a, b = FACTORS[Q]
    with pytest.raises(CheckpointError, match="NaN or infinite"):
        opened(base, save_peft(tmp_path / "a", {Q: (a, b * np.inf)}))
    with pytest.raises(CheckpointError, match="rank 4, expected 8"):
        opened(base, save_peft(tmp_path / "b", FACTORS, r=8))
    with pytest.raises(CheckpointError, match=r"matrix B of .* is missing"):
        opened(base, save_peft(tmp_path / "c", {}, {f"base_model.model.{Q}.lora_A.weight": a}))
    with pytest.raises(CheckpointError, match="would change nothing"):
        opened(base, save_peft(tmp_path / "d", {}))
    (tmp_path / "d" / "adapter_model.safetensors").rename(tmp_path / "d" / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="pickle"):
        opened(base, tmp_path / "d")
    with pytest.raises(CheckpointError, match="no such file"):
        opened(base, tmp_path / "e")


def test_gguf_adapters_equal_peft_adapters(base: Path, tmp_path: Path) -> None:
    """llama.cpp's converter permutes B of queries and keys as it permutes their weights."""
    adapter = opened(base, save_gguf_adapter(tmp_path / "a.gguf", CONFIG, FACTORS))
    expected = opened(base, save_peft(tmp_path / "a", FACTORS))
    assert adapter.matrices.keys() == expected.matrices.keys() and adapter.digest == expected.digest
    for name, low in adapter.matrices.items():
        np.testing.assert_array_equal(low.b, expected.matrices[name].b)


def test_the_users_scale_multiplies(base: Path, tmp_path: Path) -> None:
    path = save_peft(tmp_path / "a", FACTORS)
    checkpoint = open_checkpoint(str(base))
    low = open_adapter(LoraRequest.parse(f"{path}:-0.5"), checkpoint.config, checkpoint.tensors).matrices[f"{Q}.weight"]
    np.testing.assert_allclose(low.b, FACTORS[Q][1] * -1.5, rtol=1e-6)


@pytest.mark.parametrize(
    ("metadata", "what"),
    [
        ({"general.type": "model"}, "'model', expected 'adapter'"),
        ({"adapter.type": "control_vector"}, "'control_vector'"),
    ],
)
def test_other_gguf_files_are_refused(base: Path, tmp_path: Path, metadata: dict[str, str], what: str) -> None:
    with pytest.raises(UnsupportedModelError, match=what):
        opened(base, save_gguf_adapter(tmp_path / "a.gguf", CONFIG, FACTORS, **metadata))


def test_a_gguf_adapter_of_another_architecture_is_refused(base: Path, tmp_path: Path) -> None:
    config = small_config("qwen2", n_layers=1)
    with pytest.raises(CheckpointError, match=r"general\.architecture is 'qwen2', expected llama"):
        opened(base, save_gguf_adapter(tmp_path / "a.gguf", config, {Q: FACTORS[Q]}))


@pytest.mark.slow
def test_peft_writes_such_adapters(base: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    import torch

    settings = peft.LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj"], rank_pattern={"q_proj": 2})
    model = peft.get_peft_model(transformers_model(CONFIG, WEIGHTS), settings)
    torch.manual_seed(0)
    for name, values in model.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(values)
    model.save_pretrained(str(tmp_path / "a"))
    with open_checkpoint(str(base)) as checkpoint:
        merge(checkpoint, [(opened(base, tmp_path / "a"), 1.0)])
        actual = checkpoint.array(f"{Q}.weight")
    expected = model.merge_and_unload().get_submodule(Q).weight.detach().numpy()
    assert relative_error(actual, expected) < 1e-6 < relative_error(WEIGHTS[f"{Q}.weight"], expected)
