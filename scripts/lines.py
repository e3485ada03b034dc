#!/usr/bin/env python
"""Prints lines of Python and OpenCL C by room, and with --since how many a room gained since a commit."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections import Counter
from pathlib import PurePosixPath

LANGUAGES = {".py": "Python", ".cl": "OpenCL C"}
Counts = Counter[tuple[str, str]]  # lines by room and language


def room_of(path: PurePosixPath) -> str:
    """Returns a folder of llmcl, such as llmcl/engine, or another folder at the top."""
    folders = path.parts[:-1]
    return "/".join(folders[: 2 if folders[:1] == ("llmcl",) else 1]) or "."


def count(commit: str | None = None) -> Counts:
    """Counts lines in a commit, or in the working tree's files that git does not ignore."""
    where = ["--untracked", "-e", ""] if commit is None else ["-e", "", commit]
    files = [f":(top)*{suffix}" for suffix in LANGUAGES]
    # The empty pattern matches each line. The exit code is 1 if there is no such file.
    command = ["git", "grep", "--full-name", "-I", "-z", "-c", *where, "--", *files]
    run = subprocess.run(command, capture_output=True, text=True, encoding="utf-8")
    if run.returncode > 1:
        sys.exit(f"lines: git cannot count lines: {run.stderr.strip()}")
    counts: Counts = Counter()
    for line in run.stdout.splitlines():
        name, _, number = line.partition("\0")
        path = PurePosixPath(name if commit is None else name.removeprefix(f"{commit}:"))
        counts[room_of(path), LANGUAGES[path.suffix]] += int(number)
    return counts


def table(now: Counts, before: Counts | None = None) -> list[str]:
    """Returns a row per room and one for the sum of llmcl, with the change in brackets where there is one."""
    rows = [["", *LANGUAGES.values()]]

    def cells(room: str, in_room: tuple[str, ...]) -> list[str]:
        row = [room]
        for language in LANGUAGES.values():
            lines = sum(now[name, language] for name in in_room)
            change = 0 if before is None else lines - sum(before[name, language] for name in in_room)
            row.append(f"{lines}" + (f" ({change:+d})" if change else ""))
        return row

    rooms = sorted({room for room, _ in [*now, *(before or ())]})
    llmcl = tuple(room for room in rooms if room.split("/")[0] == "llmcl")
    rows += [cells(room, (room,)) for room in rooms]
    rows.append(cells("llmcl in all", llmcl))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(prog="lines", description=__doc__)
    parser.add_argument("--since", metavar="COMMIT", help="print the change since this commit as well, such as HEAD^")
    commit = parser.parse_args().since
    print("\n".join(table(count(), None if commit is None else count(commit))))


if __name__ == "__main__":
    main()
