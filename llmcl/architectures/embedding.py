"""EmbeddingSettings: from a model's rows to the embedding of a text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np

Pooling = Literal["mean", "cls", "last"]
POOLINGS: tuple[Pooling, ...] = get_args(Pooling)


@dataclass(frozen=True)
class RankingHead:
    """A cross-encoder's last two products, from a text's first row to a logit; tanh between them. All float32."""

    dense: np.ndarray  # [hidden, hidden]
    dense_bias: np.ndarray  # [hidden]
    classifier: np.ndarray  # [1, hidden]
    classifier_bias: np.ndarray  # [1]


@dataclass(frozen=True)
class JudgingHead:
    """A decoder's judgement of a document (Qwen3-Reranker): a product with a prompt's last row."""

    weight: np.ndarray  # float32 [hidden]: the output head's row for "yes" minus its row for "no"
    template: str  # the prompt, with {query} and {document}


@dataclass(frozen=True)
class EmbeddingSettings:
    """A checkpoint's settings for embeddings."""

    pooling: Pooling | None = None  # mean, first or last row of a text; None: unknown
    dense: tuple[np.ndarray, ...] = ()  # float32 [out, in]: products after pooling
    ranking: RankingHead | JudgingHead | None = None  # None: no reranker
    max_tokens: int | None = None  # longest text; None: the model's context
    prompts: Mapping[str, str] = field(default_factory=dict)  # text before an input, by the prompt's name
    end_token: int | None = None  # token to append to a text; None: the tokenizer does
    default_prompt: str | None = None  # name of the prompt for inputs without a prompt name


NO_SETTINGS = EmbeddingSettings()
