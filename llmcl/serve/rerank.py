"""POST /v1/rerank: documents in the order of their relevance for a query, as Jina's API has it.

Source: Jina AI's API reference, "Reranker".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from llmcl.errors import MAX_NUMBER
from llmcl.serve.body import read_fields
from llmcl.serve.embeddings import MAX_INPUTS, in_turn
from llmcl.serve.errors import RequestError
from llmcl.serve.fields import Fields, wrong
from llmcl.serve.generation import AsciiJSONResponse
from llmcl.serve.service import Service

if TYPE_CHECKING:
    from llmcl.engine.llm import LLM


@dataclass(frozen=True)
class LlmReranker:
    """Scores documents with a reranker that nothing else uses at the same time."""

    llm: LLM
    name: str

    def rerank(self, query: str, documents: list[str], *, truncate: bool) -> tuple[list[float], int]:
        """Returns the documents' scores and the number of tokens read."""
        scores = self.llm.rerank(query, documents, truncate=truncate, wait=True)
        pairs = self.llm.pairs_to_rank(query, documents, truncate=truncate)
        return [float(score) for score in scores], sum(len(ids) for ids, _ in pairs)


async def rerank(request: Request, service: Service) -> Response:
    if (reranker := service.served().reranker) is None:
        message = "this server has no reranker: start it with one (--rerank-model, or -m)"
        raise RequestError(501, message, code="not_implemented")
    fields = await read_fields(request, service.settings)
    fields.text("model")
    fields.required("query", "a text")
    query, documents = fields.text("query") or "", _documents(fields)
    most = fields.whole("top_n", len(documents), 1, MAX_NUMBER)
    with_text, truncate = fields.flag("return_documents"), fields.flag("truncate", True)

    def work() -> Response:
        scores, n_tokens = reranker.rerank(query, documents, truncate=truncate)
        ranked = sorted(range(len(scores)), key=lambda i: -scores[i])[:most]
        results: list[dict[str, Any]] = [{"index": i, "relevance_score": scores[i]} for i in ranked]
        if with_text:
            results = [result | {"document": {"text": documents[result["index"]]}} for result in results]
        usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
        return AsciiJSONResponse({"model": reranker.name, "object": "list", "usage": usage, "results": results})

    return await in_turn(request, service, work)


def _documents(fields: Fields) -> list[str]:
    """Returns the texts in `documents`: texts, or objects with a text."""
    value = fields.required("documents", "a list of texts")
    texts = [item.get("text") if isinstance(item, dict) else item for item in value] if isinstance(value, list) else []
    known = [text for text in texts if isinstance(text, str)]
    if not 0 < len(known) == len(texts) <= MAX_INPUTS:
        raise wrong("documents", value, f'a list of up to {MAX_INPUTS} texts, or objects with a "text"')
    return known
