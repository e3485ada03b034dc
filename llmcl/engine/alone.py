"""Speculative decoding in an engine, of a text that is alone in its step; of several: together.py.

A step that verifies a draft says only once it is read where the text goes on. So it is read before the next one is
planned, and so is each step while drafts need the latest token. The text changes hands: what the drafter knows of it is
built up anew when another text is alone.
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
    """What of a batch is needed here."""

    @property
    def cache(self) -> PagedKVCache: ...
    def verify(
        self, sequence: SequenceState, enqueue: Callable[[SequenceState], Callable[[], list[int]]]
    ) -> Callable[[], list[int]]:
        """A step that `enqueue` enqueues, of several rows of a sequence that is alone. The function returned waits for
        the tokens that were sampled.
        """
        ...

    def step(self, decode: Sequence[SequenceState], chunks: Sequence[PromptChunk]) -> Callable[[], list[int]]: ...


@dataclass(frozen=True)
class AloneStep:
    """A step of one text. n_rows: those that verify a draft; 0: it has none. tokens: waits for them."""

    n_rows: int
    tokens: Callable[[], list[int]]


class AloneSteps:
    """The steps of whoever is alone."""

    def __init__(self, batch: Verifies, speculation: Speculation):
        self._batch = batch
        self._speculation = speculation
        self._job: Job | None = None  # whose text the drafter has
        self._drafted = False  # whether the step enqueued last verifies a draft

    @property
    def must_be_read(self) -> bool:
        """Whether the step under way is to be read before the next one is planned."""
        return self._job is not None and (self._drafted or not self._speculation.looks_ahead)

    def give_back(self) -> None:
        """Gives the pages back that rejected rows had: before a step is planned."""
        if self._job is not None and (sequence := self._job.sequence) is not None:
            cache = self._batch.cache
            if len(sequence.pages) > cache.pages_for(sequence.position):
                cache.truncate(sequence, sequence.position)

    def enqueue(self, plan: Plan) -> AloneStep | None:
        """The step of a plan in which one text is alone; None: another one is to be enqueued."""
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
        """Takes note of a token that was read."""
        if job is self._job:
            self._speculation.push([token])

    def _alone_in(self, plan: Plan) -> Job | None:
        if self._speculation is NO_SPECULATION or plan.prefill or len(plan.decode) != 1:
            return None
        job = plan.decode[0]
        # A step that verifies a draft has none of these.
        has_more = job.matcher is not None or job.params.logprobs is not None or bool(job.params.logit_bias)
        return None if has_more else job

    def _most(self, job: Job, sequence: SequenceState) -> int:
        """Tokens that a draft may have: by those that the answer lacks, and by the pages that are free."""
        most, cache = job.max_tokens - job.n_enqueued, self._batch.cache
        while most > 0 and cache.missing_pages(sequence, 1 + most) > cache.n_free:
            most -= 1
        return max(0, most)
