"""A child process of `compilers.Compilers`: opens the device and compiles jobs until none are left."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pyopencl as cl

from llmcl.errors import KernelBuildError
from llmcl.runtime.compilers import BEGIN, DONE, FAILED, Key, read_job
from llmcl.runtime.platforms import DeviceEntry, find_devices
from llmcl.runtime.program import ProgramCache


def _work(index: str, label: str, programs: str, later: str = "") -> None:
    """Opens the device and compiles one job after another until none are left or the parent is gone."""
    parent = os.getppid()
    log = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # hides drivers' prints
    entry = next(entry for entry in find_devices() if entry.index == int(index) and entry.label == label)
    compile_key = _compiler(entry)
    keys = json.loads(Path(programs).read_text(encoding="utf-8"))
    for queue in (0, *map(int, filter(None, [later]))):
        if queue and hasattr(os, "nice"):
            os.nice(10)
        while os.getppid() == parent and (job := read_job(queue)) is not None:
            os.write(log, f"{BEGIN} {job}\n".encode())
            start = time.perf_counter()
            word = DONE if compile_key(tuple(keys[job])) else FAILED
            os.write(log, f"{word} {job} {time.perf_counter() - start:.1f}\n".encode())


def _compiler(entry: DeviceEntry) -> Callable[[Key], bool]:
    programs = ProgramCache(cl.Context([entry.device]), entry.device)

    def compile_key(key: Key) -> bool:
        try:
            return programs.store(key)
        except KernelBuildError:  # the parent meets and reports the same error
            return False

    return compile_key


def _main() -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C may be meant for an answer only; the parent handles it
    try:
        _work(*sys.argv[1:])
    except Exception:  # the parent compiles the rest
        os._exit(1)
    os._exit(0)  # at once: drivers are slow to exit


if __name__ == "__main__":
    _main()
