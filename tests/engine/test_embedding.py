"""`llm.embed` against the hidden states of transformers, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
from ascii_tokenizer import ascii_tokenizer
from helpers import random_weights, save_folder, small_config, transformers_model, windows_of

import llmcl
from llmcl.checkpoint import open_checkpoint
from llmcl.checkpoint.embedding_settings import embedding_settings
from llmcl.engine.llm import LLM
from llmcl.errors import CheckpointError, ContextLengthError, UnsupportedModelError, UsageError
from llmcl.runtime.device import Device

CONFIG = small_config("qwen3")
WEIGHTS = random_weights(CONFIG, 7)
IDS = [[5, 9, 60, 7], [8], [*range(3, 90)] * 4]  # the last one takes more than one step


def pooled(model: Any, ids: list[int], pooling: str) -> np.ndarray:
    """The formula of sentence-transformers, on the rows of transformers after the final norm."""
    import torch

    with torch.no_grad():
        rows = model.model(torch.tensor([ids])).last_hidden_state[0]
    row = {"mean": rows.mean(dim=0), "cls": rows[0], "last": rows[-1]}[pooling]
    vector: np.ndarray = torch.nn.functional.normalize(row, dim=0).numpy()
    return vector


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Qwen 3 as Qwen3-Embedding publishes it: the base model's names, and a pooling beside it."""
    folder = tmp_path_factory.mktemp("embedding")
    save_folder(folder, CONFIG, WEIGHTS)
    transformers_model(CONFIG, WEIGHTS).model.save_pretrained(folder)  # without "model." and without a head
    pooling = {"word_embedding_dimension": 64, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": False}
    write_modules(folder, {"1_Pooling": pooling | {"pooling_mode_lasttoken": True, "include_prompt": True}})
    prompts = {"prompts": {"query": "Q: ", "document": ""}, "default_prompt_name": None}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    return folder


def write_modules(folder: Path, settings: dict[str, dict[str, Any]]) -> None:
    """Writes modules.json and the settings of the modules after the model, as sentence-transformers 3 does."""
    modules = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    for i, (path, values) in enumerate(settings.items(), 1):
        kind = f"sentence_transformers.models.{path.partition('_')[2]}"
        modules.append({"idx": i, "name": str(i), "path": path, "type": kind})
        (folder / path).mkdir(exist_ok=True)
        (folder / path / "config.json").write_text(json.dumps(values))
    (folder / "modules.json").write_text(json.dumps(modules))


@pytest.fixture(scope="module")
def llm(default_device: Device, folder: Path) -> Iterator[LLM]:
    with llmcl.load(str(folder), device=default_device, compile_kernels=False) as llm:
        yield llm


@pytest.mark.parametrize("pooling", [None, "mean", "cls"])
def test_vectors_are_those_of_transformers(llm: LLM, pooling: str | None) -> None:
    model = transformers_model(CONFIG, WEIGHTS)
    vectors = llm.embed(IDS, pooling=pooling)
    assert vectors.dtype == np.float32
    expected = np.stack([pooled(model, ids, pooling or "last") for ids in IDS])
    np.testing.assert_allclose(vectors, expected, atol=1e-4)


def test_dimensions_are_the_first_ones_normalised_again(llm: LLM) -> None:
    whole, short = llm.embed(IDS, normalize=False), llm.embed(IDS, dimensions=24)
    expected = whole[:, :24] / np.linalg.norm(whole[:, :24], axis=1, keepdims=True)
    np.testing.assert_allclose(short, expected, atol=1e-6)
    assert not np.allclose(np.linalg.norm(whole, axis=1), 1.0, atol=0.1)


def test_a_prompt_of_the_checkpoint_goes_before_the_text(llm: LLM) -> None:
    asked = llm.embed(["Why?"], prompt_name="query")
    np.testing.assert_array_equal(asked, llm.embed(["Q: Why?"]))
    assert not np.allclose(asked, llm.embed(["Why?"]), atol=1e-3)
    with pytest.raises(UsageError, match="prompt_name is 'passage'; expected one of the model's prompts: 'query', 'd"):
        llm.embed(["Why?"], prompt_name="passage")


def test_more_texts_than_are_read_at_once_stay_in_order(llm: LLM) -> None:
    texts = [[3 + i % 90, 5] for i in range(70)]
    vectors = llm.embed(texts)
    np.testing.assert_allclose(vectors[[1, 68]], llm.embed([texts[1], texts[68]]), atol=1e-6)
    assert vectors.shape == (70, 64)


def test_a_long_text_is_refused_or_cut(llm: LLM) -> None:
    long = [7] * 600
    with pytest.raises(ContextLengthError, match=r"texts\[1\] has 600 tokens, the model takes 512; shorten it, cut it"):
        llm.embed([[7], long])
    np.testing.assert_array_equal(llm.embed([long], truncate=True), llm.embed([long[:512]]))
    with pytest.raises(ContextLengthError):
        llm.embed(["a" * 600])


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        ([], {}, r"texts is \[\]; expected a list of texts"),
        ("a text", {}, "texts is 'a text'; expected a list"),
        ([""], {}, r"texts\[0\] has no tokens"),
        (["a", []], {}, r"texts\[1\] has no tokens"),
        ([2.5], {}, r"texts\[0\] is 2.5; expected a text or token ids"),
        ([[131]], {}, "token id 131 is not in the vocabulary"),
        (["a"], {"pooling": "max"}, "pooling is 'max'; expected mean, cls or last"),
        (["a"], {"dimensions": 65}, "dimensions is 65; expected 1 to the model's 64"),
        (["a"], {"dimensions": 0}, "dimensions is 0; expected a whole number"),
        (["a"], {"truncate": "yes"}, "truncate is 'yes'; expected True or False"),
    ],
)
def test_wrong_arguments_are_refused(llm: LLM, texts: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        llm.embed(texts, **options)


def test_a_model_without_a_pooling_is_refused(small_llm: LLM) -> None:
    with pytest.raises(UsageError, match=r"says nothing about embeddings .* give a pooling"):
        small_llm.embed(["a"])


def settings_of(folder: Path) -> Any:
    with open_checkpoint(str(folder)) as checkpoint:
        return embedding_settings(checkpoint)


@pytest.mark.parametrize(
    ("modules", "error", "message"),
    [
        ({"1_Pooling": {"pooling_mode_max_tokens": True}}, UnsupportedModelError, "the pooling .*pooling_mode_max_tok"),
        ({"1_Pooling": {}}, UnsupportedModelError, "the pooling"),
        ({"1_CNN": {}}, UnsupportedModelError, "the module 'CNN'"),
        ({"2_Dense": {"in_features": 64, "out_features": 32}}, UnsupportedModelError, "a dense layer with a bias"),
    ],
)
def test_unknown_modules_are_refused(folder: Path, tmp_path: Path, modules: Any, error: Any, message: str) -> None:
    copytree(folder, tmp_path, dirs_exist_ok=True)
    write_modules(tmp_path, modules)
    with pytest.raises(error, match=message):
        settings_of(tmp_path)


@pytest.mark.parametrize("text", ["{}", "[1]", "nothing", '[{"path": "../other", "type": "a.Pooling"}]'])
def test_a_damaged_list_of_modules_is_refused(folder: Path, tmp_path: Path, text: str) -> None:
    copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"modules\.json"):
        settings_of(tmp_path)


