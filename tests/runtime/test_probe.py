"""Questions asked in child processes: what an ending means, and for how long the answer is remembered."""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path
from typing import Any

import pytest

from llmcl.runtime import probe
from llmcl.runtime.platforms import DeviceEntry
from llmcl.runtime.probe import (
    A_DAY,
    CRASHED,
    HUNG,
    LASTS_S,
    NO,
    NOT_BEGUN,
    UNKNOWN,
    YES,
    Ending,
    ask,
    ending_of,
    remembered,
)

STARTED = "the probe starts"


@pytest.mark.parametrize(
    ("code", "lines", "verdict"),
    [
        (0, [STARTED], YES),
        (65, [STARTED, "the sums are wrong"], NO),
        (-6, [STARTED], CRASHED),  # SIGABRT, SIGILL, SIGSEGV: the compiler's or the kernel's doing
        (-4, [STARTED], CRASHED),
        (-11, [STARTED, "LLVM ERROR"], CRASHED),
        (1, [STARTED], CRASHED),  # LLVM may exit at an error
        (-9, [STARTED], UNKNOWN),  # SIGKILL, SIGTERM, SIGINT: from outside, as where memory is short
        (-15, [STARTED], UNKNOWN),
        (-2, [STARTED], UNKNOWN),
        (75, [STARTED, "out of memory"], UNKNOWN),
        (1, ["no module named llmcl"], NOT_BEGUN),  # before the device was found
        (-11, [], NOT_BEGUN),
        (-9, [], UNKNOWN),
        (75, ["the device was not found"], UNKNOWN),
        (None, [STARTED], HUNG),
        (None, [], NOT_BEGUN),
    ],
)
def test_what_an_ending_says_about_the_driver(code: int | None, lines: list[str], verdict: str) -> None:
    assert ending_of(code, lines).verdict == verdict


def test_only_what_a_child_says_itself_is_remembered_for_ever() -> None:
    assert LASTS_S[YES] == LASTS_S[NO] == float("inf")
    assert LASTS_S[CRASHED] == A_DAY and 0 < LASTS_S[HUNG] == LASTS_S[NOT_BEGUN] <= 600
    assert LASTS_S[UNKNOWN] == 0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1e9]
    monkeypatch.setattr(probe.time, "time", lambda: now[0])
    return now


@pytest.mark.parametrize(
    ("lasts_s", "later_s", "counts"),
    [
        (float("inf"), 1e8, True),
        (A_DAY, A_DAY - 1, True),
        (A_DAY, A_DAY + 1, False),
        (A_DAY, -A_DAY, False),
        (0.0, 0, False),
    ],
)
def test_an_answer_lasts_as_long_as_it_says(
    default_entry: DeviceEntry, empty_cache: Path, clock: list[float], lasts_s: float, later_s: float, counts: bool
) -> None:
    assert remembered("kind", default_entry, answer=lambda: ("first", lasts_s)) == "first"
    clock[0] += later_s
    assert remembered("kind", default_entry, answer=lambda: ("second", 0.0)) == ("first" if counts else "second")


def test_what_an_answer_depends_on(
    default_entry: DeviceEntry, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter("abcdefg")

    def asked(entry: DeviceEntry, *identity: str) -> str:
        return remembered("kind", entry, *identity, answer=lambda: (next(answers), float("inf")))

    assert [asked(default_entry, "source"), asked(default_entry, "source")] == ["a", "a"]
    assert asked(default_entry, "another source") == "b"
    assert asked(dataclasses.replace(default_entry, driver_version="another"), "source") == "c"
    assert asked(dataclasses.replace(default_entry, name="another"), "source") == "d"
    monkeypatch.setattr(probe, "processor", lambda: "another")  # of a machine that shares the home folder
    assert asked(default_entry, "source") == "e"


@pytest.mark.parametrize("content", [b"", b"2", b"[]", b'{"answer": 2, "until": null}', b'{"answer": "x"}', b"\xff"])
def test_a_damaged_answer_is_asked_again(default_entry: DeviceEntry, empty_cache: Path, content: bytes) -> None:
    remembered("kind", default_entry, answer=lambda: ("first", float("inf")))
    (file,) = (empty_cache / "kind").iterdir()
    file.write_bytes(content)
    assert remembered("kind", default_entry, answer=lambda: ("second", float("inf"))) == "second"


def test_a_crash_is_asked_about_twice(default_entry: DeviceEntry, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = [-6, 0, -6, -4, -9]

    def run(command: list[str], **options: Any) -> Any:
        options["stdout"].write(STARTED.encode() + b"\n")
        return subprocess.CompletedProcess(command, codes.pop(0))

    monkeypatch.setattr("llmcl.runtime.child_process.subprocess.run", run)
    assert ask("module", default_entry) == Ending(YES)
    assert ask("module", default_entry) == Ending(CRASHED, "SIGILL")
    assert ask("module", default_entry).verdict == UNKNOWN
    assert codes == []


def test_where_no_python_can_be_started_nothing_is_known(
    default_entry: DeviceEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", "/usr/bin/editor")
    monkeypatch.setattr("sys.frozen", True, raising=False)
    reason = "/usr/bin/editor embeds Python, and no interpreter is beside it"
    assert ask("module", default_entry) == Ending(UNKNOWN, reason)


def test_the_line_of_a_log_that_names_the_error() -> None:
    log = (
        "clBuildProgram failed: BUILD_PROGRAM_FAILURE - clBuildProgram failed: BUILD_PROGRAM_FAILURE\n\n"
        "Build on <pyopencl.Device 'pthread'>:\n\nerror: unknown target CPU 'generic'\x1b[0m\n"
        "Device pthread failed to build the program\n"
    )
    assert probe.what_failed(log) == "error: unknown target CPU 'generic' [0m"
    assert len(probe.what_failed("error " + 1000 * "x")) == 200
    assert probe.what_failed("") == ""
