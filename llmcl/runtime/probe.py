"""Questions about a driver that only a trial answers: asked in a child process, the answer remembered.

With the wrong instructions a driver's compiler may abort the process, or the device may fault and take its
context along.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from pathlib import Path

from llmcl.paths import cache_dir, read_cached, write_cached
from llmcl.runtime.platforms import DeviceEntry, find_devices

_TIMEOUT_S = 60.0


def remembered(
    kind: str, entry: DeviceEntry, *identity: str, answers: Container[int], answer: Callable[[], int]
) -> int:
    """`answer()`, one of `answers`, or what it was before on this device with this driver.

    kind: a folder of the cache. identity: what else the answer depends on, such as the probe's source.
    """
    parts = (entry.platform_name, entry.platform_version, entry.name, entry.driver_version, *identity)
    path = cache_dir() / kind / hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    stored = read_cached(path, most=16)
    with suppress(ValueError):
        if stored is not None and int(stored) in answers:
            return int(stored)
    found = answer()
    with suppress(OSError):  # a read-only home: probed again next time
        write_cached(path, str(found).encode())
    return found


def succeeds(module: str, entry: DeviceEntry, *arguments: str) -> bool:
    """Whether `python -m module` exits 0, given what `probed_entry` needs to find the device, and the arguments."""
    package_root = str(Path(__file__).parents[2])
    paths = [package_root, *filter(None, [os.environ.get("PYTHONPATH")])]
    try:
        result = subprocess.run(
            [sys.executable, "-m", module, str(entry.index), entry.label, *arguments],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return result.returncode == 0


def probed_entry(arguments: Sequence[str]) -> DeviceEntry | None:
    """In the child: the device that the first two arguments name."""
    index, label = arguments[:2]
    return next((entry for entry in find_devices() if entry.index == int(index) and entry.label == label), None)