@pytest.mark.slow
def test_a_gemma_that_sees_the_whole_text(default_device: Device, tmp_path: Path) -> None:
    """EmbeddingGemma: windows to both sides, the mean of the rows, then two products."""
    import torch
    import transformers
    from safetensors.numpy import save_file

    window = 20
    options: dict[str, Any] = {"sliding_window": window, "layer_types": ["sliding_attention", "full_attention"]}
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"num_hidden_layers": 2, "vocab_size": 131, "head_dim": 32, "max_position_embeddings": 512}
    rope = {name: {"rope_type": "default", "rope_theta": 10000.0} for name in options["layer_types"]}
    of_gemma = transformers.Gemma3TextConfig(
        **sizes, **options, use_bidirectional_attention=True, query_pre_attn_scalar=32, rope_parameters=rope
    )
    torch.manual_seed(3)
    model = transformers.Gemma3TextModel(of_gemma).eval()
    model.save_pretrained(tmp_path)
    ascii_tokenizer().save(str(tmp_path / "tokenizer.json"))
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"sliding_window": window}))  # as published
    rng, dense = np.random.default_rng(1), {"2_Dense": (128, 64), "3_Dense": (48, 128)}
    identity = {"bias": False, "activation_function": "torch.nn.modules.linear.Identity"}
    modules: dict[str, dict[str, Any]] = {"1_Pooling": {"pooling_mode_mean_tokens": True}}
    for path, (rows, columns) in dense.items():
        modules[path] = {"out_features": rows, "in_features": columns, **identity}
    write_modules(tmp_path, modules)
    matrices = {path: rng.standard_normal(shape).astype(np.float32) for path, shape in dense.items()}
    for path, matrix in matrices.items():
        save_file({"linear.weight": matrix}, tmp_path / path / "model.safetensors")
    ids = [[*range(3, 90)], [5, 6]]
    with llmcl.load(str(tmp_path), device=default_device) as llm:
        assert llm.config.bidirectional and windows_of(llm.config) == (window // 2 + 1, None)
        vectors = llm.embed(ids)
        with pytest.raises(UsageError, match="is an encoder"):
            llm.generate("a", raw=True)
    for of_text, vector in zip(ids, vectors, strict=True):
        with torch.no_grad():
            row = model(torch.tensor([of_text])).last_hidden_state[0].mean(dim=0).numpy()
        for matrix in matrices.values():
            row = matrix @ row
        np.testing.assert_allclose(vector, row / np.linalg.norm(row), atol=1e-4)
