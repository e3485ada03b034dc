"""Programs that child processes compile side by side: those that one process makes, whatever happens to children."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from parameters import slow_except

from llmcl.errors import KernelBuildError, UsageError
from llmcl.runtime import compilers
from llmcl.runtime.compilers import JOBS, Compilers, n_children
from llmcl.runtime.device import Device
from llmcl.runtime.platforms import DeviceEntry
from llmcl.runtime.program import KernelSource, ProgramCache

FILE = "portable/arithmetic_peak.cl"
GIB = 1 << 30


def source(rounds: int, prelude: str = "") -> KernelSource:
    return KernelSource(FILE, "arithmetic_peak", {"WIDTH": 1, "CHAINS": 1, "ROUNDS": rounds}, prelude)


SOURCES = [source(rounds) for rounds in (16, 32, 64, 128, 256, 512)]


@pytest.fixture
def several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(JOBS, "3")


@pytest.fixture
def programs(default_device: Device, several: None, empty_cache: Path) -> ProgramCache:
    cache = ProgramCache(default_device.context, default_device.entry.device)
    if not cache.keeps_binaries:
        pytest.skip("PoCL keeps its programs itself")
    return cache


def compile_all(programs: ProgramCache, device: Device, sources: list[KernelSource] = SOURCES) -> list[int]:
    """What was reported as done."""
    reported: list[int] = []
    programs.compile_side_by_side(device.entry, programs.missing(sources), reported.append)
    return reported


def files(folder: Path) -> set[str]:
    """Names of files, which stand for what they were compiled from. Intel's binaries hold a counter, too."""
    return {path.name for path in folder.rglob("*.bin")}


def test_children_make_the_very_programs(
    programs: ProgramCache, default_device: Device, empty_cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Compilers, "take", lambda _: None)  # all is left to the children
    monkeypatch.setattr(Compilers, "under_way", lambda self: {*range(len(SOURCES))} - self.done())
    compile_all(programs, default_device)
    assert (programs.compiled, len(programs)) == (len(SOURCES), 0)
    for each in SOURCES:
        programs.kernel(each)
    assert (programs.compiled, len(programs)) == (len(SOURCES), len(SOURCES))  # from disk
    by_children = files(empty_cache)
    monkeypatch.setenv("LLMCL_CACHE_DIR", str(tmp_path / "one"))
    alone = ProgramCache(default_device.context, default_device.entry.device)
    for each in SOURCES:
        alone.kernel(each)
    assert by_children == files(tmp_path / "one") and len(by_children) == len(SOURCES)


def test_nothing_is_left_to_compile(programs: ProgramCache, default_device: Device) -> None:
    reported = compile_all(programs, default_device)
    assert programs.compiled == len(SOURCES) and programs.missing(SOURCES) == [] and reported[0] == 0
    assert programs.compile_s > 0


def test_what_is_wanted_later_is_compiled_while_the_parent_goes_on(
    programs: ProgramCache, default_device: Device, empty_cache: Path
) -> None:
    keys, later = programs.missing(SOURCES[:3]), programs.missing(SOURCES[3:])
    programs.compile_side_by_side(default_device.entry, keys, lambda _: None, later)
    assert programs.missing(SOURCES[:3]) == []
    until = time.monotonic() + 60
    while programs.compiles_later:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert compile_all(programs, default_device) == []
    programs.close()
    assert (programs.compiled, len(files(empty_cache)), programs.compiles_later) == (len(SOURCES), len(SOURCES), False)


def test_what_is_wanted_at_last_comes_before_the_rest(programs: ProgramCache, default_device: Device) -> None:
    many = [source(rounds) for rounds in range(1000, 1060)]
    programs.compile_side_by_side(default_device.entry, programs.missing(SOURCES[:3]), lambda _: None, [])
    programs.compile_side_by_side(default_device.entry, [], lambda _: None, programs.missing(many))
    compile_all(programs, default_device, many[-2:])
    assert programs.compiles_later
    for each in many[-2:]:
        programs.kernel(each)
    assert not programs.missing(many[-2:])
    programs.close()


def test_few_programs_are_compiled_here(programs: ProgramCache, default_device: Device) -> None:
    assert compile_all(programs, default_device, SOURCES[:2]) == [] and programs.compiled == 0


