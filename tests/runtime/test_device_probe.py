"""A driver that refuses kernels, computes wrong values, crashes or hangs: here a child process really does so."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyopencl as cl
import pytest
from programs import ROOT
from which_devices import chosen_devices, device_id, named_devices

from llmcl.errors import DeviceError, UsageError
from llmcl.runtime import device_probe, probe
from llmcl.runtime.device import named_errors
from llmcl.runtime.device_probe import BROKEN, checked, fault
from llmcl.runtime.platforms import DeviceEntry, find_devices
from llmcl.runtime.selection import select_device


def test_a_driver_that_works_is_asked_once(
    cl_entry: DeviceEntry, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fault(cl_entry) is None
    (file,) = (empty_cache / "device_probe").iterdir()
    assert json.loads(file.read_text()) == {"answer": "", "until": None}
    monkeypatch.setattr(device_probe, "ask", None)
    assert fault(cl_entry, again=True) is None


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("refuses", rf"^its driver cannot compile a small kernel \(.*refused by {BROKEN}"),
        ("wrong", r"^its driver computes wrong values$"),
        ("crashes", r"^its driver ended the process with a small kernel \(SIGABRT\)$"),
    ],
)
def test_a_driver_that_fails_is_remembered_until_asked_for(
    default_entry: DeviceEntry, empty_cache: Path, monkeypatch: pytest.MonkeyPatch, how: str, said: str
) -> None:
    monkeypatch.setenv(BROKEN, f"{default_entry.label}={how}")
    found = fault(default_entry)
    assert found is not None and re.search(said, found), found
    (file,) = (empty_cache / "device_probe").iterdir()
    assert json.loads(file.read_text())["until"] is not None
    monkeypatch.setattr(device_probe, "ask", lambda *_: probe.Ending(probe.YES))
    assert fault(default_entry) == found
    assert fault(default_entry, again=True) is None
    assert fault(default_entry) is None


def test_a_driver_that_hangs_is_ended(
    default_entry: DeviceEntry, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BROKEN, f"{default_entry.label}=hangs")
    for limit_s in (3.0, 12.0, 48.0):  # a child that has not come to its kernel says nothing about the driver
        monkeypatch.setattr(probe, "TIMEOUT_S", limit_s)
        found = fault(default_entry)
        if found:
            break
    assert found == f"its driver did not come to an end with a small kernel (no end within {limit_s:.0f} s)"


def test_a_probe_that_is_ended_from_outside_leaves_the_device_as_it_was(
    default_entry: DeviceEntry, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_probe, "ask", lambda *_: probe.Ending(probe.UNKNOWN, "SIGKILL"))
    assert fault(default_entry) is None
    assert not (empty_cache / "device_probe").exists()


def test_a_device_that_another_process_holds_has_no_fault() -> None:
    codes = cl.status_code
    for code, taken in (
        (codes.DEVICE_NOT_AVAILABLE, True),
        (codes.OUT_OF_RESOURCES, True),
        (codes.BUILD_PROGRAM_FAILURE, False),
    ):
        error = cl.Error(cl._cl._ErrorRecord("failed", code, "clCreateContext"))
        assert probe.is_taken(error) is taken
        with pytest.raises(DeviceError) as caught, named_errors("opening it"):
            raise error
        assert probe.is_taken(caught.value) is taken
    assert not probe.is_taken(DeviceError("no such device"))


@pytest.mark.parametrize("value", ["pocl", "pocl=breaks", "=refuses"])
def test_a_mistake_in_the_switch_is_named(
    default_entry: DeviceEntry, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv(BROKEN, value)
    with pytest.raises(UsageError, match=f"{BROKEN} is '{value}'"):
        fault(default_entry)


def test_devices_are_checked_in_their_order(default_entry: DeviceEntry, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal cards are asked as one; a device that lacks something is not asked."""
    asked: list[str] = []

    def ask(module: str, entry: DeviceEntry) -> probe.Ending:
        asked.append(entry.name)
        return probe.Ending(probe.NO, "it is broken") if entry.name == "broken" else probe.Ending(probe.YES)

    monkeypatch.setattr(device_probe, "ask", ask)
    monkeypatch.setattr(device_probe, "remembered", lambda *_, answer, **__: answer()[0])
    names = ["card", "broken", "card", "old"]
    entries = [
        dataclasses.replace(default_entry, index=i, name=name, lacks="it is old" if name == "old" else None)
        for i, name in enumerate(names)
    ]
    found = checked(entries)
    assert [entry.name for entry in found] == names and sorted(asked) == ["broken", "card"]
    assert [entry.unusable_reason for entry in found] == [None, "it is broken", None, "it is old"]
    assert [entry.index for entry in found] == [0, 1, 2, 3]


