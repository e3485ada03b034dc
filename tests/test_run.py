"""What `make test` leaves to the full run, what that leaves out, and that nothing else is left out."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import conftest
import pytest
import run
from conftest import left_to_the_full_run, not_crossed


@dataclass(eq=False)
class Case:
    """As much of a pytest item as the rule looks at."""

    nodeid: str
    params: dict[str, Any]
    marks: tuple[str, ...] = ()
    callspec: Any = field(init=False)

    def __post_init__(self) -> None:
        self.callspec = SimpleNamespace(params=self.params)

    def get_closest_marker(self, name: str) -> bool:
        return name in self.marks


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found = [SimpleNamespace(index=i, kind="cpu", is_software=i == 2) for i in range(3)]
    monkeypatch.setattr(conftest, "tested_devices", lambda: dict(enumerate(found)))
    return found


def kept(cases: list[Case]) -> list[str]:
    left = left_to_the_full_run(cases)  # type: ignore[arg-type]
    return [case.nodeid for case in cases if case not in left]


def test_a_variant_that_a_device_does_not_choose_runs_little_or_not(devices: list[Any]) -> None:
    cases = [
        Case(f"{test}[{variant}-{device.index}-{n}]", {"cl_entry": device, "variant": variant})
        for device in devices
        for test in ("tests/kernels/test_a.py::a", "tests/kernels/test_a.py::b", "tests/test_b.py::b")
        for variant in ("cpu", "portable")
        for n in range(3)
    ]
    on_others = [f"tests/kernels/test_a.py::a[{which}-0]" for which in ("cpu-1", "portable-2")]
    on_the_first = [case.nodeid for case in cases if case.params["cl_entry"] is devices[0]]
    few = [name for name in on_the_first if not name.endswith(("[portable-0-0]", "[portable-0-1]"))]
    assert kept(cases) == few + on_others


def test_a_case_that_is_skipped_does_not_count(devices: list[Any]) -> None:
    test = "tests/kernels/test_a.py::a"
    cases = [Case(f"{test}[{n}]", {"cl_entry": devices[1]}, ("skip",) * (n == 0)) for n in range(3)]
    assert kept(cases) == [f"{test}[1]"]


@pytest.mark.usefixtures("devices")
def test_first_and_last_of_a_matrix_and_none_of_full() -> None:
    cases = [Case(f"a[{kind}-{n}]", {"kind": kind}, ("matrix",)) for kind in ("cpu", "gpu") for n in range(4)]
    assert kept(cases) == ["a[cpu-0]", "a[cpu-3]", "a[gpu-0]", "a[gpu-3]"]
    assert kept([Case("b", {}), Case("c[1]", {}), Case("c[2]", {})]) == ["b", "c[1]", "c[2]"]
    assert kept([Case("b", {}), Case("c[1]", {}, ("full",)), Case("c[2]", {}, ("full",))]) == ["b"]
    assert kept([Case("c[1]", {}), Case("c[2]", {}, ("full",)), Case("c[3]", {})]) == ["c[1]", "c[3]"]


def test_what_takes_a_device_for_a_gpu_runs_on_a_gpu(devices: list[Any]) -> None:
    cases = [Case("a[cpu]", {"kind": "cpu"}), Case("a[gpu]", {"kind": "gpu"}, ("as_gpu",))]
    assert kept(cases) == ["a[cpu]"]
    devices[0].kind = "gpu"
    assert kept(cases) == ["a[cpu]", "a[gpu]"]


def test_in_pairs_every_parameter_meets_every_device_and_every_variant(devices: list[Any]) -> None:
    cases = [
        Case(
            f"tests/kernels/test_a.py::{test}[{variant}-{device.index}-{n}]",
            {"cl_entry": device, "variant": variant},
            ("skip",) * (device.index == 2 and n == 0),
        )
        for device in devices
        for test, variants in (("a", ("cpu", "portable")), ("only", ("portable",)))
        for variant in variants
        for n in range(3)
    ]
    left = not_crossed([*cases, Case("tests/test_b.py::b", {})])  # type: ignore[list-item]
    names = {case.nodeid.partition("::")[2] for case in left}
    assert names == {"a[portable-1-1]", "a[portable-1-2]", "a[cpu-2-2]"}


@pytest.mark.parametrize("files_a_process", [run.FILES_A_PROCESS, run.QUICK_FILES_A_PROCESS])
def test_every_file_is_run_once(files_a_process: int) -> None:
    files = [name for group in run.chunks(files_a_process) for name in group]
    assert sorted(files) == sorted(str(path.relative_to(run.ROOT)) for path in run.ROOT.glob("tests/**/test_*.py"))


def test_the_longest_files_come_first() -> None:
    first = [group[0] for group in run.chunks()]
    assert first[: len(run.LONGEST)] == run.LONGEST[: len(first)], "a file was renamed, or LONGEST is too long"


def test_the_summary_counts_what_is_left() -> None:
    outcomes = [run.Outcome([], 0, f"left to the full run: {n} cases\n3 passed in 1 s") for n in (1200, 34)]
    assert run.summary(outcomes)[0] == "1,234 cases of the full matrix are left to LLMCL_TEST_FULL=1"
    assert run.summary(outcomes)[-1] == "6 passed"
    (first, *_) = run.summary([run.Outcome([], 0, "crossed in pairs, without 7 cases\n3 passed in 1 s")])
    assert first == "7 cases are left out: others have their pairs of values"