@pytest.mark.parametrize(
    "program",
    [
        "import os; os.abort()",
        "import os; n = os.read(0, 4)[0]; os.write(1, b'begin %d\\n' % n); os.abort()",
        "import os; n = os.read(0, 4)[0]; os.write(1, b'begin %d\\nfailed %d\\n' % (n, n))",
    ],
    ids=["at once", "within a program", "no program is made"],
)
def test_a_child_that_fails_leaves_its_program_to_the_parent(
    programs: ProgramCache, default_device: Device, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    start: Callable[..., Any] = subprocess.Popen
    replaced = [sys.executable, "-c", program]
    monkeypatch.setattr(compilers.subprocess, "Popen", lambda _, **how: start(replaced, **how))
    compile_all(programs, default_device)
    for each in SOURCES:
        programs.kernel(each)
    assert (programs.compiled, len(programs)) == (len(SOURCES), len(SOURCES))


def test_without_an_interpreter_the_parent_compiles(
    programs: ProgramCache, default_device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none() -> str:
        raise OSError("no interpreter")

    monkeypatch.setattr("llmcl.runtime.child_process.interpreter", none)
    assert compile_all(programs, default_device) == []
    programs.kernel(SOURCES[0])
    assert programs.compiled == 1


def test_what_does_not_compile_is_reported_by_the_parent(programs: ProgramCache, default_device: Device) -> None:
    broken = source(16, "#error of a test\n")
    compile_all(programs, default_device, [*SOURCES, broken])
    assert programs.compiled == len(SOURCES)
    with pytest.raises(KernelBuildError, match="of a test"):
        programs.kernel(broken)


def test_no_child_is_started_where_nothing_can_be_kept(
    programs: ProgramCache, default_device: Device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LLMCL_CACHE_DIR", str(tmp_path / "file"))
    assert compile_all(programs, default_device) == []


def test_memory_and_cores_bound_the_processes(default_entry: DeviceEntry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(JOBS, raising=False)
    card = dataclasses.replace(default_entry, unified_memory=False, global_mem_bytes=80 * GIB)
    free = 64 * GIB
    monkeypatch.setattr(compilers, "usable_cores", lambda: 64)
    monkeypatch.setattr(compilers, "host_available_bytes", lambda: free)
    assert n_children(card, 100) == compilers.MAX_PROCESSES - 1
    assert [n_children(card, n) for n in (0, 1, 2, 3)] == [0, 0, 0, 2]
    assert [n_children(card, *n) for n in ((0, 1), (1, 2), (4, 4))] == [1, 2, 7]
    assert n_children(dataclasses.replace(card, global_mem_bytes=8 * GIB), 100) == 2
    assert [n_children(card, 100, 0, taken * GIB) for taken in (70, 78, 90)] == [2, 0, 0]
    free = 3 * GIB + 1
    assert n_children(card, 100) == 3
    monkeypatch.setattr(compilers, "usable_cores", lambda: 1)
    assert n_children(card, 100) == 0
    monkeypatch.setenv(JOBS, "3")
    assert n_children(card, 100) == 2
    for bad in ("0", "-1", "x", "1.5", "٣"):
        monkeypatch.setenv(JOBS, bad)
        with pytest.raises(UsageError, match=f"{JOBS} is .*expected a whole number, 1 or more"):
            n_children(card, 100)


SCRIPT = """
import sys, time
from llmcl.runtime import compilers
from llmcl.runtime.device import Device
device = Device.open(sys.argv[1])
keys = [("portable/arithmetic_peak.cl", f"-D WIDTH=1 -D CHAINS=1 -D ROUNDS={2 * n}", "") for n in range(9, 3000)]
with compilers.Compilers(device.entry, keys, 2) as children:
    print(*(child.pid for child, _ in children._children), flush=True)
    while not children.done():
        time.sleep(0.01)
    print("busy", flush=True)
    if sys.argv[2] == "waits":
        time.sleep(60)
"""


@pytest.mark.skipif(not hasattr(os, "getppid") or sys.platform == "win32", reason="signals")
@pytest.mark.parametrize("ending", slow_except(["exit", "SIGINT", "SIGKILL"], "SIGKILL"))
def test_no_child_is_left(programs: ProgramCache, default_device: Device, ending: str) -> None:
    how = "exits" if ending == "exit" else "waits"
    arguments = [sys.executable, "-c", SCRIPT, default_device.name, how]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2 and parent.stdout.readline() == "busy\n"
        if ending != "exit":
            parent.send_signal(getattr(signal, ending))
    _wait_for_the_end(pids)


def _wait_for_the_end(pids: list[int]) -> None:
    """All that they have to compile would take minutes."""
    until = time.monotonic() + 60
    while any(map(_is_running, pids)):
        assert time.monotonic() < until, "a child runs on"
        time.sleep(0.02)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


AT_EXIT = """
import sys
from llmcl.runtime.device import Device
device = Device.open(sys.argv[1])
keys = [("portable/arithmetic_peak.cl", f"-D WIDTH=1 -D CHAINS=1 -D ROUNDS={2 * n}", "") for n in range(9, 3000)]
device.programs.compile_side_by_side(device.entry, keys[:3], lambda _: None, keys[3:])
assert device.programs.compiles_later
print(*(child.pid for child, _ in device.programs._background._children), flush=True)
"""


def test_the_end_does_not_wait_for_what_is_wanted_later(programs: ProgramCache, default_device: Device) -> None:
    command = [sys.executable, "-c", AT_EXIT, default_device.name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    pids = [int(pid) for pid in done.stdout.split()]
    assert pids
    _wait_for_the_end(pids)
