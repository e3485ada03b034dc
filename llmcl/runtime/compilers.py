"""Child processes that compile programs side by side into the cache on disk, from where their parent loads them.

Drivers compile one program at a time in a process: threads gain little with NVIDIA's and nothing with Intel's.
The children share one pipe as their standard input. Each job is four bytes there, and whoever is free reads the next
one, the parent included. A child notes what it begins and ends in a file.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from llmcl.errors import UsageError, shown
from llmcl.runtime import child_process
from llmcl.runtime.cores import usable_cores
from llmcl.runtime.host_memory import host_available_bytes
from llmcl.runtime.platforms import DeviceEntry

JOBS = "LLMCL_COMPILE_JOBS"  # the most processes that compile at once, this one included
MAX_PROCESSES = 16
HOST_BYTES = 1 << 30  # a child's interpreter, driver and compiler, at most
DEVICE_BYTES = 4 << 30  # device memory for which there may be one child, whose context takes up to half a GiB
FEW_PROGRAMS = 2  # are compiled here before a child has started
POLL_S = 0.01

_JOB_BYTES = 4
BEGIN, DONE, FAILED = "begin", "done", "failed"

Key = tuple[str, str, str]
"""File, build constants and prelude of a program: see `KernelSource.program`."""


def n_children(entry: DeviceEntry, n_programs: int) -> int:
    """How many children compile beside this process. Raises UsageError for a variable that is no number."""
    text = os.environ.get(JOBS, "")
    if text and not (text.isascii() and text.isdigit() and int(text) > 0):
        raise UsageError(f"{JOBS} is {shown(text)}; expected a whole number, 1 or more")
    if n_programs <= FEW_PROGRAMS:
        return 0
    most = int(text) if text else min(MAX_PROCESSES, usable_cores())
    free = host_available_bytes()
    limits = [most - 1, n_programs - 1]
    if free is not None:
        limits.append(free // HOST_BYTES)
    if not entry.unified_memory:
        limits.append(entry.global_mem_bytes // DEVICE_BYTES)
    return max(0, min(limits))


class Compilers:
    """The children, from `with` to its end, which ends them. Jobs are numbers of `keys`.

    Raises OSError where none can be started. low_priority: they leave the cores to others.
    """

    def __init__(self, entry: DeviceEntry, keys: Sequence[Key], n: int, *, low_priority: bool = False):
        self._children: list[tuple[subprocess.Popen[bytes], Path]] = []
        self._closing = ExitStack()
        self._place = self._closing.enter_context(child_process.empty_folder())
        self._queue, end = os.pipe()
        try:
            with open(end, "wb") as queue:
                queue.write(b"".join(job.to_bytes(_JOB_BYTES, "little") for job in range(len(keys))))
            folder = Path(self._place["cwd"])
            (folder / "programs").write_text(json.dumps(keys), encoding="utf-8")
            arguments = [str(entry.index), entry.label, str(folder / "programs"), str(int(low_priority))]
            for i in range(n):
                self._start(folder / f"log{i}", arguments)
        except BaseException:
            self.close()
            raise

    def _start(self, log: Path, arguments: Sequence[str]) -> None:
        with open(log, "wb") as output:
            child = subprocess.Popen(
                child_process.command("llmcl.runtime.compile_child", *arguments),
                stdin=self._queue,
                stdout=output,
                stderr=subprocess.DEVNULL,
                **self._place,
            )
        self._children.append((child, log))

    def __enter__(self) -> Compilers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def take(self) -> int | None:
        """The next job, which is then the caller's. None: all are taken."""
        return read_job(self._queue)

    def done(self) -> set[int]:
        """The jobs whose programs are on disk."""
        return {job for _, log in self._children for word, job in _entries(log) if word == DONE}

    def is_busy(self) -> bool:
        """Whether a child is compiling a job."""
        for child, log in self._children:
            running = child.poll() is None  # before the look at what it wrote
            entries = _entries(log)
            if running and entries and entries[-1][0] == BEGIN:
                return True
        return False

    @property
    def is_running(self) -> bool:
        """Whether there is a child that has not ended."""
        return any(child.poll() is None for child, _ in self._children)

    def close(self) -> None:
        """Ends the children at once. What they were compiling is not kept."""
        for child, _ in self._children:
            child.kill()
        for child, _ in self._children:
            child.wait()
        self._children.clear()
        if self._queue >= 0:
            os.close(self._queue)
            self._queue = -1
        self._closing.close()


def read_job(queue: int) -> int | None:
    taken = os.read(queue, _JOB_BYTES)
    return int.from_bytes(taken, "little") if len(taken) == _JOB_BYTES else None


def _entries(log: Path) -> list[tuple[str, int]]:
    lines = log.read_text(encoding="ascii").split("\n")[:-1]  # the last one is not complete yet
    return [(word, int(job)) for word, _, job in (line.partition(" ") for line in lines)]