def test_another_device_is_chosen_and_a_warning_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = find_devices()[0]
    monkeypatch.setenv(BROKEN, f"{first.label}=refuses")
    left = [entry for entry in checked(find_devices()) if entry.usable]
    if left:
        chosen = select_device()
        assert (chosen.index, chosen.label) == (left[0].index, left[0].label)
        assert f"{first.label} cannot be used: its driver cannot compile" in caplog.messages[0]
        assert caplog.messages[0].endswith(f"Using {left[0].label}")
    else:
        with pytest.raises(DeviceError, match="cannot be used"):
            select_device()


def test_the_command_line_says_what_is_wrong_and_what_to_do(
    default_entry: DeviceEntry,
    invoke: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(BROKEN, f"{default_entry.label}=refuses")
    remedy = dataclasses.replace(default_entry, fault="broken").remedy
    assert remedy is not None
    assert invoke("generate", "-m", "smollm2", "-p", "x", "--device", str(default_entry.index)) == 3
    printed = capsys.readouterr()
    assert printed.out == ""
    first = printed.err.splitlines()[0]
    assert first.startswith(f"error: {default_entry.label} cannot be used: its driver cannot compile a small kernel (")
    assert remedy in first and "Traceback" not in printed.err

    invoke("devices", "--format", "json")
    listed = json.loads(capsys.readouterr().out)
    device = listed["devices"][default_entry.index]
    assert not device["usable"] and "cannot compile" in device["why_not"] and device["remedy"] == remedy
    assert listed["selected"] != default_entry.index
    invoke("devices")
    text = " ".join(capsys.readouterr().out.split())
    assert "unusable its driver cannot compile a small kernel" in text and remedy in text


@pytest.mark.slow
@pytest.mark.parametrize("required", ["", "voodoo"])
def test_tests_leave_out_a_device_that_does_not_work_and_name_it(default_entry: DeviceEntry, required: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", str(Path(__file__))],
        env={
            **os.environ,
            BROKEN: f"{default_entry.label}=refuses",
            "LLMCL_TEST_REQUIRE": required,
            "LLMCL_TEST_DEVICE": "",
        },
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    if required:
        assert done.returncode != 0
        assert "not found: voodoo" in done.stderr
        assert f"{default_entry.label} is not usable: its driver cannot compile a small kernel" in done.stderr
    elif done.returncode == 0:  # else it was the only device
        unusable = f"not usable: {default_entry.label}, {default_entry.driver_version}: its driver cannot compile"
        assert unusable in done.stdout
        assert f"tested on {device_id(default_entry)}: {default_entry.label}" not in done.stdout
    else:
        assert "no OpenCL device to test on" in done.stderr


def test_one_pocl_is_tested_unless_another_is_asked_for(default_entry: DeviceEntry) -> None:
    def device(index: int, name: str, version: str, *, is_pocl: bool, fault: str | None = None) -> DeviceEntry:
        return dataclasses.replace(
            default_entry,
            index=index,
            name=name,
            kind="cpu",
            platform_name="Portable Computing Language" if is_pocl else "Intel(R) OpenCL",
            platform_version=version,
            facts={"is_intel_cpu": not is_pocl, "is_pocl": is_pocl},
            is_software=False,
            fault=fault,
        )

    intel = device(0, "EPYC", "OpenCL 3.1", is_pocl=False)
    wheel = device(1, "pthread-EPYC", "PoCL 3.0-rc2", is_pocl=True)
    system = device(2, "pthread-znver4-EPYC", "PoCL 3.1+debian", is_pocl=True)
    both = named_devices([intel, wheel, system])
    assert list(both) == ["intel-cpu", "pocl", "pocl-2"]
    for wanted, expected in {
        "": ["intel-cpu", "pocl"],
        "pocl": ["pocl"],
        "pocl-2": ["pocl-2"],
        "debian": ["pocl-2"],
        "pocl,3.1+debian": ["pocl", "pocl-2"],
        "epyc": ["intel-cpu", "pocl"],
    }.items():
        assert list(chosen_devices(both, wanted)) == expected, wanted
    broken = dataclasses.replace(wheel, fault="broken")
    assert named_devices([intel, broken, system]) == {"intel-cpu": intel, "pocl": system}
