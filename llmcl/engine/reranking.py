"""Scores documents for a query with a reranker, which reads both texts together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llmcl.architectures.embedding import JudgingHead, RankingHead
from llmcl.engine.embedding import Embedder
from llmcl.engine.judging import prompts_to_judge
from llmcl.engine.prompts import is_list
from llmcl.errors import ContextLengthError, UsageError, check_flags, check_text, counted, shown
from llmcl.tokenizer import Tokenizer

Pair = tuple[list[int], int]  # token ids, and the index of the second text's first token


def pairs_to_read(
    tokenizer: Tokenizer,
    head: RankingHead | JudgingHead,
    query: str,
    documents: Sequence[str],
    most: int,
    *,
    truncate: bool,
) -> list[Pair]:
    """Returns the token ids of the query with each document, cut to `most` at the document's end with truncate.

    Raises UsageError or ContextLengthError, with the document's index.
    """
    check_text("query", query)
    check_flags(truncate=truncate)
    if not is_list(documents) or not len(documents):
        raise UsageError(f"documents is {shown(documents)}; expected a list of texts")
    for i, document in enumerate(documents):
        check_text(f"documents[{i}]", document)
    if isinstance(head, JudgingHead):
        prompts = prompts_to_judge(tokenizer, head, query, [*documents], most, truncate=truncate)
        return [(ids, len(ids)) for ids in prompts]
    return [_pair(tokenizer, query, document, i, most, truncate) for i, document in enumerate(documents)]


def _pair(tokenizer: Tokenizer, query: str, document: str, i: int, most: int, truncate: bool) -> Pair:
    ids, second = tokenizer.encode_pair(query, document)
    if len(ids) > most:
        if not truncate:
            raise ContextLengthError(
                f"documents[{i}] has {counted(len(ids), 'token')} with the query, the model takes {most}; shorten it, "
                "or cut it with truncate"
            )
        if second >= most:
            raise ContextLengthError(
                f"the query has {counted(second, 'token')}, the model takes {most} with a document; shorten the query"
            )
        ids = [*ids[: most - 1], ids[-1]]
    return ids, second


def relevance(embedder: Embedder, head: RankingHead | JudgingHead, pairs: Sequence[Pair]) -> np.ndarray:
    """Returns a score from 0 to 1 for each pair, float32 [pairs]. embedder: pools the row that `head` reads."""
    ids, seconds = [ids for ids, _ in pairs], [second for _, second in pairs]
    if isinstance(head, JudgingHead):
        logits = np.concatenate([*embedder.vectors(ids, normalize=False)]) @ head.weight
    else:
        rows = np.concatenate([*embedder.vectors(ids, normalize=False, seconds=seconds)])
        rows = np.tanh(rows @ head.dense.T + head.dense_bias)
        logits = (rows @ head.classifier.T + head.classifier_bias)[:, 0]
    scores: np.ndarray = (1.0 / (1.0 + np.exp(-logits.astype(np.float64)))).astype(np.float32)
    return scores
