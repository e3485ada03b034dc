"""Speculative decoding in an engine for a step with one sequence. For several sequences see together.py.

A step that verifies a draft reveals only when read how far the sequence advanced. Therefore such a step is read before
the next one is planned. The same applies to every step while the drafter needs the latest token. The drafter is rebuilt
when another sequence runs alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from llmcl.engine.scheduler import Job, Plan
from llmcl.engine.speculation import NO_SPECULATION, Speculation
from llmcl.models.batch import PromptChunk
from llmcl.models.paged_kv_cache import PagedKVCache
from llmcl.models.sequence import SequenceState


class Verifies(Protocol):
    """The parts of a batch needed here."""

    @property
    def cache(self) -> PagedKVCache: ...
    def verify(
        self, sequence: SequenceState, enqueue: Callable[[SequenceState], Callable[[], list[int]]]
    ) -> Callable[[], list[int]]:
        """Runs a verification step, made by `enqueue`, with several rows for a sequence that runs alone. The returned
        function waits for the sampled tokens.
        """
        ...

    def step(self, decode: Sequence[SequenceState], chunks: Sequence[PromptChunk]) -> Callable[[], list[int]]: ...


@dataclass(frozen=True)
class AloneStep:
    """A step for one sequence."""

    n_rows: int  # rows that verify a draft; 0 without a draft
    tokens: Callable[[], list[int]]  # waits for the sampled tokens


class AloneSteps:
    """Runs steps with a single sequence."""

    def __init__(self, batch: Verifies, speculation: Speculation):
        self._batch = batch
        self._speculation = speculation
        self._job: Job | None = None  # the job whose text the drafter holds
        self._drafted = False  # whether the last enqueued step verifies a draft

    @property
    def must_be_read(self) -> bool:
        """Returns whether the running step must be read before the next one is planned."""
        return self._job is not None and (self._drafted or not self._speculation.looks_ahead)

    def give_back(self) -> None:
        """Frees pages that only rejected rows used. Called before a step is planned."""
        if self._job is not None and (sequence := self._job.sequence) is not None:
            cache = self._batch.cache
            if len(sequence.pages) > cache.pages_for(sequence.position):
                cache.truncate(sequence, sequence.position)

    def enqueue(self, plan: Plan) -> AloneStep | None:
        """Enqueues the step if the plan has exactly one sequence. None: the caller enqueues the step."""
        job = self._alone_in(plan)
        self._drafted = False
        if job is None or job.sequence is None:
            self._job = None
            return None
        speculation, sequence = self._speculation, job.sequence
        if job is not self._job:
            speculation.begin(job.prompt, job.params)
            speculation.push(job.sampled)
            self._job = job
        unread = job.n_enqueued - 1 - len(job.sampled)
        draft = speculation.draft(unread, self._most(job, sequence))
        self._drafted = bool(draft)
        if draft:
            wait = self._batch.verify(sequence, lambda own: speculation.verify(own, draft, checked=False))
            return AloneStep(1 + len(draft), wait)
        return AloneStep(0, speculation.decoded(self._batch.step([sequence], [])))

    def push(self, job: Job, token: int) -> None:
        """Tells the drafter about a token that was read."""
        if job is self._job:
            self._speculation.push([token])

    def _alone_in(self, plan: Plan) -> Job | None:
        if self._speculation is NO_SPECULATION or plan.prefill or len(plan.decode) != 1:
            return None
        job = plan.decode[0]
        return job if job.drafts else None

    def _most(self, job: Job, sequence: SequenceState) -> int:
        """Returns the draft length limit, given the answer's remaining tokens and the free pages."""
        most, cache = job.max_tokens - job.n_enqueued, self._batch.cache
        while most > 0 and cache.missing_pages(sequence, 1 + most) > cache.n_free:
            most -= 1
        return max(0, most)
