"""Questions about a driver that only a trial answers: asked in a child process, the answer remembered.

With the wrong instructions a driver's compiler may abort the process, or the device may fault and take its
context along.

What a child says itself is remembered for ever. A crash may also come from a lack of memory. So the question is asked a
second time, and a second crash is remembered for a day. A child that hangs may run on a busy machine, so that is
remembered for ten minutes, and so is that a child could not begin, as where a package cannot be imported. A child that
was ended from outside says nothing about the driver; nothing is remembered.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from llmcl.runtime import child_process
from llmcl.runtime.cache_files import cache_dir, read_cached, write_cached
from llmcl.runtime.platforms import DeviceEntry, find_devices
from llmcl.runtime.processor import processor

TIMEOUT_S = 60.0
A_DAY = 86400.0
YES, NO, CRASHED, HUNG, NOT_BEGUN, UNKNOWN = "yes", "no", "crashed", "hung", "not begun", "unknown"
LASTS_S: Mapping[str, float] = {
    YES: math.inf,
    NO: math.inf,
    CRASHED: A_DAY,
    HUNG: 600.0,
    NOT_BEGUN: 600.0,
    UNKNOWN: 0.0,
}

_STARTED = "the probe starts"  # printed by the child: what ended it before is not the kernel's doing
_NO_CODE, _UNKNOWN_CODE = 65, 75  # exit codes; sysexits.h calls them "data error" and "temporary failure"
_CRASHES = {"SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV", "SIGSYS", "SIGTRAP"}


@dataclass(frozen=True)
class Ending:
    """How a child process ended. verdict: YES, NO, CRASHED, HUNG, NOT_BEGUN or UNKNOWN. reason: why not YES, a line."""

    verdict: str
    reason: str = ""


def remembered(
    kind: str,
    entry: DeviceEntry,
    *identity: str,
    answer: Callable[[], tuple[str, float]],
    counts: Callable[[str], bool] = lambda stored: True,
) -> str:
    """The answer that was given before on this device with this driver and processor, or that of `answer()`.

    kind: a folder of the cache. identity: what else the answer depends on, such as the probe's source.
    answer: gives the answer and for how many seconds it is to be remembered. counts: whether an earlier one still does.
    """
    path = cache_dir() / kind / digest(entry, *identity)
    stored = _stored(path)
    if stored is not None and counts(stored):
        return stored
    found, lasts_s = answer()
    try:
        if lasts_s > 0:
            until = None if math.isinf(lasts_s) else time.time() + lasts_s
            write_cached(path, json.dumps({"answer": found, "until": until}).encode())
        else:
            path.unlink(missing_ok=True)
    except OSError:
        pass  # a read-only home: probed again next time
    return found


def is_right(kind: str, module: str, entry: DeviceEntry, *arguments: str, source: str) -> bool:
    """Whether a module's program, run by `ask` with the arguments, says YES of the device. source: of its kernels.

    kind: as for `remembered`.
    """

    def answer() -> tuple[str, float]:
        verdict = ask(module, entry, *arguments).verdict
        return verdict, LASTS_S[verdict]

    return remembered(kind, entry, *arguments, source, answer=answer) == YES


def _stored(path: Path) -> str | None:
    """The answer in a file, unless it is damaged or its time is over."""
    try:
        stored = json.loads(read_cached(path, most=4096) or b"")
        answer, until = stored["answer"], stored["until"]
        # One that lasts longer than any was written before the clock was set back.
        fresh = until is None or 0 < until - time.time() < A_DAY + 1
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return answer if fresh and isinstance(answer, str) else None


def digest(entry: DeviceEntry, *identity: str) -> str:
    """A name for what the answers of a device depend on: its driver, the processor, and `identity`."""
    parts = (entry.platform_name, entry.platform_version, entry.name, entry.driver_version, processor(), *identity)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def ask(module: str, entry: DeviceEntry, *arguments: str) -> Ending:
    """What `python -m module` says about the device; `answer_parent` is its main. A crash counts if it is repeated."""
    ending = _ask_once(module, entry, arguments)
    return _ask_once(module, entry, arguments) if ending.verdict == CRASHED else ending


def _ask_once(module: str, entry: DeviceEntry, arguments: Sequence[str]) -> Ending:
    try:
        command = child_process.command(module, str(entry.index), entry.label, *arguments)
        code, said = child_process.run(command, TIMEOUT_S, streams=["stdout", "stderr"])
    except OSError as error:
        return Ending(UNKNOWN, str(error))
    return ending_of(code, said.splitlines())


def ending_of(code: int | None, lines: Sequence[str]) -> Ending:
    """What it means that a child said this and ended with this exit code (None: it took too long and was ended)."""
    if code == _UNKNOWN_CODE:
        return Ending(UNKNOWN, lines[-1])
    if code is None:
        return Ending(HUNG if _STARTED in lines else NOT_BEGUN, f"no end within {TIMEOUT_S:.0f} s")
    try:
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    except ValueError:
        how = f"signal {-code}"
    if code < 0 and how not in _CRASHES:
        return Ending(UNKNOWN, how)
    if _STARTED not in lines:
        return Ending(NOT_BEGUN, lines[-1] if lines else how)
    if code == 0:
        return Ending(YES)
    if code == _NO_CODE:
        return Ending(NO, lines[-1])
    return Ending(CRASHED, how)  # another exit code is the driver's, which ended the process


def answer_parent(probe: Callable[[DeviceEntry, Sequence[str]], str | None]) -> NoReturn:
    """The child: probe(device, further arguments) gives what is wrong, one line, or None."""
    import pyopencl as cl

    from llmcl.errors import LlmclError

    code, reason = _UNKNOWN_CODE, "the device was not found"
    index, label, *arguments = sys.argv[1:]
    entry = next((entry for entry in find_devices() if entry.index == int(index) and entry.label == label), None)
    if entry is not None:
        _leave_no_core_file()
        print("\n" + _STARTED, flush=True)  # a driver may have begun a line
        try:
            problem = probe(entry, arguments)
            code, reason = (0, "") if problem is None else (_NO_CODE, problem)
        except (cl.Error, LlmclError) as error:
            reason = str(error)
            if not is_taken(error):
                code = _NO_CODE
        except Exception as error:  # MemoryError, or a mistake of ours
            reason = repr(error)
    print("\n" + what_failed(reason), flush=True)
    os._exit(code)  # at once: what a driver does as the interpreter ends was not asked


def is_taken(error: Exception) -> bool:
    """Whether OpenCL says that the device or memory cannot be had, for which another process may be the cause."""
    import pyopencl as cl

    codes = cl.status_code
    cause = error if isinstance(error, cl.Error) else error.__cause__  # an error of ours has OpenCL's as its cause
    return isinstance(cause, cl.Error) and cause.code in (
        codes.DEVICE_NOT_AVAILABLE,
        codes.MEM_OBJECT_ALLOCATION_FAILURE,
        codes.OUT_OF_RESOURCES,
        codes.OUT_OF_HOST_MEMORY,
    )


def what_failed(log: str) -> str:
    """The line of a compiler's log that names the error, cut and fit to be shown."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    named = [line for line in lines if "error" in line.lower() and "BUILD_PROGRAM_FAILURE" not in line]
    line = (named or lines or [""])[0]
    return "".join(c if c.isprintable() else " " for c in line)[:200]


def _leave_no_core_file() -> None:
    try:
        import resource
    except ImportError:  # Windows
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
