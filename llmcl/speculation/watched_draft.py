"""Tracks an unverified draft to see which tokens would have been right."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class WatchedDraft:
    """Compares a draft with the tokens that follow.

    learn: receives the draft length and the number of right tokens, once the text leaves the draft or the draft ends.
    """

    def __init__(self, learn: Callable[[int, int], None]):
        self._learn = learn
        self.forget()

    def __bool__(self) -> bool:
        """Returns whether a draft is being watched."""
        return bool(self._draft)

    def begin(self, draft: Sequence[int]) -> None:
        self._draft, self._n_right = draft, 0

    def forget(self) -> None:
        self.begin([])

    def push(self, token: int) -> None:
        """Compares the text's next token with the draft."""
        if not self._draft:
            return
        is_right = token == self._draft[self._n_right]
        self._n_right += is_right
        if not is_right or self._n_right == len(self._draft):
            self._learn(len(self._draft), self._n_right)
            self.forget()
