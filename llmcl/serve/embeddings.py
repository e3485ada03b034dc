"""Embeddings in OpenAI's and Ollama's APIs.

Sources: OpenAI's API reference, "Create embeddings"; ollama/ollama, api.md.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from llmcl.errors import MAX_NUMBER
from llmcl.serve.body import read_fields
from llmcl.serve.errors import RequestError
from llmcl.serve.events import ClientGoneError, unless_gone
from llmcl.serve.fields import Fields, as_whole, wrong
from llmcl.serve.generation import AsciiJSONResponse
from llmcl.serve.served import TextEmbedder
from llmcl.serve.service import Service

if TYPE_CHECKING:  # imported late, like the engine
    import numpy as np

    from llmcl.engine.llm import LLM
    from llmcl.serve.served import Stream

MAX_INPUTS = 2048  # OpenAI's limit
_EMBEDDING = ThreadPoolExecutor(1, "embedding texts")

T = TypeVar("T")
Inputs = list[str] | list[list[int]]


@dataclass(frozen=True)
class LlmEmbedder:
    """Embeds with an LLM that nothing else uses. pooling: as for `LLM.embed`."""

    llm: LLM
    name: str
    pooling: str | None = None

    def __post_init__(self) -> None:
        if self.llm.embedding.ranking is None or self.pooling is not None:
            self.check()

    def check(self) -> None:
        """Raises UsageError, with the name for clients, if there is no pooling."""
        from llmcl.engine.embedding import chosen_pooling

        chosen_pooling(self.llm.embedding, self.pooling, self.name)

    def ids_to_embed(
        self, texts: Sequence[str] | Sequence[Sequence[int]], *, prompt_name: str | None, truncate: bool
    ) -> list[list[int]]:
        return self.llm.ids_to_embed(texts, prompt_name=prompt_name, truncate=truncate)

    def embed(self, ids: list[list[int]], *, dimensions: int | None) -> np.ndarray:
        self.check()
        return self.llm.embed(ids, pooling=self.pooling, dimensions=dimensions, wait=True)


class NoAnswers:
    """Stands in for the engine of a server that makes embeddings only. Refuses every answer."""

    def __init__(self) -> None:
        from llmcl.engine.engine_metrics import EngineMetrics

        self.metrics = EngineMetrics()

    def stream(self, prompt: Sequence[int], **options: Any) -> Stream:
        raise RequestError(
            400, "this server makes embeddings (/v1/embeddings) or scores (/v1/rerank), no text", code="not_supported"
        )

    def expect(self) -> Callable[[], None]:
        return lambda: None


async def embeddings(request: Request, service: Service) -> Response:
    embedder = embedder_of(service)
    fields = await read_fields(request, service.settings)
    fields.text("model")
    texts = _inputs(fields)
    form = fields.one_of("encoding_format", "float", "base64") or "float"

    def work() -> Response:
        ids, vectors = _vectors(embedder, texts, fields, truncate=fields.flag("truncate"))
        shown = [_base64(vector) for vector in vectors] if form == "base64" else vectors.tolist()
        data = [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(shown)]
        n_tokens = sum(map(len, ids))
        usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
        return AsciiJSONResponse({"object": "list", "data": data, "model": embedder.name, "usage": usage})

    return await in_turn(request, service, work)


async def ollama_embed(request: Request, service: Service) -> Response:
    """Answers /api/embed, and the older /api/embeddings with one text in `prompt`."""
    start = time.perf_counter_ns()
    embedder = embedder_of(service)
    fields = await read_fields(request, service.settings)
    fields.text("model")
    is_old = request.url.path == "/api/embeddings"
    texts: Inputs = [fields.text("prompt") or ""] if is_old else _inputs(fields)

    def work() -> Response:
        ids, vectors = _vectors(embedder, texts, fields, truncate=fields.flag("truncate", True))
        if is_old:
            return AsciiJSONResponse({"embedding": vectors[0].tolist()})
        duration = time.perf_counter_ns() - start
        counts = {"total_duration": duration, "load_duration": 0, "prompt_eval_count": sum(map(len, ids))}
        return AsciiJSONResponse({"model": embedder.name, "embeddings": vectors.tolist(), **counts})

    return await in_turn(request, service, work)


def embedder_of(service: Service) -> TextEmbedder:
    """Returns the model for embeddings. Raises RequestError if the server has none."""
    if (embedder := service.served().embedder) is None:
        message = (
            "this server makes no embeddings: start it with a model for them (--embedding-model, or -m), or with a "
            "pooling (--pooling) to embed with the model that it has"
        )
        raise RequestError(501, message, code="not_implemented")
    return embedder


async def in_turn(request: Request, service: Service, work: Callable[[], T]) -> T:
    """Runs work in the embedding thread, in a place of the queue. Raises RequestError if there is none."""

    async def waiting() -> T:
        return await asyncio.get_running_loop().run_in_executor(_EMBEDDING, work)

    with service.admit(1):
        try:
            return await unless_gone(request.receive, waiting())
        except ClientGoneError:
            raise ClientDisconnect from None


def _vectors(
    embedder: TextEmbedder, texts: Inputs, fields: Fields, *, truncate: bool
) -> tuple[list[list[int]], np.ndarray]:
    """Returns the token ids and the vectors of texts, float32 [texts, dimensions]."""
    dimensions = fields.whole("dimensions", None, 1, MAX_NUMBER)
    ids = embedder.ids_to_embed(texts, prompt_name=fields.text("prompt_name"), truncate=truncate)
    return ids, embedder.embed(ids, dimensions=dimensions)


def _inputs(fields: Fields) -> Inputs:
    """Returns the texts in `input`: a text, token ids, or a list of either."""
    value = fields.required("input", "a text or token ids, or a list of them")
    if isinstance(value, str):
        return [value]
    expected = f"a text, token ids, or a list of up to {MAX_INPUTS} of one kind"
    if not isinstance(value, list) or not value:
        raise wrong("input", value, expected)
    if (ids := _ids(value)) is not None:
        return [ids]
    if len(value) > MAX_INPUTS:
        raise wrong("input", value, expected)
    if all(isinstance(text, str) for text in value):
        return value
    lists = [_ids(item) for item in value]
    known = [ids for ids in lists if ids]
    if len(known) < len(lists):
        raise wrong("input", value, expected)
    return known


def _ids(value: Any) -> list[int] | None:
    """Returns a list of whole numbers, None for anything else."""
    if not isinstance(value, list) or not value:
        return None
    numbers: Sequence[int | None] = [as_whole(item) for item in value]
    ids = [number for number in numbers if number is not None]
    return ids if len(ids) == len(numbers) else None


def _base64(vector: np.ndarray) -> str:
    """Returns float32 numbers, little endian, in base64."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
