"""Speculative decoding in an engine for steps with several sequences.

Each sequence has its last sampled token as a row, followed by its draft as further rows. There are no drafts in a step
that reads a prompt, or that extends an answer with log-probabilities, a bias or a grammar. As for a single sequence
(alone.py), a step that verifies drafts is read before the next one is planned.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from llmcl.models.batch import Batch
from llmcl.speculation.batch_verification import BatchVerification
from llmcl.speculation.draft_length import FIRST_LENGTH, LENGTHS, Acceptance, DraftLength
from llmcl.speculation.draft_shares import DraftShares
from llmcl.speculation.drafters import Drafter
from llmcl.speculation.planned import PlannedJob, PlannedStep
from llmcl.speculation.step_clock import StepClock
from llmcl.speculation.watched_draft import WatchedDraft


class DraftedText:
    """One sequence's drafter, and its acceptance record."""

    def __init__(self, job: PlannedJob, drafter: Drafter):
        self._drafter = drafter
        self.acceptance = Acceptance()
        self._watched = WatchedDraft(self.acceptance.learn)
        drafter.begin(job.prompt, job.params)
        for token in job.sampled:
            drafter.push(token)
        self._n_pushed = len(job.sampled)

    def catch_up(self, job: PlannedJob) -> None:
        """Passes newly read tokens to the drafter."""
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
        """Makes a draft without verification, to see which tokens would have been right."""
        if not self._watched:
            self._watched.begin(self._drafter.draft(0, FIRST_LENGTH))


class TogetherSteps:
    """Runs steps for several sequences without prompts. drafter: makes another drafter for each sequence. length: how
    many tokens to draft. None: decided from measured costs and gains.
    """

    def __init__(
        self, batch: Batch, verification: BatchVerification, drafter: Drafter, length: DraftLength | None = None
    ):
        self._cache = batch.cache
        self._verification = verification
        self._drafter = drafter
        self._length = length
        self._shares = DraftShares(verification.max_rows)
        self._texts: dict[PlannedJob, DraftedText] = {}
        self._under_way: list[PlannedJob] = []  # jobs whose drafts the last enqueued step verifies
        self._clock = StepClock()

    @property
    def must_be_read(self) -> bool:
        """Returns whether the running step must be read before the next one is planned."""
        return bool(self._under_way)

    def give_back(self) -> None:
        """Frees pages that only rejected rows used. Called before a step is planned."""
        cache = self._cache
        for job in self._under_way:
            if (sequence := job.sequence) is not None and len(sequence.pages) > cache.pages_for(sequence.position):
                cache.truncate(sequence, sequence.position)
        self._under_way = []

    def enqueue(self, plan: PlannedStep) -> tuple[list[int], Callable[[], list[list[int]]]] | None:
        """Enqueues the plan's step if drafts pay. Returns the rows per sequence and a function that waits for the
        tokens.
        """
        drafts = self._drafts(plan)
        if not any(drafts):
            return None
        started_s = time.perf_counter()
        texts = [self._texts[job] for job in plan.decode]
        sequences = [job.sequence for job in plan.decode if job.sequence is not None]
        wait = self._verification.verify([*zip(sequences, drafts, strict=True)])
        self._under_way = [job for job, draft in zip(plan.decode, drafts, strict=True) if draft]
        n_rows = [1 + len(draft) for draft in drafts]

        def record(tokens: list[list[int]], seconds: float) -> None:
            self._shares.verified(sum(n_rows), seconds)
            for text, rows, of_text in zip(texts, n_rows, tokens, strict=True):
                if rows > 1:
                    text.verified(rows - 1, len(of_text) - 1)

        return n_rows, self._clock.timed(wait, started_s, record)

    def decoded(self, plan: PlannedStep, wait: Callable[[], list[int]]) -> Callable[[], list[int]]:
        """Records a step without drafts. wait: returns the sampled tokens."""
        shares, n = self._shares, len(plan.decode)
        if plan.prefill or n < 2:
            return wait
        return self._clock.timed(wait, time.perf_counter(), lambda _, seconds: shares.stepped(n, seconds))

    def _drafts(self, plan: PlannedStep) -> list[list[int]]:
        jobs = plan.decode
        if len(jobs) < 2:
            return []
        self._texts = {job: text for job, text in self._texts.items() if not job.done}
        if plan.prefill or not all(job.drafts for job in jobs):
            return []
        for job in jobs:
            if job not in self._texts:
                drafter = self._drafter.another()
                assert drafter is not None
                self._texts[job] = DraftedText(job, drafter)
            self._texts[job].catch_up(job)
        texts = [self._texts[job] for job in jobs]
        guesses = [
            text.draft(job.n_enqueued - 1 - len(job.sampled), min(LENGTHS[-1], job.max_tokens - job.n_enqueued))
            for job, text in zip(jobs, texts, strict=True)
        ]
        if self._length is None:
            shares = [text.acceptance.share for text in texts]
            lengths = self._shares.choose(shares, [len(draft) for draft in guesses])
        else:
            lengths = [self._length.choose()] * len(jobs)
        drafts = self._that_fit(jobs, [draft[:length] for draft, length in zip(guesses, lengths, strict=True)])
        for job, text, draft in zip(jobs, texts, drafts, strict=True):
            if not draft and job.n_enqueued - 1 == len(job.sampled):
                text.watch()
        return drafts

    def _that_fit(self, jobs: Sequence[PlannedJob], drafts: list[list[int]]) -> list[list[int]]:
        """Cuts drafts to the available rows and free pages."""
        cache = self._cache
        sequences = [job.sequence for job in jobs if job.sequence is not None]
        rows = self._verification.max_rows - len(jobs)
        free = cache.n_free - sum(cache.missing_pages(sequence, 1) for sequence in sequences)
        for i, sequence in enumerate(sequences):
            draft = drafts[i][: max(0, min(rows, cache.frequencies_end(sequence) - sequence.position - 1))]
            plain = cache.missing_pages(sequence, 1)
            while draft and cache.missing_pages(sequence, 1 + len(draft)) - plain > free:
                draft.pop()
            rows -= len(draft)
            free -= cache.missing_pages(sequence, 1 + len(draft)) - plain
            drafts[i] = draft
        return drafts
