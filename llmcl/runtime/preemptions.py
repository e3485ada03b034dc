"""Measures how often the system preempts this process's compute threads for other programs."""

from __future__ import annotations

import sys
import time

if sys.platform != "win32":
    import resource

WINDOW = 16  # steps per average
# Preemptions per core and step: frequent above the first number, until they fall below the second.
FREQUENT, SELDOM = 0.25, 0.125
TURN_S = 0.004  # a thread's time slice in Linux under contention


class Preemptions:
    """Averages over recent steps on `cores` cores: step time, and how often threads are preempted."""

    def __init__(self, cores: int):
        self._cores = cores
        self._rate = self._step_s = 0.0
        self._frequent = False
        self._count, self._time_s = _count(), time.perf_counter()

    def passed(self, n_steps: int) -> None:
        """Records that n_steps have ended since the last call."""
        count, now_s = _count(), time.perf_counter()
        weight = min(1.0, n_steps / WINDOW)
        self._rate += weight * ((count - self._count) / (n_steps * self._cores) - self._rate)
        self._step_s += weight * ((now_s - self._time_s) / n_steps - self._step_s)
        self._count, self._time_s = count, now_s
        self._frequent = self._rate > (SELDOM if self._frequent else FREQUENT)

    @property
    def cost_turns(self) -> bool:
        """Whether launching several steps at once pays: a thread may lose a time slice between launches, which would
        not matter in a long step.
        """
        return self._frequent and self._step_s < 5 * TURN_S


def _count() -> int:
    """Returns how often runnable threads of this process were preempted; 0 if unknown."""
    return 0 if sys.platform == "win32" else resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
