"""How often the system takes cores from this process that compute, because other programs want them, too."""

from __future__ import annotations

import sys
import time

if sys.platform != "win32":
    import resource

WINDOW = 16  # steps that an average is of
# Suspended threads a core and step: above the first number they are frequent, below the second no longer.
FREQUENT, SELDOM = 0.25, 0.125
TURN_S = 0.004  # that Linux gives a thread beside others


class Preemptions:
    """Averages over the last steps of a device with `cores` cores: how long they take, how often threads are suspended
    meanwhile.
    """

    def __init__(self, cores: int):
        self._cores = cores
        self._rate = self._step_s = 0.0
        self._frequent = False
        self._count, self._time_s = _count(), time.perf_counter()

    def passed(self, n_steps: int) -> None:
        """Notes that so many steps have ended since the last call."""
        count, now_s = _count(), time.perf_counter()
        weight = min(1.0, n_steps / WINDOW)
        self._rate += weight * ((count - self._count) / (n_steps * self._cores) - self._rate)
        self._step_s += weight * ((now_s - self._time_s) / n_steps - self._step_s)
        self._count, self._time_s = count, now_s
        self._frequent = self._rate > (SELDOM if self._frequent else FREQUENT)

    @property
    def cost_turns(self) -> bool:
        """Whether a launch of several steps is worth it: a thread may lose a turn between launches, which a long step
        would not notice.
        """
        return self._frequent and self._step_s < 5 * TURN_S


def _count() -> int:
    """How often threads of this process were suspended that could have gone on; 0 where the system does not say."""
    return 0 if sys.platform == "win32" else resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
