"""Child processes that compile programs in parallel into the disk cache, from where the parent loads them.

Drivers compile one program at a time per process: threads gain little with NVIDIA's driver and nothing with Intel's.

All children share one pipe as standard input. A job is four bytes; any free process reads the next job, the parent
included. A child logs each begin and end to a file. A second pipe may hold later jobs that the parent does not wait
for; only children read it, at low priority. Unfinished later jobs are dropped when the parent ends, and the children
end with it.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any
from weakref import WeakSet

from llmcl.errors import UsageError, shown
from llmcl.runtime import child_process
from llmcl.runtime.cores import usable_cores
from llmcl.runtime.host_memory import host_available_bytes
from llmcl.runtime.platforms import DeviceEntry

JOBS = "LLMCL_COMPILE_JOBS"  # the most compiling processes, this one included
MAX_PROCESSES = 16
HOST_BYTES = 1 << 30  # upper bound for a child's interpreter, driver and compiler
DEVICE_BYTES = 4 << 30  # free device memory per child; a child's context takes up to half a GiB
FEW_PROGRAMS = 2  # compiled in this process before a child would have started
POLL_S = 0.01
HAS_LATER = os.name == "posix"  # whether a child can inherit a second pipe

_JOB_BYTES = 4
BEGIN, DONE, FAILED = "begin", "done", "failed"

Key = tuple[str, str, str]
"""File, build constants and prelude of a program: see `KernelSource.program`."""


def n_children(entry: DeviceEntry, n_programs: int, n_later: int = 0, taken_bytes: int = 0) -> int:
    """Returns how many child processes to start. Raises UsageError if the variable is not a number.

    n_later: programs that this process does not wait for. taken_bytes: device memory in use.
    """
    text = os.environ.get(JOBS, "")
    if text and not (text.isascii() and text.isdigit() and int(text) > 0):
        raise UsageError(f"{JOBS} is {shown(text)}; expected a whole number, 1 or more")
    if n_programs <= FEW_PROGRAMS and not n_later:
        return 0
    most = int(text) if text else min(MAX_PROCESSES, usable_cores())
    free = host_available_bytes()
    limits = [most - 1, max(n_programs - 1, 0) + n_later]
    if free is not None:
        limits.append(free // HOST_BYTES)
    if not entry.unified_memory:
        limits.append((entry.global_mem_bytes - taken_bytes) // DEVICE_BYTES)
    return max(0, min(limits))


class Compilers:
    """The child processes, until `close` ends them. Jobs are indices into `keys`: programs wanted now, followed by
    `later`.

    Raises OSError if no process can be started.
    """

    def __init__(self, entry: DeviceEntry, now: Sequence[Key], n: int, later: Sequence[Key] = ()):
        self.keys = (*now, *later)
        self._children: list[tuple[subprocess.Popen[Any], Path]] = []
        self._stack = ExitStack()
        self._queues: list[int] = []
        try:
            self._queues.append(_queue(0, len(now)))
            self._queues.append(_queue(len(now), len(self.keys)))
            self._place = self._stack.enter_context(child_process.empty_folder())
            folder = Path(self._place["cwd"])
            (folder / "programs").write_text(json.dumps(self.keys), encoding="utf-8")
            arguments = [str(entry.index), entry.label, str(folder / "programs")]
            for i in range(n):
                self._start(folder / f"log{i}", arguments)
        except BaseException:
            self.close()
            raise
        _running.add(self)

    def _start(self, log: Path, arguments: Sequence[str]) -> None:
        now, later = self._queues
        how: dict[str, Any] = {**self._place, **({"pass_fds": [later]} if HAS_LATER else {})}
        command = child_process.command("llmcl.runtime.compile_child", *arguments, *([str(later)] if HAS_LATER else []))
        with open(log, "wb") as output:
            child = subprocess.Popen(command, stdin=now, stdout=output, stderr=subprocess.DEVNULL, **how)
        self._children.append((child, log))

    def __enter__(self) -> Compilers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def take(self) -> int | None:
        """Takes the next job wanted now, to be compiled by the caller. None if all are taken."""
        return read_job(self._queues[0])

    def done(self) -> set[int]:
        """Returns the jobs whose programs are on disk."""
        return self._jobs(DONE)

    def ended(self) -> set[int]:
        """Returns the jobs that children finished or failed."""
        return self._jobs(DONE, FAILED)

    def _jobs(self, *words: str) -> set[int]:
        return {job for _, log in self._children for word, job in _entries(log) if word in words}

    def seconds(self) -> dict[int, str]:
        """Returns the seconds that each job on disk took in its child, as text."""
        lines = [line.split() for _, log in self._children for line in _lines(log)]
        return {int(words[1]): words[2] for words in lines if words[0] == DONE}

    def under_way(self) -> set[int]:
        """Returns the jobs that children are compiling."""
        jobs = set()
        for child, log in self._children:
            running = child.poll() is None  # checked before the log is read
            entries = _entries(log)
            if running and entries and entries[-1][0] == BEGIN:
                jobs.add(entries[-1][1])
        return jobs

    @property
    def is_running(self) -> bool:
        """Whether any child is still running."""
        return any(child.poll() is None for child, _ in self._children)

    def close(self) -> None:
        """Kills the children at once. Programs being compiled are lost."""
        _running.discard(self)
        for child, _ in self._children:
            child.kill()
        for child, _ in self._children:
            child.wait()
        self._children.clear()
        for queue in self._queues:
            os.close(queue)
        self._queues.clear()
        self._stack.close()


_running: WeakSet[Compilers] = WeakSet()


@atexit.register
def _close_all() -> None:
    for each in list(_running):
        each.close()


def _queue(first: int, end: int) -> int:
    """Creates a pipe filled with job numbers, for several readers."""
    queue, write = os.pipe()
    with open(write, "wb") as file:
        file.write(b"".join(job.to_bytes(_JOB_BYTES, "little") for job in range(first, end)))
    return queue


def read_job(queue: int) -> int | None:
    taken = os.read(queue, _JOB_BYTES)
    return int.from_bytes(taken, "little") if len(taken) == _JOB_BYTES else None


def _lines(log: Path) -> list[str]:
    try:
        return log.read_text(encoding="ascii").split("\n")[:-1]  # the last line is incomplete
    except FileNotFoundError:  # at interpreter exit the folder may already be gone
        return []


def _entries(log: Path) -> list[tuple[str, int]]:
    return [(words[0], int(words[1])) for words in map(str.split, _lines(log))]
