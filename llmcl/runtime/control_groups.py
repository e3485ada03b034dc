"""The control groups of this process, by which Linux and containers limit what it may use of the machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def group_folders(controller: str, root: Path) -> Iterator[Path]:
    """The folders that hold the group's limits for "cpu" or "memory", then those of the groups around it.

    Both versions of control groups are looked for; the names of the files in a folder tell which it is.
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
