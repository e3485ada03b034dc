"""Per-device data: tuned kernel constants, and kernels excluded for wrong results.

The cache folder has one JSON file per device, driver and llmcl version, so an updated driver or changed kernels start
afresh. The file is read once per run; `llmcl tune` and `llmcl doctor` write it.
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmcl import __version__
from llmcl.runtime.cache_files import cache_dir, read_cached, write_cached
from llmcl.runtime.platforms import DeviceEntry
from llmcl.runtime.processor import processor

MAX_BYTES = 1 << 20  # largest file
MAX_CONSTANT = 1024


class DeviceCache:
    """The tuned constants and excluded kernels of one device.

    tuned: purpose (ops/attention.py, kernels/common/linear.py) -> constants. excluded: kernel and dtype -> reason.
    """

    def __init__(self, entry: DeviceEntry):
        identity = {
            "device": entry.name,
            "driver": entry.driver_version,
            "llmcl": __version__,
            "platform": f"{entry.platform_name}, {entry.platform_version}",
            "processor": hashlib.sha256(processor().encode()).hexdigest()[:12] if entry.kind == "cpu" else "",
        }
        name = re.sub(r"[^a-z0-9]+", "-", entry.name.lower()).strip("-")
        digest = hashlib.sha256("\0".join(identity.values()).encode()).hexdigest()[:12]
        self._identity = identity
        self.path: Path = cache_dir() / "devices" / f"{name}-{digest}.json"
        self.tuned: dict[str, dict[str, int]] = {}
        self.excluded: dict[str, str] = {}
        self._read()

    def store_tuned(self, tuned: Mapping[str, Mapping[str, int]]) -> None:
        """Stores constants by key for later runs. Raises OSError if the cache folder is not writable."""
        self._read()
        self.tuned |= {key: dict(constants) for key, constants in tuned.items()}
        self._write()

    def store_excluded(self, excluded: Mapping[str, str]) -> None:
        """Replaces the excluded kernels. Raises OSError if the cache folder is not writable."""
        self._read()
        self.excluded = dict(excluded)
        self._write()

    def _read(self) -> None:
        text = read_cached(self.path, MAX_BYTES)
        if text is None:
            return
        try:
            stored = json.loads(text)
            excluded = {str(key): str(reason) for key, reason in stored["excluded"].items()}
            self.tuned, self.excluded = _tuned(stored["tuned"]), excluded
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            warnings.warn(
                f"{self.path} is damaged ({type(error).__name__}: {error}) and is ignored; "
                "`llmcl tune` and `llmcl doctor` write it anew",
                stacklevel=2,
            )

    def _write(self) -> None:
        content = {**self._identity, "tuned": self.tuned, "excluded": self.excluded}
        write_cached(self.path, (json.dumps(content, indent=2, sort_keys=True) + "\n").encode())


def _tuned(value: Any) -> dict[str, dict[str, int]]:
    return {str(key): {str(name): _whole(name, number) for name, number in row.items()} for key, row in value.items()}


def _whole(name: str, number: Any) -> int:
    if type(number) is not int or not 0 <= number <= MAX_CONSTANT:
        raise ValueError(f"{name} is {str(number)[:20]}, expected a whole number, 0 to {MAX_CONSTANT}")
    return number
