"""The hook for speculative decoding: what the token loops ask of `llmcl/speculation/`, and the answers without it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from llmcl.engine.matching import TokenMatcher
from llmcl.engine.scheduler import Job, Plan
from llmcl.models.batch import Batch
from llmcl.models.model import Model
from llmcl.models.sequence import SequenceState, StepCount
from llmcl.ops.sample import SamplingParams
from llmcl.progress import Progress

Sampled = Callable[[], list[int]]
"""Waits for the tokens that a step sampled."""


class StepDrafts(Protocol):
    """Drafts in an engine's steps, as long as the engine is open."""

    @property
    def must_be_read(self) -> bool:
        """Returns whether the running step must be read before the next one is planned."""
        ...

    def give_back(self) -> None:
        """Frees pages that only rejected rows used. Called before a step is planned."""

    def enqueue(self, plan: Plan) -> tuple[list[int], Callable[[], list[list[int]]]] | None:
        """Enqueues the plan's step with drafts, if they pay. Returns the rows per job and a function that waits for the
        tokens per job. None: the caller enqueues the step.
        """
        ...

    def decoded(self, plan: Plan, wait: Sampled) -> Sampled:
        """Records a step without drafts. wait: returns the sampled tokens."""
        ...

    def push(self, job: Job, token: int) -> None:
        """Records a token that was read."""


MakeDrafts = Callable[[], StepDrafts]
"""Makes the drafts for a batch's steps: called once per engine."""


class Speculation(Protocol):
    """Computes a sequence's next tokens with drafts."""

    @property
    def looks_ahead(self) -> bool:
        """Returns whether the next step can be enqueued before its input token has been read."""
        ...

    @property
    def counted(self) -> StepCount:
        """Returns the steps that verified a draft."""
        ...

    def begin(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Begins an answer to `prompt`. Tokens are sampled with params, seed included."""

    def push(self, tokens: Sequence[int]) -> None:
        """Records tokens of the answer that were read."""

    def draft(self, unread: int, most: int) -> list[int]:
        """Returns at most `most` tokens for the next step to verify. Empty: a decode step is faster.

        unread: tokens sampled but not read yet, 0 or 1.
        """
        ...

    def verify(self, sequence: SequenceState, draft: Sequence[int], matcher: TokenMatcher | None = None) -> Sampled:
        """Runs a step that verifies the draft. The returned function raises DeviceError if no token can be chosen.

        matcher: has accepted the last sampled token and allows the draft. It restricts all sampled tokens.
        """
        ...

    def decoded(self, sampled: Sampled) -> Sampled:
        """Records a step without a draft. sampled: waits for the token."""
        ...

    def on(self, batch: Batch, progress: Progress | None = None) -> MakeDrafts:
        """Prepares drafts for a batch's steps."""
        ...


class NoDrafts:
    """Steps without drafts."""

    must_be_read = False

    def give_back(self) -> None:
        pass

    def enqueue(self, plan: Plan) -> None:
        return None

    def decoded(self, plan: Plan, wait: Sampled) -> Sampled:
        return wait

    def push(self, job: Job, token: int) -> None:
        pass


class NoSpeculation:
    """Each step computes one token."""

    looks_ahead = True
    counted = StepCount()

    def begin(self, prompt: Sequence[int], params: SamplingParams) -> None:
        pass

    def push(self, tokens: Sequence[int]) -> None:
        pass

    def draft(self, unread: int, most: int) -> list[int]:
        return []

    def verify(self, sequence: SequenceState, draft: Sequence[int], matcher: TokenMatcher | None = None) -> Sampled:
        raise NotImplementedError

    def decoded(self, sampled: Sampled) -> Sampled:
        return sampled

    def on(self, batch: Batch, progress: Progress | None = None) -> MakeDrafts:
        return NoDrafts


NO_SPECULATION = NoSpeculation()


def speculation_with(model: Model, draft_model: Model | None, progress: Progress | None = None) -> Speculation:
    """Returns speculative decoding for `model`. draft_model: drafts; None: drafts come from prompt lookup.

    Nothing else in the engine imports `llmcl/speculation/`.
    """
    from llmcl.speculation.drafters import DraftModel, PromptLookup
    from llmcl.speculation.drafting import Drafting

    vocab_size = model.config.vocab_size
    drafter = PromptLookup() if draft_model is None else DraftModel(draft_model, vocab_size)
    return Drafting(model, drafter, progress=progress)
