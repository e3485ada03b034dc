"""Chooses how many tokens to draft, from measured costs and gains on the current device and text."""

from __future__ import annotations

from collections import deque
from statistics import median_low

LENGTHS = 1, 3, 7, 15
FIRST_LENGTH = 3  # length of trial drafts, which measure costs and test whether drafts pay again
RECENT = 8  # steps whose times are kept
MEMORY = 0.9  # decay of older acceptance counts, per draft
FIRST_PAUSE, LONGEST_PAUSE = 16, 512  # steps
EXPECTED = 2.0  # tokens assumed right before a text begins, because a draft model is usually right


class Acceptance:
    """Estimates how many draft tokens are right in a text, weighted towards recent drafts.

    expected: tokens counted as right in advance.
    """

    def __init__(self, expected: float = 0.0) -> None:
        self._accepted, self._rejected = expected, 0.0

    @property
    def share(self) -> float:
        """Returns the share of right tokens among tokens after a right token."""
        return (self._accepted + 1) / (self._accepted + self._rejected + 2)

    def learn(self, n_draft: int, n_right: int) -> None:
        """Records a draft: n_right of n_draft tokens matched the text."""
        self._accepted = MEMORY * self._accepted + n_right
        self._rejected = MEMORY * self._rejected + (n_right < n_draft)

    def forget(self) -> None:
        """Resets the estimate, because acceptance before a pause says little."""
        self._accepted, self._rejected = 0.0, min(self._rejected, 1.0)


class DraftLength:
    """Chooses the draft length with the most expected tokens per second, or 0 if steps without drafts are faster.

    With acceptance share a after an accepted token, a draft with k tokens yields (1 - a^(k+1)) / (1 - a) tokens. A
    step's cost is the median of recent times, because other programs may use the device too.

    If verification does not pay, free drafts are `watched` instead: the text shows which tokens were right. Costly
    drafts pause for some steps, then get one trial, and then pause twice as long.
    """

    def __init__(self, most: int, *, watches: bool):
        """most: maximum draft length. watches: whether `watched` is called for drafts that are not verified."""
        self._lengths = [length for length in LENGTHS if length <= most]
        self._watches = watches
        self._step_s: deque[float] = deque(maxlen=RECENT)
        self._draft_s: dict[int, deque[float]] = {}
        self._steps = 0  # steps without a draft since the last draft
        self.begin()

    def begin(self) -> None:
        """Starts another text: keeps step times, resets acceptance."""
        self._acceptance = Acceptance(0.0 if self._watches else EXPECTED)
        self._pause, self._next_pause = 0, FIRST_PAUSE
        self._tries = False

    @property
    def paused(self) -> bool:
        return self._pause > 0

    def choose(self) -> int:
        """Returns the number of tokens to draft for the next step, or 0."""
        if not self._lengths or not self._step_s or self.paused:
            return 0
        if self._tries or not self._draft_s:
            return max(length for length in self._lengths if length <= FIRST_LENGTH)
        return max(self._lengths, key=self._tokens_per_s) if self._pays else 0

    def stepped(self, seconds: float) -> None:
        """Records the time of a step without a draft."""
        self._step_s.append(seconds)
        self._steps += 1
        if self._steps >= LONGEST_PAUSE:
            self._draft_s.clear()  # the measurement may be outdated or unlucky
        if self.paused:
            self._pause -= 1
            self._tries = not self.paused

    def verified(self, n_draft: int, n_accepted: int, seconds: float) -> None:
        """Records a verified draft: its length, the accepted tokens, and the time for draft and step."""
        length = next(length for length in LENGTHS if n_draft <= length)
        self._draft_s.setdefault(length, deque(maxlen=RECENT)).append(seconds)
        self._steps = 0
        if self._tries:
            self._acceptance.forget()
            self._tries = False
        self._acceptance.learn(n_draft, n_accepted)
        if n_accepted == n_draft:
            self._next_pause = FIRST_PAUSE
        if not self._pays and not self._watches:
            self._pause = self._next_pause
            self._next_pause = min(2 * self._next_pause, LONGEST_PAUSE)

    def watched(self, n_draft: int, n_right: int) -> None:
        """Records an unverified draft: n_right of n_draft tokens matched the text."""
        self._acceptance.learn(n_draft, n_right)

    @property
    def _pays(self) -> bool:
        return max(map(self._tokens_per_s, self._lengths)) * median_low(self._step_s) > 1

    def _tokens_per_s(self, length: int) -> float:
        share = self._acceptance.share
        return (1 - share ** (length + 1)) / (1 - share) / self._seconds(length)

    def _seconds(self, length: int) -> float:
        """Returns the time of a step that verifies `length` tokens. If unknown, uses the longest shorter length, or the
        shortest known.
        """
        known = sorted(self._draft_s)
        shorter = [other for other in known if other <= length]
        return median_low(self._draft_s[shorter[-1] if shorter else known[0]])


class FixedLength(DraftLength):
    """Drafts a fixed length in every step, regardless of costs."""

    def __init__(self, length: int):
        super().__init__(length, watches=True)
        self.length = length

    def choose(self) -> int:
        return self.length

    def verified(self, n_draft: int, n_accepted: int, seconds: float) -> None:
        pass
