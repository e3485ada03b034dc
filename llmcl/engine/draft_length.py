"""How many tokens to draft: by what drafts cost and earn on this device, with this text."""

from __future__ import annotations

from collections import deque
from statistics import median_low

LENGTHS = 1, 3, 7, 15
FIRST_LENGTH = 3  # of a draft that is to show what drafts cost, or whether they pay again
RECENT = 8  # steps whose time counts
MEMORY = 0.9  # weight of what was accepted, from draft to draft
FIRST_PAUSE, LONGEST_PAUSE = 16, 512  # steps
EXPECTED = 2.0  # right tokens that a draft model counts as having had before a text: it was given to be right often


class Acceptance:
    """How many drafted tokens of a text are right, of late.

    expected: tokens that count as right before there were any.
    """

    def __init__(self, expected: float = 0.0) -> None:
        self._accepted, self._rejected = expected, 0.0

    @property
    def share(self) -> float:
        """Of tokens that are right after a right one."""
        return (self._accepted + 1) / (self._accepted + self._rejected + 2)

    def learn(self, n_draft: int, n_right: int) -> None:
        """Of a draft so many tokens were what followed."""
        self._accepted = MEMORY * self._accepted + n_right
        self._rejected = MEMORY * self._rejected + (n_right < n_draft)

    def forget(self) -> None:
        """What was right before a pause says little."""
        self._accepted, self._rejected = 0.0, min(self._rejected, 1.0)


class DraftLength:
    """Chooses the length that promises the most tokens a second, and none where a step without a draft is faster.

    With a share a of tokens accepted after an accepted one, a draft of k brings (1 - a^(k+1)) / (1 - a) tokens. What a
    step takes is the median of its recent times: others may use the device as well.

    Drafts that cost nothing are `watched` where verifying them does not pay: the text shows which were right. Of others
    there are none for some steps, then one more try, and then none for twice as many.
    """

    def __init__(self, most: int, *, watches: bool):
        """most: the longest draft. watches: whether `watched` is told of drafts that are not verified."""
        self._lengths = [length for length in LENGTHS if length <= most]
        self._watches = watches
        self._step_s: deque[float] = deque(maxlen=RECENT)
        self._draft_s: dict[int, deque[float]] = {}
        self._steps = 0  # without a draft since the last one
        self.begin()

    def begin(self) -> None:
        """Another text: what steps take stays known, what is accepted does not."""
        self._acceptance = Acceptance(0.0 if self._watches else EXPECTED)
        self._pause, self._next_pause = 0, FIRST_PAUSE
        self._tries = False

    @property
    def paused(self) -> bool:
        return self._pause > 0

    def choose(self) -> int:
        """Tokens to draft for the next step; 0: none."""
        if not self._lengths or not self._step_s or self.paused:
            return 0
        if self._tries or not self._draft_s:
            return max(length for length in self._lengths if length <= FIRST_LENGTH)
        return max(self._lengths, key=self._tokens_per_s) if self._pays else 0

    def stepped(self, seconds: float) -> None:
        """A step without a draft took so long."""
        self._step_s.append(seconds)
        self._steps += 1
        if self._steps >= LONGEST_PAUSE:
            self._draft_s.clear()  # what was measured may have been a bad moment
        if self.paused:
            self._pause -= 1
            self._tries = not self.paused

    def verified(self, n_draft: int, n_accepted: int, seconds: float) -> None:
        """A draft and its step took so long, and so many of its tokens were accepted."""
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
        """Of a draft that was not verified so many tokens were what followed."""
        self._acceptance.learn(n_draft, n_right)

    @property
    def _pays(self) -> bool:
        return max(map(self._tokens_per_s, self._lengths)) * median_low(self._step_s) > 1

    def _tokens_per_s(self, length: int) -> float:
        share = self._acceptance.share
        return (1 - share ** (length + 1)) / (1 - share) / self._seconds(length)

    def _seconds(self, length: int) -> float:
        """Of a step that verifies so many; where none was, of the longest that was shorter, or the shortest."""
        known = sorted(self._draft_s)
        shorter = [other for other in known if other <= length]
        return median_low(self._draft_s[shorter[-1] if shorter else known[0]])


class FixedLength(DraftLength):
    """Drafts of one length in every step, whatever they cost."""

    def __init__(self, length: int):
        super().__init__(length, watches=True)
        self.length = length

    def choose(self) -> int:
        return self.length

    def verified(self, n_draft: int, n_accepted: int, seconds: float) -> None:
        pass
