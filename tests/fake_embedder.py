"""A model for embeddings that embeds by rule, for tests of the server."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from fake_server import byte_tokenizer

from llmcl.architectures.embedding import EmbeddingSettings
from llmcl.engine.embedding import TextReader, check_dimensions, shortened
from llmcl.errors import ContextLengthError, UsageError

TOKENIZER = byte_tokenizer()
SETTINGS = EmbeddingSettings("mean", prompts={"query": "Q: "})


class FakeReranker:
    """A document's score is the share of the query's words that it has."""

    name = "reranker"

    def rerank(self, query: str, documents: list[str], *, truncate: bool) -> tuple[list[float], int]:
        words = {*query.split()}
        if not truncate and any(len(text) > 100 for text in documents):
            raise ContextLengthError("documents[0] is too long")
        return [len(words & {*text.split()}) / max(1, len(words)) for text in documents], len(documents)


class FakeEmbedder:
    """The vector of a text has its number of tokens, its first token, 1 and 2, normalised."""

    name = "embedder"

    def ids_to_embed(
        self, texts: Sequence[str] | Sequence[Sequence[int]], *, prompt_name: str | None, truncate: bool
    ) -> list[list[int]]:
        return TextReader(SETTINGS, TOKENIZER, 100, prompt_name, truncate).ids(texts)

    def embed(self, ids: list[list[int]], *, dimensions: int | None) -> np.ndarray:
        check_dimensions(dimensions, 4)
        if any(not 0 <= token < TOKENIZER.n_vocab for one in ids for token in one):
            raise UsageError("a token id is not in the vocabulary")
        rows = np.array([[len(one), one[0], 1, 2] for one in ids], np.float32)
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        return shortened(rows, dimensions, normalize=True)
