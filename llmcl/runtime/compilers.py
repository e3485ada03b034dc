"""Child processes that compile programs side by side into the cache on disk, from where their parent loads them.

Drivers compile one program at a time in a process: threads gain little with NVIDIA's and nothing with Intel's.
The children share one pipe as their standard input. Each job is four bytes there, and whoever is free reads the next
one, the parent included. A child notes what it begins and ends in a file. Behind the jobs that the parent waits for
there may be others, in a second pipe that the children alone read, at a low priority. What is left of them when the
parent ends is left out: the children end with it.
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

JOBS = "LLMCL_COMPILE_JOBS"  # the most processes that compile at once, this one included
MAX_PROCESSES = 16
HOST_BYTES = 1 << 30  # a child's interpreter, driver and compiler, at most
DEVICE_BYTES = 4 << 30  # free device memory for which there may be one child, whose context takes up to half a GiB
FEW_PROGRAMS = 2  # are compiled here before a child has started
POLL_S = 0.01
HAS_LATER = os.name == "posix"  # whether a child can be given a second pipe

_JOB_BYTES = 4
BEGIN, DONE, FAILED = "begin", "done", "failed"

Key = tuple[str, str, str]
"""File, build constants and prelude of a program: see `KernelSource.program`."""


def n_children(entry: DeviceEntry, n_programs: int, n_later: int = 0, taken_bytes: int = 0) -> int:
    """How many children compile beside this process. Raises UsageError for a variable that is no number.

    n_later: programs that this process does not wait for. taken_bytes: memory of the device that is in use.
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
    """The children, until `close` ends them. Jobs are numbers of `keys`: programs wanted now, and then `later`.

    Raises OSError where none can be started.
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
        """The next job that is wanted now, which is then the caller's. None: all are taken."""
        return read_job(self._queues[0])

    def done(self) -> set[int]:
        """The jobs whose programs are on disk."""
        return self._jobs(DONE)

    def ended(self) -> set[int]:
        """The jobs that children did or failed at."""
        return self._jobs(DONE, FAILED)

    def _jobs(self, *words: str) -> set[int]:
        return {job for _, log in self._children for word, job in _entries(log) if word in words}

    def under_way(self) -> set[int]:
        """The jobs that children are compiling."""
        jobs = set()
        for child, log in self._children:
            running = child.poll() is None  # before the look at what it wrote
            entries = _entries(log)
            if running and entries and entries[-1][0] == BEGIN:
                jobs.add(entries[-1][1])
        return jobs

    @property
    def is_running(self) -> bool:
        """Whether there is a child that has not ended."""
        return any(child.poll() is None for child, _ in self._children)

    def close(self) -> None:
        """Ends the children at once. What they were compiling is not kept."""
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
    """A pipe with these jobs, to be read by several."""
    queue, write = os.pipe()
    with open(write, "wb") as file:
        file.write(b"".join(job.to_bytes(_JOB_BYTES, "little") for job in range(first, end)))
    return queue


def read_job(queue: int) -> int | None:
    taken = os.read(queue, _JOB_BYTES)
    return int.from_bytes(taken, "little") if len(taken) == _JOB_BYTES else None


def _entries(log: Path) -> list[tuple[str, int]]:
    try:
        lines = log.read_text(encoding="ascii").split("\n")[:-1]  # the last one is not complete yet
    except FileNotFoundError:  # as Python ends, the folder may be gone first
        return []
    return [(word, int(job)) for word, _, job in (line.partition(" ") for line in lines)]
