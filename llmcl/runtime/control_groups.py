"""This process's control groups, which Linux and containers use to limit resources."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def group_folders(controller: str, root: Path) -> Iterator[Path]:
    """Yields the folders with the group's limits for "cpu" or "memory", then those of the enclosing groups.

    Covers both versions of control groups; the file names in a folder tell the version.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "" or controller in controllers.split(","):
            base = root / "sys/fs/cgroup" / (controller if controllers else "")
            group = Path(path.strip("/"))
            yield from (base / part for part in dict.fromkeys([group, *group.parents, Path(".")]))
