"""Questions about a driver that only an experiment answers, asked in a child process, with the answer remembered.

With the wrong instructions a driver's compiler may abort the process, or a device fault may destroy the context.

An answer from the child itself is remembered for ever. A crash may come from a lack of memory, so the question is asked
again, and a second crash is remembered for a day. A hang may come from a busy machine, so it is remembered for ten
minutes, like a failed start (for example a failed import). A child killed from outside says nothing about the driver,
and nothing is remembered.
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

_STARTED = "the probe starts"  # printed by the child: an earlier end is not the kernel's fault
_NO_CODE, _UNKNOWN_CODE = 65, 75  # exit codes, "data error" and "temporary failure" in sysexits.h
_CRASHES = {"SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV", "SIGSYS", "SIGTRAP"}


@dataclass(frozen=True)
class Ending:
    """How a child process ended."""

    verdict: str  # YES, NO, CRASHED, HUNG, NOT_BEGUN or UNKNOWN
    reason: str = ""  # one line: why not YES


def remembered(
    kind: str,
    entry: DeviceEntry,
    *identity: str,
    answer: Callable[[], tuple[str, float]],
    counts: Callable[[str], bool] = lambda stored: True,
) -> str:
    """Returns the remembered answer for this device, driver and processor, or calls `answer()`.

    kind: a cache folder. identity: further inputs to the answer, such as the probe's source. answer: returns the answer
    and for how many seconds to remember it. counts: returns whether a remembered answer is still acceptable.
    """
    path = cache_dir() / kind / digest(entry, *identity)
    stored = _stored(path)
    if stored is not None and counts(stored):
        return stored
    new_answer, lasts_s = answer()
    try:
        if lasts_s > 0:
            until = None if math.isinf(lasts_s) else time.time() + lasts_s
            write_cached(path, json.dumps({"answer": new_answer, "until": until}).encode())
        else:
            path.unlink(missing_ok=True)
    except OSError:
        pass  # a read-only home: probed again next time
    return new_answer


def is_right(kind: str, module: str, entry: DeviceEntry, *arguments: str, source: str) -> bool:
    """Returns whether a module's program, run by `ask` with the arguments, answers YES for the device. source: the
    kernel source. kind: as for `remembered`.
    """

    def answer() -> tuple[str, float]:
        verdict = ask(module, entry, *arguments).verdict
        return verdict, LASTS_S[verdict]

    return remembered(kind, entry, *arguments, source, answer=answer) == YES


def _stored(path: Path) -> str | None:
    """Returns the answer in a file, unless damaged or expired."""
    try:
        stored = json.loads(read_cached(path, most=4096) or b"")
        answer, until = stored["answer"], stored["until"]
        # An answer that expires too far ahead was written before the clock was set back.
        fresh = until is None or 0 < until - time.time() < A_DAY + 1
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return answer if fresh and isinstance(answer, str) else None


def digest(entry: DeviceEntry, *identity: str) -> str:
    """Hashes everything that a device's answers depend on: driver, processor, and `identity`."""
    parts = (entry.platform_name, entry.platform_version, entry.name, entry.driver_version, processor(), *identity)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def ask(module: str, entry: DeviceEntry, *arguments: str) -> Ending:
    """Asks `python -m module` about the device; `answer_parent` is its main. A crash counts only if repeated."""
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
    """Interprets a child's output and exit code (None: killed after the timeout)."""
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
    return Ending(CRASHED, how)  # any other exit code means the driver ended the process


def answer_parent(probe: Callable[[DeviceEntry, Sequence[str]], str | None]) -> NoReturn:
    """Runs in the child: probe(device, further arguments) returns the problem in one line, or None."""
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
        except Exception as error:  # MemoryError, or a defect in llmcl
            reason = repr(error)
    print("\n" + what_failed(reason), flush=True)
    os._exit(code)  # at once: a driver's behaviour at exit does not matter


def is_taken(error: Exception) -> bool:
    """Returns whether the error means that device or memory is unavailable, perhaps because of another process."""
    import pyopencl as cl

    codes = cl.status_code
    cause = error if isinstance(error, cl.Error) else error.__cause__  # llmcl's errors have the OpenCL error as cause
    return isinstance(cause, cl.Error) and cause.code in (
        codes.DEVICE_NOT_AVAILABLE,
        codes.MEM_OBJECT_ALLOCATION_FAILURE,
        codes.OUT_OF_RESOURCES,
        codes.OUT_OF_HOST_MEMORY,
    )


def what_failed(log: str) -> str:
    """Returns the line with the error in a compiler's log, shortened and printable."""
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
