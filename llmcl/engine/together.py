"""Speculative decoding in an engine, of several texts in one step.

A text then has the token that it sampled last as a row, and its draft as rows behind it. There are no drafts in a step
that reads a prompt, or that extends an answer which wants log-probabilities, has a bias or matches a grammar. As with a
text that is alone (alone.py), a step that verifies drafts is read before the next one is planned.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from llmcl.engine.draft_length import FIRST_LENGTH, LENGTHS, Acceptance, DraftLength
from llmcl.engine.draft_shares import DraftShares
from llmcl.engine.drafters import Drafter
from llmcl.engine.scheduler import Job, Plan
from llmcl.engine.step_clock import StepClock
from llmcl.engine.watched_draft import WatchedDraft
from llmcl.models.paged_kv_cache import PagedKVCache
from llmcl.models.sequence import SequenceState

T = TypeVar("T")


class VerifiesDrafts(Protocol):
    """What of a batch is needed here."""

    @property
    def cache(self) -> PagedKVCache: ...
    @property
    def max_draft_rows(self) -> int: ...
    def verify_drafts(self, drafts: Sequence[tuple[SequenceState, Sequence[int]]]) -> Callable[[], list[list[int]]]: ...


class DraftedText:
    """What one text's drafts come from, and how many of their tokens were right."""

    def __init__(self, job: Job, drafter: Drafter):
        self._drafter = drafter
        self.acceptance = Acceptance()
        self._watched = WatchedDraft(self.acceptance.learn)
        drafter.begin(job.prompt, job.params)
        for token in job.sampled:
            drafter.push(token)
        self._n_pushed = len(job.sampled)

    def catch_up(self, job: Job) -> None:
        """Takes note of the tokens that were read since."""
        for token in job.sampled[self._n_pushed :]:
            self._drafter.push(token)
            self._watched.push(token)
        self._n_pushed = len(job.sampled)

    def draft(self, unread: int, most: int) -> list[int]:
        return self._drafter.draft(unread, most) if most > 0 else []

    def verified(self, n_draft: int, n_accepted: int) -> None:
        self._watched.forget()
        self.acceptance.learn(n_draft, n_accepted)

    def watch(self) -> None:
        """Drafts without verifying, to see what would have been right."""
        if not self._watched:
            self._watched.begin(self._drafter.draft(0, FIRST_LENGTH))


class TogetherSteps:
    """The steps of several texts without prompts. drafter: of which each text gets another one; None: nothing is
    drafted. length: how many tokens to draft; None: what steps take and bring decides.
    """

    def __init__(self, batch: VerifiesDrafts, drafter: Drafter | None, length: DraftLength | None = None):
        self._batch = batch
        self._drafter = drafter
        self._length = length
        self._shares = None if drafter is None or not batch.max_draft_rows else DraftShares(batch.max_draft_rows)
        self._texts: dict[Job, DraftedText] = {}
        self._under_way: list[Job] = []  # jobs whose drafts the step enqueued last verifies
        self._clock = StepClock()

    @property
    def must_be_read(self) -> bool:
        """Whether the step under way is to be read before the next one is planned."""
        return bool(self._under_way)

    def give_back(self) -> None:
        """Gives the pages back that rejected rows had: before a step is planned."""
        cache = self._batch.cache
        for job in self._under_way:
            if (sequence := job.sequence) is not None and len(sequence.pages) > cache.pages_for(sequence.position):
                cache.truncate(sequence, sequence.position)
        self._under_way = []

    def enqueue(self, plan: Plan) -> tuple[list[int], Callable[[], list[list[int]]]] | None:
        """The step of a plan, if drafts pay: the rows of each text, and what waits for its tokens."""
        drafts = self._drafts(plan)
        if not any(drafts):
            return None
        started_s = time.perf_counter()
        texts = [self._texts[job] for job in plan.decode]
        sequences = [job.sequence for job in plan.decode if job.sequence is not None]
        wait = self._batch.verify_drafts([*zip(sequences, drafts, strict=True)])
        self._under_way = [job for job, draft in zip(plan.decode, drafts, strict=True) if draft]
        n_rows = [1 + len(draft) for draft in drafts]

        def record(tokens: list[list[int]], seconds: float) -> None:
            assert self._shares is not None
            self._shares.verified(sum(n_rows), seconds)
            for text, rows, of_text in zip(texts, n_rows, tokens, strict=True):
                if rows > 1:
                    text.verified(rows - 1, len(of_text) - 1)

        return n_rows, self._clock.timed(wait, started_s, record)

    def decoded(self, plan: Plan, wait: Callable[[], T]) -> Callable[[], T]:
        """Hears of a step without drafts; wait: for what it sampled."""
        shares, n = self._shares, len(plan.decode)
        if shares is None or plan.prefill or n < 2:
            return wait
        return self._clock.timed(wait, time.perf_counter(), lambda _, seconds: shares.stepped(n, seconds))

    def _drafts(self, plan: Plan) -> list[list[int]]:
        jobs = plan.decode
        if self._shares is None or len(jobs) < 2:
            return []
        self._texts = {job: text for job, text in self._texts.items() if not job.done}
        if plan.prefill or any(_has_more(job) for job in jobs):
            return []
        for job in jobs:
            if job not in self._texts:
                drafter = self._drafter.another() if self._drafter is not None else None
                assert drafter is not None
                self._texts[job] = DraftedText(job, drafter)
            self._texts[job].catch_up(job)
        texts = [self._texts[job] for job in jobs]
        found = [
            text.draft(job.n_enqueued - 1 - len(job.sampled), min(LENGTHS[-1], job.max_tokens - job.n_enqueued))
            for job, text in zip(jobs, texts, strict=True)
        ]
        if self._length is None:
            shares = [text.acceptance.share for text in texts]
            lengths = self._shares.choose(shares, [len(draft) for draft in found])
        else:
            lengths = [self._length.choose()] * len(jobs)
        drafts = self._that_fit(jobs, [draft[:length] for draft, length in zip(found, lengths, strict=True)])
        for job, text, draft in zip(jobs, texts, drafts, strict=True):
            if not draft and job.n_enqueued - 1 == len(job.sampled):
                text.watch()
        return drafts

    def _that_fit(self, jobs: Sequence[Job], drafts: list[list[int]]) -> list[list[int]]:
        """Cuts drafts so that there are rows and free pages for all."""
        cache = self._batch.cache
        sequences = [job.sequence for job in jobs if job.sequence is not None]
        rows = self._batch.max_draft_rows - len(jobs)
        free = cache.n_free - sum(cache.missing_pages(sequence, 1) for sequence in sequences)
        for i, sequence in enumerate(sequences):
            draft = drafts[i][: max(0, rows)]
            plain = cache.missing_pages(sequence, 1)
            while draft and cache.missing_pages(sequence, 1 + len(draft)) - plain > free:
                draft.pop()
            rows -= len(draft)
            free -= cache.missing_pages(sequence, 1 + len(draft)) - plain
            drafts[i] = draft
        return drafts


def _has_more(job: Job) -> bool:
    """What a step that verifies drafts of several texts has not."""
    return job.matcher is not None or job.params.logprobs is not None or bool(job.params.logit_bias)
