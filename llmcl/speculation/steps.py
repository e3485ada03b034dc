"""Drafts in an engine's steps: for one sequence (alone.py) or for several (together.py)."""

from __future__ import annotations

from collections.abc import Callable

from llmcl.speculation.alone import AloneSteps
from llmcl.speculation.planned import PlannedJob, PlannedStep
from llmcl.speculation.together import TogetherSteps


class DraftedSteps:
    """Runs the steps of an engine that can have drafts."""

    def __init__(self, alone: AloneSteps, together: TogetherSteps | None):
        """together: None if steps with several sequences have no drafts."""
        self._alone = alone
        self._together = together

    @property
    def must_be_read(self) -> bool:
        return self._alone.must_be_read or (self._together is not None and self._together.must_be_read)

    def give_back(self) -> None:
        self._alone.give_back()
        if self._together is not None:
            self._together.give_back()

    def enqueue(self, plan: PlannedStep) -> tuple[list[int], Callable[[], list[list[int]]]] | None:
        alone = self._alone.enqueue(plan)
        if alone is not None or self._together is None:
            return alone
        return self._together.enqueue(plan)

    def decoded(self, plan: PlannedStep, wait: Callable[[], list[int]]) -> Callable[[], list[int]]:
        return wait if self._together is None else self._together.decoded(plan, wait)

    def push(self, job: PlannedJob, token: int) -> None:
        self._alone.push(job, token)
