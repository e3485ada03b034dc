"""The parts of the engine's plans that drafts depend on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from llmcl.models.sequence import SequenceState
from llmcl.ops.sample import SamplingParams


class DraftMatcher(Protocol):
    """Decides which tokens may come next in an answer."""

    def masks_along(self, draft: Sequence[int]) -> Sequence[np.ndarray]:
        """Returns the masks before each draft token and after the last."""
        ...


class PlannedJob(Protocol):
    """A prompt and its answer so far."""

    @property
    def prompt(self) -> Sequence[int]: ...
    @property
    def params(self) -> SamplingParams: ...
    @property
    def max_tokens(self) -> int: ...
    @property
    def sampled(self) -> Sequence[int]: ...  # ids known to the host
    @property
    def n_enqueued(self) -> int: ...  # tokens whose sampling was enqueued
    @property
    def sequence(self) -> SequenceState | None: ...
    @property
    def drafts(self) -> bool: ...  # whether a step may verify a draft
    @property
    def done(self) -> bool: ...


class PlannedStep(Protocol):
    """A step: jobs that decode, and prompt chunks."""

    @property
    def decode(self) -> Sequence[PlannedJob]: ...
    @property
    def prefill(self) -> Sequence[object]: ...
