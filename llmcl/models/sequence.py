"""Sequence and step: a text in progress, and one pass through the model for the next tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from llmcl.checkpoint.lora import NO_ADAPTERS, AdapterChoice
from llmcl.models.image_rows import PlacedImage
from llmcl.ops.sample import SamplingParams


@dataclass(eq=False)
class SequenceState:
    """A text, independent from the model. The KV cache creates sequences (`KVCache.sequence`).

    A sampled token enters `token_ids` with the step that reads it as input. Key i lies in page
    `pages[i // page_tokens]`. An interrupt may leave more pages than the tokens need, never fewer.
    """

    cache_key: object  # identifies the sequence to its cache
    token_ids: list[int] = field(default_factory=list)  # tokens whose keys and values are in the cache
    images: list[PlacedImage] = field(default_factory=list)  # in order; their rows replace the embeddings of tokens
    pages: list[int] = field(default_factory=list)  # page table; empty for a contiguous cache
    text_length: int | None = None  # length that chose the rotary frequencies, see `KVCache.choose_frequencies`
    adapters: AdapterChoice = NO_ADAPTERS  # its keys and values are of no use to texts with others, see `KVCache.adapt`
    n_findable: int | None = None  # prefix length whose full pages may be shared; None: everything
    sampling: SamplingParams = field(default_factory=SamplingParams)  # parameters for the next tokens, seed included
    n_sampled: int = 0  # tokens chosen so far with `sampling`
    mu: float | None = None  # mirostat's state when the sequence last left its place on the device; None: a new answer

    @property
    def position(self) -> int:
        """Returns the position of the next token."""
        return len(self.token_ids)

    def answer(self, last: Sequence[int] = ()) -> list[int]:
        """Returns the tokens chosen so far. last: the newest token, not yet in the cache."""
        return [*self.token_ids, *last][-self.n_sampled :] if self.n_sampled else []


@dataclass(frozen=True)
class Step:
    """One pass through the model: reads the next tokens after the cached tokens."""

    sequence: SequenceState
    token_ids: Sequence[int] | None  # None: the last sampled token, which only the device may know yet
    position: int  # of the first token

    @property
    def n_tokens(self) -> int:
        return 1 if self.token_ids is None else len(self.token_ids)

    @property
    def images(self) -> list[PlacedImage]:
        """Returns the images that have tokens in the step."""
        end = self.position + self.n_tokens
        return [placed for placed in self.sequence.images if placed.first < end and placed.end > self.position]


@dataclass(frozen=True)
class StepCount:
    """Counts verification steps, their rows, and the sampled tokens that were used."""

    steps: int = 0
    rows: int = 0
    tokens: int = 0

    def since(self, before: StepCount) -> StepCount:
        return StepCount(self.steps - before.steps, self.rows - before.rows, self.tokens - before.tokens)
