"""/v1/embeddings with OpenAI's client and Ollama's /api/embed, in front of a model that embeds by rule."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import openai
import pytest
from fake_embedder import TOKENIZER, FakeEmbedder, FakeReranker
from fake_server import FakeEngine, Running, running, served, strictly
from openai.types import CreateEmbeddingResponse

from llmcl.serve.embeddings import MAX_INPUTS, NoAnswers


def embedded(texts: Any, dimensions: int | None = None, **options: Any) -> list[list[float]]:
    fake, options = FakeEmbedder(), {"prompt_name": None, "truncate": False} | options
    vectors: list[list[float]] = fake.embed(fake.ids_to_embed(texts, **options), dimensions=dimensions).tolist()
    return vectors


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    engine = FakeEngine(TOKENIZER)
    with running(engine, loaded=False) as server:
        server.service.ready(replace(served(engine), embedder=FakeEmbedder(), reranker=FakeReranker()))
        yield server


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_openais_client_gets_vectors_and_usage(client: openai.OpenAI) -> None:
    """It asks for base64 unless told otherwise."""
    texts = ["one text", "and another"]
    answer = client.embeddings.create(model="any", input=texts)
    strictly(CreateEmbeddingResponse, answer.model_dump())
    assert [item.embedding for item in answer.data] == embedded(texts)
    assert [item.index for item in answer.data] == [0, 1]
    assert answer.model == "embedder" and answer.usage.prompt_tokens == answer.usage.total_tokens == 19
    plain = client.embeddings.create(model="any", input=texts, encoding_format="float", dimensions=2)
    assert [item.embedding for item in plain.data] == embedded(texts, 2)


def test_base64_is_little_endian_float32(server: Running) -> None:
    body = {"input": "a", "encoding_format": "base64"}
    data = server.post("/v1/embeddings", body).json()["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(data), "<f4").tolist() == embedded(["a"])[0]


@pytest.mark.parametrize(
    ("value", "texts"),
    [("a", ["a"]), (["a"], ["a"]), ([5, 6], [[5, 6]]), ([[5, 6], [7]], [[5, 6], [7]]), ([5.0], [[5]])],
)
def test_texts_and_token_ids(server: Running, value: Any, texts: Any) -> None:
    data = server.post("/embeddings", {"input": value}).json()["data"]
    assert [item["embedding"] for item in data] == embedded(texts)


def test_a_prompt_by_name_and_a_text_that_is_cut(server: Running) -> None:
    body = {"input": "x" * 200, "prompt_name": "query", "truncate": True}
    answer = server.post("/v1/embeddings", body).json()
    assert answer["data"][0]["embedding"] == embedded(["Q: " + "x" * 97])[0] and answer["usage"]["total_tokens"] == 100


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "input: is missing, expected a text or token ids"),
        ({"input": []}, r"input: got \[\], expected a text, token ids, or a list"),
        ({"input": ["a", [5]]}, "input: got"),
        ({"input": [[]]}, "input: got"),
        ({"input": {"text": "a"}}, "input: got"),
        ({"input": ["a"] * (MAX_INPUTS + 1)}, "input: got"),
        ({"input": ""}, r"texts\[0\] has no tokens"),
        ({"input": ["a", "b" * 200]}, r"texts\[1\] has 200 tokens, the model takes 100"),
        ({"input": "a", "dimensions": 5}, "dimensions is 5; expected 1 to the model's 4"),
        ({"input": "a", "dimensions": 0}, "dimensions: got 0, expected a whole number from 1"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format: got 'hex', expected one of float, base64"),
        ({"input": "a", "prompt_name": "none"}, "prompt_name is 'none'; expected one of the model's prompts: 'query'"),
    ],
)
def test_a_wrong_request_is_refused(client: openai.OpenAI, body: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        client.post("/embeddings", body=body, cast_to=object)


def test_ollamas_paths(server: Running) -> None:
    answer = server.post("/api/embed", {"model": "any", "input": ["a", "b" * 200]}).json()
    assert answer["embeddings"] == embedded(["a", "b" * 100]) and answer["prompt_eval_count"] == 101
    assert server.post("/api/embeddings", {"model": "any", "prompt": "a"}).json() == {"embedding": embedded(["a"])[0]}


def test_the_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake", "embedder"]


def test_a_server_for_embeddings_alone_makes_no_text(server: Running) -> None:
    alone = replace(server.service.served(), engine=NoAnswers())
    engine = FakeEngine(TOKENIZER)
    with running(engine, loaded=False) as other:
        other.service.ready(alone)
        answer = other.chat("Hello")
        assert answer.status_code == 400 and "this server makes embeddings" in answer.json()["error"]["message"]
        assert other.post("/v1/embeddings", {"input": "a"}).status_code == 200


# ---- /v1/rerank -----------------------------------------------------------------------------------------

DOCUMENTS = ["nothing", "blue sky", {"text": "why is the sky blue"}, "sky"]


def test_documents_come_by_relevance(server: Running) -> None:
    body = {"model": "any", "query": "blue sky", "documents": DOCUMENTS, "top_n": 3, "return_documents": True}
    answer = server.post("/v1/rerank", body).json()
    assert [result["index"] for result in answer["results"]] == [1, 2, 3]
    assert [result["relevance_score"] for result in answer["results"]] == [1.0, 1.0, 0.5]
    assert answer["results"][1]["document"] == {"text": "why is the sky blue"}
    assert answer["model"] == "reranker" and answer["usage"]["total_tokens"] == 4
    plain = server.post("/rerank", {"query": "sky", "documents": DOCUMENTS}).json()["results"]
    assert len(plain) == 4 and "document" not in plain[0]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"documents": ["a"]}, "query: is missing"),
        ({"query": "a"}, "documents: is missing"),
        ({"query": "a", "documents": []}, "documents: got [], expected a list of up to 2048 texts"),
        ({"query": "a", "documents": "b"}, "documents: got 'b'"),
        ({"query": "a", "documents": ["b", {"title": "c"}]}, "documents: got"),
        ({"query": "a", "documents": ["b"], "top_n": 0}, "top_n: got 0"),
        ({"query": "a", "documents": ["b" * 101], "truncate": False}, "documents[0] is too long"),
    ],
)
def test_a_wrong_request_for_a_rank_is_refused(server: Running, body: dict[str, Any], message: str) -> None:
    answer = server.post("/v1/rerank", body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert message in error["message"] or error["code"] == "context_length_exceeded"


def test_a_server_without_a_reranker(shared: Running) -> None:
    answer = shared.post("/v1/rerank", {"query": "a", "documents": ["b"]})
    assert answer.status_code == 501 and "--rerank-model" in answer.json()["error"]["message"]
