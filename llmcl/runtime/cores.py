"""Counts the processor cores that this process may use, given affinity and control groups."""

from __future__ import annotations

import os
import time
from functools import lru_cache
from pathlib import Path

from llmcl.runtime.control_groups import group_folders


def usable_cores(root: Path = Path("/")) -> int:
    """Returns the core count, at least 1. A quota of 1.5 cores counts as 1: more threads do not always run at once."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in group_folders("cpu", root):
        quota = _quota(folder)
        if quota is not None:
            cores = min(cores, max(1, int(quota)))
    return cores


def cores_now() -> int:
    """Returns `usable_cores()`, at most a second old. Cheap enough to call every step; the count may change."""
    return _cores_in(int(time.monotonic()))


@lru_cache(maxsize=1)
def _cores_in(second: int) -> int:
    return usable_cores()


def _quota(folder: Path) -> float | None:
    """Returns a group's quota in cores, None without a limit."""
    try:
        if (folder / "cpu.max").exists():
            limit, period = (folder / "cpu.max").read_text().split()
        else:
            limit = (folder / "cpu.cfs_quota_us").read_text()
            period = (folder / "cpu.cfs_period_us").read_text()
        return int(limit) / int(period) if int(limit) > 0 else None
    except (OSError, ValueError, ZeroDivisionError):  # no such group, or "max"
        return None
