"""Folders as they are published and passed on: heads, shards, and files that are no part of the model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import random_weights, relative_error, save_folder, small_config, transformers_logits
from safetensors.numpy import load_file, save_file

import llmcl
from llmcl.architectures.config import config_from_hf
from llmcl.checkpoint import open_checkpoint
from llmcl.convert import convert
from llmcl.errors import CheckpointError, UnsupportedModelError
from llmcl.runtime.device import Device

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def with_settings(folder: Path, **changes: Any) -> Path:
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, **changes}))
    return folder


def test_a_head_of_its_own_is_used_though_the_configuration_says_tied(
    default_device: Device, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As transformers does; a conversion keeps it."""
    import transformers

    config = small_config()
    folder = save_folder(tmp_path / "model", config, random_weights(config, seed=1))
    with_settings(folder, tie_word_embeddings=True)
    ids = list(range(3, 40))
    expected = transformers_logits(transformers.AutoModelForCausalLM.from_pretrained(folder).eval(), ids)
    convert(str(folder), tmp_path / "folder", dtype="float32")
    for path in (folder, tmp_path / "folder"):
        with llmcl.load(str(path), device=default_device, dtype="float32", max_context=64) as llm:
            assert relative_error(llm.logits(ids), expected) < 1e-4, path
    assert "lm_head.weight of its own" in caplog.text


def test_a_copy_of_the_embedding_is_no_head_of_its_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = small_config()
    weights = random_weights(config, seed=1)
    folder = save_folder(tmp_path / "model", config, {**weights, HEAD: weights[EMBEDDING]})
    with open_checkpoint(str(with_settings(folder, tie_word_embeddings=True))) as checkpoint:
        assert checkpoint.config.tie_embeddings
        assert HEAD not in checkpoint.tensors
    assert not caplog.records


@pytest.mark.parametrize(
    ("model_type", "top", "text", "tied"),
    [
        ("mistral3", None, None, True),
        ("mistral3", False, True, False),
        ("mistral3", True, False, True),
        ("gemma3", None, None, True),
        ("gemma3", None, False, True),
        ("gemma3", False, None, False),
        ("qwen3_5", None, None, False),
        ("qwen3_5", None, True, False),
        ("qwen3_5", True, False, True),
    ],
)
def test_a_wrapper_says_whether_embeddings_are_tied(
    model_type: str, top: bool | None, text: bool | None, tied: bool
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 4, "head_dim": 16, "vocab_size": 200}
    layers = {"layer_types": ["linear_attention"] * 3 + ["full_attention"]} if model_type == "qwen3_5" else {}
    whole: dict[str, Any] = {"model_type": model_type, "tie_word_embeddings": top}
    whole["text_config"] = sizes | layers | {"tie_word_embeddings": text}
    assert config_from_hf(whole).tie_embeddings == tied


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*-of-*.safetensors"))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    config = small_config()
    return save_folder(tmp_path / "model", config, random_weights(config, seed=1), max_shard_size="100KB")


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    with open_checkpoint(str(folder)) as checkpoint:
        return {name: checkpoint.array(name) for name in checkpoint.tensors}


def assert_equal(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert actual.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(actual[name], values)


def test_shards_need_no_index(sharded: Path) -> None:
    expected = tensors_of(sharded)
    (sharded / "model.safetensors.index.json").unlink()
    assert len(shards(sharded)) > 2
    assert_equal(tensors_of(sharded), expected)
    shards(sharded)[1].unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-[0-9]{5}\.safetensors is missing"):
        open_checkpoint(str(sharded))


def test_one_shard_alone_is_a_model(tmp_path: Path) -> None:
    config = small_config()
    folder = save_folder(tmp_path / "model", config, random_weights(config, seed=1))
    expected = tensors_of(folder)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    assert_equal(tensors_of(folder), expected)


def test_shards_of_two_models_are_not_mixed(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    shutil.copy(shards(sharded)[0], sharded / "model-00001-of-00009.safetensors")
    with pytest.raises(CheckpointError, match="of different models"):
        open_checkpoint(str(sharded))
    (sharded / "model-00001-of-00009.safetensors").unlink()
    shutil.copy(shards(sharded)[0], shards(sharded)[1])
    with pytest.raises(CheckpointError, match="in two weight files"):
        open_checkpoint(str(sharded))


def test_the_index_goes_before_a_stray_file(sharded: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = tensors_of(sharded)
    assert not caplog.records
    save_file({name: values + 1 for name, values in expected.items()}, sharded / "model.safetensors")
    assert_equal(tensors_of(sharded), expected)
    assert "model.safetensors is not read" in caplog.text
    shards(sharded)[0].unlink()  # an index of a model that is no longer there
    assert_equal(tensors_of(sharded), {name: values + 1 for name, values in expected.items()})


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
def test_adapters_are_named(sharded: Path, file: str) -> None:
    (sharded / file).write_text("{}")
    with pytest.raises(UnsupportedModelError, match="an adapter beside a model"):
        open_checkpoint(str(sharded))
    (sharded / "config.json").unlink()
    with pytest.raises(UnsupportedModelError, match="an adapter, not a model"):
        open_checkpoint(str(sharded))


@pytest.mark.parametrize(
    ("names", "what"),
    [
        (("weight", "scales", "biases"), "MLX"),
        (("weight", "weight_scale", "input_scale"), "ModelOpt"),
        (("weight", "weight_scale_inv"), "an FP8 format"),
    ],
)
def test_quantised_weights_are_named_where_the_configuration_does_not_say_so(
    tmp_path: Path, names: tuple[str, ...], what: str
) -> None:
    """The names are those in published folders of each kind."""
    config = small_config()
    folder = save_folder(tmp_path / "model", config, random_weights(config, seed=1))
    tensors = load_file(folder / "model.safetensors")
    whole = "model.layers.0.mlp.down_proj.weight"
    packed = tensors.pop(whole).view(np.int32)[:, ::8]
    tensors |= {whole.replace("weight", name): packed.copy() for name in names}
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=f"quantised by {what}.*use the original"):
        open_checkpoint(str(folder))


@pytest.mark.parametrize(
    ("prefix", "what"), [("_orig_mod.", "torch.compile"), ("base_model.model.", "an adapter that is not merged")]
)
def test_names_of_wrapped_models_are_named(tmp_path: Path, prefix: str, what: str) -> None:
    config = small_config()
    folder = save_folder(tmp_path / "model", config, random_weights(config, seed=1))
    tensors = load_file(folder / "model.safetensors")
    save_file({prefix + name: values for name, values in tensors.items()}, folder / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=what):
        open_checkpoint(str(folder))


@pytest.mark.parametrize("dtype", ["auto", "torch.bfloat16", "bfloat16"])
def test_the_tensors_say_the_dtype(tmp_path: Path, dtype: str) -> None:
    config = small_config()
    folder = save_folder(tmp_path / "model", config, random_weights(config, seed=1), dtype="bfloat16")
    with open_checkpoint(str(with_settings(folder, dtype=None, torch_dtype=dtype))) as checkpoint:
        assert checkpoint.config.dtype == "bfloat16"
