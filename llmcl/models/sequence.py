"""Sequence and step: a text that is being written, and what one pass through the model computes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from llmcl.ops.sample import SamplingParams


@dataclass(eq=False)
class SequenceState:
    """A text, apart from the model that extends it. A KV cache makes it (`KVCache.sequence`).

    cache_key: by which that cache knows it. token_ids: the tokens whose keys and values the cache holds. A sampled
    token is held from the step on that takes it as input. pages: the page table; key i lies in page
    `pages[i // page_tokens]`. A contiguous cache needs none. An interrupt may leave more pages than the tokens need,
    never fewer. n_findable: tokens from the beginning on whose full pages other texts may share; None: all. sampling:
    how the next tokens are chosen, seed included. n_sampled: tokens chosen so far with it.
    """

    cache_key: object
    token_ids: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    n_findable: int | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    n_sampled: int = 0

    @property
    def position(self) -> int:
        """The position of the next token."""
        return len(self.token_ids)

    def answer(self, last: Sequence[int] = ()) -> list[int]:
        """The tokens chosen so far. last: the one that the cache does not hold yet."""
        return [*self.token_ids, *last][-self.n_sampled :] if self.n_sampled else []


@dataclass(frozen=True)
class Step:
    """One pass through the model: the tokens that follow those of `sequence` in the cache.

    token_ids: None for the token that was sampled last, which only the device may know yet. position: of the first.
    """

    sequence: SequenceState
    token_ids: Sequence[int] | None
    position: int

    @property
    def n_tokens(self) -> int:
        return 1 if self.token_ids is None else len(self.token_ids)
