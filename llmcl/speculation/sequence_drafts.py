"""Speculative decoding for one sequence: a drafter guesses tokens, and the model verifies several in one step if it
pays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from llmcl.errors import DeviceError
from llmcl.models.model import Model
from llmcl.models.no_token import why_no_token
from llmcl.models.sequence import SequenceState, StepCount
from llmcl.ops.sample import SamplingParams
from llmcl.progress import Progress
from llmcl.speculation.draft_length import FIRST_LENGTH, DraftLength
from llmcl.speculation.drafters import Drafter
from llmcl.speculation.planned import DraftMatcher
from llmcl.speculation.step_clock import StepClock
from llmcl.speculation.verification import Verification
from llmcl.speculation.watched_draft import WatchedDraft

Sampled = Callable[[], list[int]]
"""Waits for the tokens that a step sampled."""


class SequenceDrafts:
    """Drafts for one sequence: the drafter guesses, the model verifies.

    length: how many tokens to draft. None: decided from measured costs and gains.
    """

    def __init__(
        self, model: Model, drafter: Drafter, length: DraftLength | None = None, progress: Progress | None = None
    ):
        self._drafter = drafter
        self._verification = Verification(model, progress)
        self._length = length or DraftLength(self._verification.max_draft, watches=drafter.is_free)
        self._watched = WatchedDraft(self._length.watched)
        self._clock = StepClock()
        self._started_s = 0.0

    @property
    def counted(self) -> StepCount:
        return self._verification.counted

    @property
    def looks_ahead(self) -> bool:
        return self._drafter.is_free or self._length.paused

    def begin(self, prompt: Sequence[int], params: SamplingParams) -> None:
        self._drafter.begin(prompt, params)
        self._verification.configure(params)
        self._length.begin()
        self._watched.forget()

    def push(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._drafter.push(token)
            self._watched.push(token)

    def draft(self, unread: int, most: int) -> list[int]:
        chosen = self._length.choose()
        length = min(most, chosen)
        if length > 0:
            self._drafter.catch_up()
        self._started_s = time.perf_counter()
        draft = self._drafter.draft(unread, length) if length > 0 else []
        if draft or not self._drafter.is_free:
            self._watched.forget()
        elif chosen == 0 and not self._watched:
            self._watched.begin(self._drafter.draft(0, FIRST_LENGTH))
        return draft

    def verify(
        self,
        sequence: SequenceState,
        draft: Sequence[int],
        matcher: DraftMatcher | None = None,
        *,
        checked: bool = True,
    ) -> Sampled:
        verification, n_draft = self._verification, len(draft)
        masks = None if matcher is None else lambda: matcher.masks_along(draft)
        wait = self._clock.timed(
            verification.verify(sequence, draft, masks),
            self._started_s,
            lambda tokens, seconds: self._length.verified(n_draft, len(tokens) - 1, seconds),
        )

        def sampled() -> list[int]:
            tokens = wait()
            if checked and not all(0 <= token < verification.model.config.vocab_size for token in tokens):
                logits = verification.logits(len(tokens) - 1)
                raise DeviceError(why_no_token(verification.model, sequence, logits))
            return tokens

        return sampled

    def decoded(self, sampled: Sampled) -> Sampled:
        return self._clock.timed(sampled, self._started_s, lambda _, seconds: self._length.stepped(seconds))
