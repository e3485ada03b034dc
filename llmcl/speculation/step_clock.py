"""Measures step times, even if the device runs ahead."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class StepClock:
    """Times steps in reading order."""

    def __init__(self) -> None:
        self._read_s = 0.0

    def timed(self, wait: Callable[[], T], started_s: float, record: Callable[[T, float], None]) -> Callable[[], T]:
        """Wraps `wait` and passes result and step seconds to `record`. started_s: when the step was enqueued."""

        def waited() -> T:
            result = wait()
            now_s = time.perf_counter()
            # A device that runs ahead begins a step when the previous step has ended.
            record(result, now_s - max(started_s, self._read_s))
            self._read_s = now_s
            return result

        return waited
