"""The probe for dot products: it runs elsewhere, remembers its answer, and takes a crash for a no."""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path
from typing import Any

import instructions
import pytest

from llmcl.kernels.cpu import dot_product as dot_module
from llmcl.kernels.cpu.dot_product import BFLOAT16, INT8, NONE, DotProduct, dot_product
from llmcl.runtime import probe
from llmcl.runtime.platforms import DeviceEntry


@pytest.fixture
def cpu_entry(cl_entry: DeviceEntry) -> DeviceEntry:
    if cl_entry.kind != "cpu" or cl_entry.is_software:
        pytest.skip("only processors are asked")
    return cl_entry


@pytest.mark.parametrize("wanted", [INT8, BFLOAT16], ids=lambda wanted: wanted.name)
def test_the_answer_is_remembered(
    cpu_entry: DeviceEntry, empty_cache: Path, monkeypatch: pytest.MonkeyPatch, wanted: DotProduct
) -> None:
    answer = dot_product(cpu_entry, wanted)
    assert answer in (NONE, *wanted.forms) and (answer != NONE) == any(map(instructions.offers, wanted.forms.values()))

    def run(*args: Any, **options: Any) -> Any:
        raise AssertionError("the answer is in the cache")

    monkeypatch.setattr("llmcl.runtime.child_process.subprocess.run", run)
    assert dot_product(cpu_entry, wanted) == answer


@pytest.fixture
def outcomes(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[int | str]:
    """What the next child processes end with; they have to be asked for in this order."""
    codes: list[int | str] = []

    def run(command: list[str], **options: Any) -> Any:
        options["stdout"].write(b"the probe starts\n")
        code = codes.pop(0)
        if code == "timeout":
            raise subprocess.TimeoutExpired(command, 1.0)
        return subprocess.CompletedProcess(command, int(code))

    monkeypatch.setattr("llmcl.runtime.child_process.subprocess.run", run)
    monkeypatch.setattr(dot_module, "_may_have", lambda flag: True)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    return codes


@pytest.mark.parametrize("outcome", [-4, 134, "timeout", -9, 65])
def test_whatever_ends_a_form_the_next_is_tried(
    default_entry: DeviceEntry, outcomes: list[int | str], outcome: int | str
) -> None:
    tries = [outcome, outcome] if outcome in (-4, 134) else [outcome]  # a crash is tried again
    outcomes[:] = [*tries, 0]
    assert dot_product(default_entry, INT8) == (3 if default_entry.fact("is_pocl") else 2)
    assert outcomes == []


@pytest.mark.parametrize("killed", [-9, -15, 75])
def test_a_probe_that_was_killed_is_asked_again(
    default_entry: DeviceEntry, outcomes: list[int | str], killed: int
) -> None:
    outcomes[:] = [killed, *[65] * 4]
    assert dot_product(default_entry, INT8) == NONE
    outcomes[:] = [0]  # the next start
    first = dot_product(default_entry, INT8)
    assert first != NONE and dot_product(default_entry, INT8) == first


def test_a_form_found_behind_one_that_crashed_lasts_a_day(
    default_entry: DeviceEntry, outcomes: list[int | str], monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes[:] = [-6, -6, 0]
    behind = dot_product(default_entry, INT8)
    assert dot_product(default_entry, INT8) == behind
    now = probe.time.time()
    monkeypatch.setattr(probe.time, "time", lambda: now + probe.A_DAY + 60)
    outcomes[:] = [0]
    assert dot_product(default_entry, INT8) != behind


def test_any_processors_driver_is_asked_with_every_form(
    default_entry: DeviceEntry, outcomes: list[int | str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, ...]] = []

    def ask(module: str, entry: DeviceEntry, *arguments: str) -> probe.Ending:
        asked.append(arguments)
        return probe.Ending(probe.NO)

    monkeypatch.setattr(dot_module, "ask", ask)
    for name, is_pocl in (("a driver of tomorrow", False), ("a PoCL", True)):
        entry = dataclasses.replace(default_entry, name=name, facts={"is_pocl": is_pocl})
        assert dot_product(entry, INT8) == dot_product(entry, BFLOAT16) == NONE
    assert asked[:7] == [*(("int8", form) for form in "12345"), ("bfloat16", "1"), ("bfloat16", "2")]
    assert asked[7:] == [*(("int8", form) for form in "23415"), ("bfloat16", "2"), ("bfloat16", "1")]


def test_a_processor_without_the_instruction_is_not_asked(
    default_entry: DeviceEntry, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dot_module, "processor", lambda: "model name\t: any\nflags\t\t: fpu sse4_2 avx")
    monkeypatch.setattr(dot_module, "ask", None)
    assert dot_product(default_entry, INT8) == NONE
