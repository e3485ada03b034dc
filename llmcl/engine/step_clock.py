"""How long steps take on a device that may run ahead of the host."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class StepClock:
    """Times steps in the order in which they are read."""

    def __init__(self) -> None:
        self._read_s = 0.0

    def timed(self, wait: Callable[[], T], started_s: float, record: Callable[[T, float], None]) -> Callable[[], T]:
        """`wait`, which tells `record` what it found and the seconds of the step. started_s: when it was enqueued."""

        def waited() -> T:
            found = wait()
            now_s = time.perf_counter()
            # A device that runs ahead begins when the step before has ended.
            record(found, now_s - max(started_s, self._read_s))
            self._read_s = now_s
            return found

        return waited
