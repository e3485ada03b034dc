"""Speculative decoding in an engine for a step with one sequence. For several sequences see together.py.

A step that verifies a draft reveals only when read how far the sequence advanced. Therefore such a step is read before
the next one is planned. The same applies to every step while the drafter needs the latest token. The drafter is rebuilt
when another sequence runs alone.
"""

from __future__ import annotations

from collections.abc import Callable

from llmcl.models.batch import Batch
from llmcl.models.sequence import SequenceState
from llmcl.speculation.planned import PlannedJob, PlannedStep
from llmcl.speculation.sequence_drafts import SequenceDrafts


class AloneSteps:
    """Runs steps with a single sequence."""

    def __init__(self, batch: Batch, drafts: SequenceDrafts):
        self._batch = batch
        self._drafts = drafts
        self._job: PlannedJob | None = None  # the job whose text the drafter holds
        self._drafted = False  # whether the last enqueued step verifies a draft

    @property
    def must_be_read(self) -> bool:
        """Returns whether the running step must be read before the next one is planned."""
        return self._job is not None and (self._drafted or not self._drafts.looks_ahead)

    def give_back(self) -> None:
        """Frees pages that only rejected rows used. Called before a step is planned."""
        if self._job is not None and (sequence := self._job.sequence) is not None:
            cache = self._batch.cache
            if len(sequence.pages) > cache.pages_for(sequence.position):
                cache.truncate(sequence, sequence.position)

    def enqueue(self, plan: PlannedStep) -> tuple[list[int], Callable[[], list[list[int]]]] | None:
        """Enqueues the step if the plan has exactly one sequence. Returns its rows, 0 without a draft, and a function
        that waits for the tokens. None: the caller enqueues the step.
        """
        job = self._alone_in(plan)
        self._drafted = False
        if job is None or job.sequence is None:
            self._job = None
            return None
        drafts, sequence = self._drafts, job.sequence
        if job is not self._job:
            drafts.begin(job.prompt, job.params)
            drafts.push(job.sampled)
            self._job = job
        unread = job.n_enqueued - 1 - len(job.sampled)
        draft = drafts.draft(unread, self._most(job, sequence))
        self._drafted = bool(draft)
        if not draft:
            wait = drafts.decoded(self._batch.step([sequence], []))
            return [0], lambda: [wait()]

        def enqueue() -> Callable[[], list[list[int]]]:
            tokens = drafts.verify(sequence, draft, checked=False)
            return lambda: [tokens()]

        return [1 + len(draft)], self._batch.verify([(sequence, 1 + len(draft))], enqueue)

    def push(self, job: PlannedJob, token: int) -> None:
        """Tells the drafter about a token that was read."""
        if job is self._job:
            self._drafts.push([token])

    def _alone_in(self, plan: PlannedStep) -> PlannedJob | None:
        if plan.prefill or len(plan.decode) != 1:
            return None
        job = plan.decode[0]
        return job if job.drafts else None

    def _most(self, job: PlannedJob, sequence: SequenceState) -> int:
        """Returns the draft length limit, given the answer's remaining tokens and the free pages."""
        cache = self._batch.cache
        most = min(job.max_tokens - job.n_enqueued, cache.frequencies_end(sequence) - sequence.position - 1)
        while most > 0 and cache.missing_pages(sequence, 1 + most) > cache.n_free:
            most -= 1
        return max(0, most)
