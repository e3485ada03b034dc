"""A draft that is not verified, to see what of it would have been right."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class WatchedDraft:
    """Compares a draft with the tokens that follow.

    learn: is told the draft's tokens, and how many of them were right, once the text leaves the draft or is at its end.
    """

    def __init__(self, learn: Callable[[int, int], None]):
        self._learn = learn
        self.forget()

    def __bool__(self) -> bool:
        """Whether one is watched."""
        return bool(self._draft)

    def begin(self, draft: Sequence[int]) -> None:
        self._draft, self._n_right = draft, 0

    def forget(self) -> None:
        self.begin([])

    def push(self, token: int) -> None:
        """The text's next token."""
        if not self._draft:
            return
        is_right = token == self._draft[self._n_right]
        self._n_right += is_right
        if not is_right or self._n_right == len(self._draft):
            self._learn(len(self._draft), self._n_right)
            self.forget()
