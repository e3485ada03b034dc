"""`llm.embed` against the hidden states of transformers, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
from helpers import random_weights, save_folder, small_config, transformers_model

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
