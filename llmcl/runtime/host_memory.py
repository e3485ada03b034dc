"""How much host memory and address space this process may use."""

from __future__ import annotations

import re
from pathlib import Path

from llmcl.runtime.control_groups import group_folders

LEAST_ADDRESS_SPACE = 1 << 30  # with less PoCL ends the process when asked for its devices, and no model runs
_AMPLE_ADDRESS_SPACE = 4 << 30  # more than any driver maps before the first device is opened
# Control group files with limit and usage, for version 2 and version 1.
_FILES = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")


def host_available_bytes(root: Path = Path("/")) -> int | None:
    """Returns the bytes of host memory available without swapping, within the limits of this process's control groups.
    None if the system does not tell; Linux does.
    """
    try:
        meminfo = (root / "proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return None
    match = re.search(r"^MemAvailable:\s*(\d+) kB", meminfo, re.MULTILINE)
    free = [int(match[1]) * 1024] if match else []
    for folder in group_folders("memory", root):
        for limit_file, usage_file in _FILES:
            try:
                left = int((folder / limit_file).read_text()) - int((folder / usage_file).read_text())
                statistics = (folder / "memory.stat").read_text()
            except (OSError, ValueError):  # no such group, or "max": no limit
                continue
            cached = re.search(r"^(?:total_)?inactive_file (\d+)", statistics, re.MULTILINE)
            free.append(max(left + (int(cached[1]) if cached else 0), 0))  # cached file pages can be reclaimed
    return min(free, default=None)


def scarce_address_space() -> int | None:
    """Returns this process's address space limit in bytes if drivers may fail for lack of it, otherwise None."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return limit if limit != resource.RLIM_INFINITY and limit < _AMPLE_ADDRESS_SPACE else None


def scarcity() -> str | None:
    """Explains why a driver may have failed for lack of address space. None if there is enough."""
    if (limit := scarce_address_space()) is None:
        return None
    return (
        f"this process may use {limit >> 20} MiB of address space, and OpenCL drivers need some GiB; raise it "
        "(ulimit -v unlimited)"
    )
