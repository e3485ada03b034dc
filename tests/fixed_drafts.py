"""Speculation without a choice of how many tokens to draft."""

from __future__ import annotations

from llmcl.engine.draft_length import DraftLength


class Always(DraftLength):
    """Drafts of one length in every step, whatever they cost."""

    def __init__(self, length: int):
        super().__init__(length, watches=True)
        self.length = length

    def choose(self) -> int:
        return self.length

    def verified(self, n_draft: int, n_accepted: int, seconds: float) -> None:
        pass
