"""Divides a step's rows among the drafts of several sequences, by acceptance estimates and measured row costs."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from statistics import median_low

from llmcl.kernels.common.linear import FEW_ROWS
from llmcl.speculation.draft_length import FIRST_LENGTH, LONGEST_PAUSE, RECENT


class DraftShares:
    """Chooses draft lengths with the most expected tokens per second, or no drafts if plain steps are faster.

    The k-th draft token is accepted with probability a^k for a sequence with acceptance share a. A step's cost depends
    on its row count: steps up to 8, 16, 32 or 64 rows share kernels. The cost is the median of recent times. An
    unmeasured size takes the time of the next smaller size, so larger sizes get tried in turn.
    """

    def __init__(self, max_rows: int):
        """max_rows: limit of rows per step."""
        self._sizes = [size for size in FEW_ROWS if size <= max_rows] or [max_rows]
        self._plain_s: dict[int, deque[float]] = {}
        self._draft_s: dict[int, deque[float]] = {}
        self._plain = 0  # steps without drafts since the last step with drafts

    def choose(self, shares: Sequence[float], lengths: Sequence[int]) -> list[int]:
        """Returns the draft length for each sequence. shares: acceptance share after an accepted token. lengths: upper
        limits.
        """
        n, none = len(shares), [0] * len(shares)
        plain_s = self._plain_s.get(self._size(n))
        if not plain_s or not any(lengths):
            return none
        if not self._draft_s:
            return self._shared(shares, [min(length, FIRST_LENGTH) for length in lengths], self._sizes[-1] - n)
        best, most = none, n / median_low(plain_s)
        for size in self._sizes:
            chosen = self._shared(shares, lengths, size - n)
            tokens = sum((1 - share ** (k + 1)) / (1 - share) for share, k in zip(shares, chosen, strict=True))
            if any(chosen) and (rate := tokens / self._seconds(self._size(n + sum(chosen)))) > most:
                best, most = chosen, rate
        return best

    def stepped(self, n_rows: int, seconds: float) -> None:
        """Records the time of a step without drafts."""
        self._plain_s.setdefault(self._size(n_rows), deque(maxlen=RECENT)).append(seconds)
        self._plain += 1
        if self._plain >= LONGEST_PAUSE:
            self._draft_s.clear()  # the measurement may be outdated or unlucky

    def verified(self, n_rows: int, seconds: float) -> None:
        """Records the time of a step with drafts."""
        self._draft_s.setdefault(self._size(n_rows), deque(maxlen=RECENT)).append(seconds)
        self._plain = 0

    def _size(self, n_rows: int) -> int:
        return next((size for size in self._sizes if n_rows <= size), self._sizes[-1])

    def _shared(self, shares: Sequence[float], lengths: Sequence[int], rows: int) -> list[int]:
        """Distributes `rows` rows, each to the sequence whose next draft token is most likely to be accepted."""
        chosen = [0] * len(shares)
        chances = [(-share, i) for i, share in enumerate(shares) if lengths[i]]
        heapify(chances)
        for _ in range(rows):
            if not chances:
                break
            chance, i = heappop(chances)
            chosen[i] += 1
            if chosen[i] < lengths[i]:
                heappush(chances, (chance * shares[i], i))
        return chosen

    def _seconds(self, size: int) -> float:
        known = sorted(self._draft_s)
        fewer = [other for other in known if other <= size]
        return median_low(self._draft_s[fewer[-1] if fewer else known[0]])
