"""Speculative decoding with a drafter: for one sequence, and in a batch's steps."""

from __future__ import annotations

from collections.abc import Callable

from llmcl.models.batch import Batch
from llmcl.models.model import Model
from llmcl.progress import Progress
from llmcl.speculation.alone import AloneSteps
from llmcl.speculation.batch_verification import BatchVerification
from llmcl.speculation.draft_length import DraftLength
from llmcl.speculation.drafters import Drafter
from llmcl.speculation.sequence_drafts import SequenceDrafts
from llmcl.speculation.steps import DraftedSteps
from llmcl.speculation.together import TogetherSteps


class Drafting(SequenceDrafts):
    """What `llmcl/engine/speculation.py` asks for."""

    def __init__(
        self, model: Model, drafter: Drafter, length: DraftLength | None = None, progress: Progress | None = None
    ):
        super().__init__(model, drafter, length, progress)
        self._request = drafter, length

    def on(self, batch: Batch, progress: Progress | None = None) -> Callable[[], DraftedSteps]:
        """Binds drafts for a batch's steps, while no sequence runs outside the batch."""
        drafter, length = self._request
        alone, verification = SequenceDrafts(batch.model, drafter, length, progress), None
        if drafter.another() is not None and batch.max_sequences > 1 and batch.ragged is not None:
            verification = BatchVerification(batch, batch.ragged.step, progress)

        def steps() -> DraftedSteps:
            several = None if verification is None else TogetherSteps(batch, verification, drafter, length)
            return DraftedSteps(AloneSteps(batch, alone), several)

        return steps
