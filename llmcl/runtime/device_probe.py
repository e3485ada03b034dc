"""Tests whether a driver can use its device: compiles and runs one small kernel in a child process, at first use.

A driver may list a device and then refuse every kernel (an LLVM older than the processor), compute wrong values, crash
or hang. The result is remembered. A failure is remembered for a day at most, and `llmcl devices` tests again, since a
missing package may have been installed by then.

`ask` runs this module as a program that reports the problem. The variable `BROKEN`, as WORDS=HOW, spoils the probe for
devices with these words in the name, platform or platform version, to test broken drivers without having one.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from llmcl.errors import UsageError
from llmcl.runtime.platforms import DeviceEntry
from llmcl.runtime.probe import (
    A_DAY,
    CRASHED,
    HUNG,
    LASTS_S,
    NO,
    NOT_BEGUN,
    answer_parent,
    ask,
    digest,
    is_taken,
    remembered,
    what_failed,
)
from llmcl.runtime.program import BUILD_OPTIONS, read_source

PROBE = "portable/device_probe.cl"
BROKEN = "LLMCL_TEST_BROKEN_DRIVER"
HOW = ("refuses", "wrong", "crashes", "hangs")
GROUPS = 4
_NOT_ASKED = "not asked: "  # prefix for a remembered result that says nothing about the driver
_log = logging.getLogger(__name__)
_SPOILT = {"refuses": f"#error refused by {BROKEN}\n", "wrong": "#define exp(x) (x)\n"}


def checked(entries: Sequence[DeviceEntry], *, again: bool = False) -> list[DeviceEntry]:
    """Returns the entries, each with the `fault` of its driver. again: tests drivers again that failed before."""
    kinds = {digest(entry): entry for entry in entries if entry.lacks is None}  # tests equal cards once
    with ThreadPoolExecutor(max(len(kinds), 1)) as pool:
        faults = dict(zip(kinds, pool.map(lambda entry: fault(entry, again=again), kinds.values()), strict=True))
    return [replace(entry, fault=faults.get(digest(entry))) for entry in entries]


def fault(entry: DeviceEntry, *, again: bool = False) -> str | None:
    """Returns the problem with the driver of a device that lacks nothing; None if it works or could not be tested.

    Logs a warning with the reason if the test could not run.
    """
    said = remembered(
        "device_probe",
        entry,
        read_source(PROBE),
        _broken(entry),
        answer=lambda: _asked(entry),
        counts=lambda stored: not (stored and again),
    )
    if said.startswith(_NOT_ASKED):
        _log.warning(
            "%s is used untried, since the trial of its driver did not begin (%s); `llmcl devices` tries it again",
            entry.label,
            said.removeprefix(_NOT_ASKED),
        )
        return None
    return said or None


def _asked(entry: DeviceEntry) -> tuple[str, float]:
    ending = ask(__name__, entry)
    said = {
        NO: ending.reason,
        CRASHED: f"its driver ended the process with a small kernel ({ending.reason})",
        HUNG: f"its driver did not come to an end with a small kernel ({ending.reason})",
        NOT_BEGUN: _NOT_ASKED + what_failed(ending.reason),
    }
    return said.get(ending.verdict, ""), A_DAY if ending.verdict == NO else LASTS_S[ending.verdict]


def _probe(entry: DeviceEntry, _: Sequence[str]) -> str | None:
    import pyopencl as cl

    how = _broken(entry)
    if how == "crashes":
        os.abort()
    while how == "hangs":
        time.sleep(1)
    try:
        right = _computes(entry, _SPOILT.get(how, "") + read_source(PROBE))
    except cl.Error as error:
        if is_taken(error):
            raise
        what = "compile" if isinstance(error, cl.RuntimeError) else "run"
        return f"its driver cannot {what} a small kernel ({what_failed(str(error))})"
    return None if right else "its driver computes wrong values"


def _computes(entry: DeviceEntry, source: str) -> bool:
    import numpy as np
    import pyopencl as cl

    salt = int(digest(entry)[:8], 16) % 10000
    context = cl.Context([entry.device])
    queue = cl.CommandQueue(context)
    program = cl.Program(context, source)
    program.build([*BUILD_OPTIONS, f"-DSALT={salt}"], cache_dir=False)  # type: ignore[arg-type]
    x = np.linspace(-2, 2, 16 * GROUPS, dtype=np.float32)
    out = np.zeros_like(x)
    flags = cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR
    buffers = [cl.Buffer(context, flags, hostbuf=array) for array in (x, out)]
    program.device_probe(queue, x.shape, (16,), *buffers)
    cl.enqueue_copy(queue, out, buffers[1])
    expected = np.exp(x.astype(np.float64)) + x.reshape(GROUPS, 16).sum(axis=1).repeat(16) + salt
    return np.allclose(out, expected, rtol=1e-6, atol=1e-2)


def _broken(entry: DeviceEntry) -> str:
    """Returns how to spoil this device's probe; "": not at all."""
    wanted = os.environ.get(BROKEN, "")
    words, _, how = wanted.rpartition("=")
    if wanted and not (words and how in HOW):
        raise UsageError(f"{BROKEN} is {wanted!r}; expected part of a name, '=', and one of {', '.join(HOW)}")
    return how if words.lower() in f"{entry.label}, {entry.platform_version}".lower() else ""


if __name__ == "__main__":
    answer_parent(_probe)
