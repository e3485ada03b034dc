"""What `make test` leaves to the full run, what that leaves out, and that nothing else is left out."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import run
from which_cases import left_to_the_full_run, met_in_pairs


@dataclass(eq=False)
class Case:
    """As much of a pytest item as the rule looks at."""

    nodeid: str
    params: dict[str, Any]
    marks: tuple[str, ...] = ()
    callspec: Any = field(init=False)

    def __post_init__(self) -> None:
        self.callspec = SimpleNamespace(params=self.params)

    def get_closest_marker(self, name: str) -> bool | None:
        return name in self.marks or None

    def iter_markers(self, name: str) -> list[Any]:
        return [SimpleNamespace(args=["dtype, width", []])]


@pytest.fixture
def devices() -> list[Any]:
    return [SimpleNamespace(index=i, kind="cpu", is_software=i == 2) for i in range(3)]


def kept(cases: list[Case], devices: list[Any]) -> list[str]:
    left = left_to_the_full_run(cases, devices)  # type: ignore[arg-type]
    return [case.nodeid for case in cases if case not in left]


def test_a_variant_that_a_device_does_not_choose_runs_little_or_not(devices: list[Any]) -> None:
    cases = [
        Case(f"{test}[{variant}-{device.index}-{n}]", {"cl_entry": device, "variant": variant, "n": n})
        for device in devices
        for test in ("tests/kernels/test_a.py::a", "tests/kernels/test_a.py::b", "tests/test_b.py::b")
        for variant in ("cpu", "portable")
        for n in range(3)
    ]
    on_the_first = [case.nodeid for case in cases if case.params["cl_entry"] is devices[0]]
    expected = {name for name in on_the_first if "[cpu" in name}
    assert {*kept(cases, devices)} == expected | {"tests/test_b.py::b[portable-0-2]"}
    # Without a device that chooses the portable variant it runs on the first, and of a kernel's tests in the first.
    of_the_first_test = ("::a[portable-0-2]", "test_b.py::b[portable-0-2]")
    few = [name for name in on_the_first if "[cpu" in name or name.endswith(of_the_first_test)]
    assert kept([case for case in cases if case.params["cl_entry"] is not devices[2]], devices[:2]) == few


def test_other_devices_run_the_first_case_of_what_is_for_each(devices: list[Any]) -> None:
    cases = [
        Case(f"{test}[{variant}-{device.index}-{n}]", {"cl_entry": device, "variant": variant, "n": n}, marks)
        for test, marks in (("tests/test_b.py::b", ("each_device",)), ("tests/kernels/test_a.py::a", ()))
        for device in devices
        for variant in ("cpu", "portable")
        for n in range(2)
    ]
    elsewhere = [name for name in kept(cases, devices) if "-0-" not in name]
    assert elsewhere == ["tests/test_b.py::b[cpu-1-0]", "tests/test_b.py::b[portable-2-0]"]


def test_the_first_device_runs_each_value_of_each_parameter(devices: list[Any]) -> None:
    cases = [
        Case(f"tests/kernels/test_a.py::a[{n}-{m}]", {"cl_entry": devices[0], "n": n, "m": m}, ("skip",) * (m > 1))
        for n in range(3)
        for m in range(3)
    ]
    assert [name[-4:-1] for name in kept(cases, devices)] == ["0-0", "0-2", "1-1", "1-2", "2-0", "2-2"]


def test_a_case_that_is_skipped_does_not_count(devices: list[Any]) -> None:
    test = "tests/kernels/test_a.py::a"
    cases = [Case(f"{test}[{n}]", {"cl_entry": devices[1]}, ("each_device", *("skip",) * (n == 0))) for n in range(3)]
    assert kept(cases, devices) == [f"{test}[1]"]


def test_first_and_last_of_a_matrix_and_none_of_full(devices: list[Any]) -> None:
    cases = [Case(f"a[{kind}-{n}]", {"kind": kind}, ("matrix",)) for kind in ("cpu", "gpu") for n in range(4)]
    assert kept(cases, devices) == ["a[cpu-0]", "a[cpu-3]", "a[gpu-0]", "a[gpu-3]"]
    assert kept([Case("b", {}), Case("c[1]", {}), Case("c[2]", {})], devices) == ["b", "c[1]", "c[2]"]
    assert kept([Case("b", {}), Case("c[1]", {}, ("full",)), Case("c[2]", {}, ("full",))], devices) == ["b"]
    assert kept([Case("c[1]", {}), Case("c[2]", {}, ("full",)), Case("c[3]", {})], devices) == ["c[1]", "c[3]"]


def test_an_exhaustive_case_is_in_neither_run(devices: list[Any]) -> None:
    one, more = (
        Case("a[1]", {"cl_entry": devices[0], "n": 1}),
        Case("a[2]", {"cl_entry": devices[0], "n": 2}, ("exhaustive",)),
    )
    assert kept([one, more], devices) == ["a[1]"]
    assert met_in_pairs([one, more], devices) == {more}  # type: ignore[list-item]


def test_what_takes_a_device_for_a_gpu_runs_on_a_gpu(devices: list[Any]) -> None:
    cases = [Case("a[cpu]", {"kind": "cpu"}), Case("a[gpu]", {"kind": "gpu"}, ("as_gpu",))]
    assert kept(cases, devices) == ["a[cpu]"]
    devices[0].kind = "gpu"
    assert kept(cases, devices) == ["a[cpu]", "a[gpu]"]


@pytest.mark.parametrize("marks", [(), ("matrix",)], ids=["", "matrix"])
def test_every_pair_of_values_is_met(devices: list[Any], marks: tuple[str, ...]) -> None:
    cases = [
        Case(
            f"tests/kernels/test_a.py::{test}[{variant}-{device.index}-{dtype}-{length}]",
            {"cl_entry": device, "variant": variant, "dtype": dtype, "width": 7, "length": length},
            (*marks, *("skip",) * (device.index == 2 and dtype == 0)),
        )
        for device in devices
        for test, variants in (("a", ("cpu", "portable")), ("only", ("portable",)))
        for variant in variants
        for dtype in range(4)
        for length in range(3)
    ]
    left = met_in_pairs([*cases, Case("tests/test_b.py::b", {})], devices)  # type: ignore[list-item]
    run_cases = [case for case in cases if case not in left and "skip" not in case.marks]

    def met(among: list[Case]) -> set[Any]:
        found: set[Any] = set()
        for case in among:
            test, (device, variant, dtype, _, length) = case.nodeid.partition("[")[0], case.params.values()
            found.add((test, dtype, length))
            chosen = variant == ("cpu" if device.index < 2 else "portable") or test.endswith("only")
            if device.index == 0 and chosen:
                found |= {(test, "dtype", dtype), (test, "length", length), (test, dtype, length)}
            elif device.index == 0:
                found |= {(0, chosen)} | ({(0, "dtype", 0)} if dtype == 0 else set())  # skipped on the last
            elif chosen:
                found |= {
                    (device.index, chosen, test),
                    (device.index, "dtype", dtype),
                    (device.index, "length", length),
                }
            else:
                found |= {(device.index, chosen)}
        return found

    assert met(run_cases) == met([case for case in cases if "skip" not in case.marks])
    of_each = [[case.nodeid[25:] for case in run_cases if case.params["cl_entry"] is device] for device in devices]
    assert [name for name in of_each[1] if name.startswith("a[portable")] == ["a[portable-1-0-0]"]
    assert len(of_each[1]) == 6  # 4 types with 3 lengths, another test and another variant
    n_pairs = 12 + 12 + 1  # of each test; in the other variant the one type that the last device lacks
    assert len(of_each[0]) < n_pairs if marks else len(of_each[0]) == n_pairs


def test_what_another_device_meets_in_the_variant_that_it_chooses_is_not_met_again(devices: list[Any]) -> None:
    cases = [
        Case(
            f"tests/kernels/test_a.py::{test}[{variant}-{device.index}-{n}]",
            {"cl_entry": device, "variant": variant, "n": n},
            ("skip",) * (device.index == 2 and test == "lacking"),
        )
        for device in devices
        for test in ("a", "b", "lacking")
        for variant in ("cpu", "portable")
        for n in range(3)
    ]

    def kept_on_the_first(cases: list[Case], devices: list[Any]) -> list[str]:
        left = met_in_pairs(cases, devices)  # type: ignore[arg-type]
        names = [case.nodeid[25:] for case in cases if case not in left and case.params["cl_entry"] is devices[0]]
        return [name for name in names if "[portable" in name]

    assert kept_on_the_first(cases, devices) == ["lacking[portable-0-0]"]
    assert kept_on_the_first([case for case in cases if "lacking" not in case.nodeid], devices) == ["a[portable-0-0]"]
    of_two = kept_on_the_first([case for case in cases if case.params["cl_entry"] is not devices[2]], devices[:2])
    assert {name.partition("[")[0] for name in of_two} == {"a", "b", "lacking"}


def test_another_device_has_one_case_of_a_matrix_that_is_no_kernels(devices: list[Any]) -> None:
    cases = [
        Case(f"tests/models/test_a.py::a[{device.index}-{n}]", {"cl_entry": device, "n": n}, ("matrix",))
        for device in devices
        for n in range(3)
    ]
    left = met_in_pairs(cases, devices)  # type: ignore[arg-type]
    assert [case.nodeid[-4:-1] for case in cases if case not in left] == ["0-0", "0-1", "0-2", "1-2", "2-2"]


@pytest.mark.parametrize("files_a_process", [run.FILES_A_PROCESS, run.QUICK_FILES_A_PROCESS])
def test_every_file_is_run_once(files_a_process: int) -> None:
    files = [name for group in run.chunks(files_a_process) for name in group]
    assert sorted(files) == sorted(str(path.relative_to(run.ROOT)) for path in run.ROOT.glob("tests/**/test_*.py"))


def test_the_longest_files_come_first() -> None:
    first = [group[0] for group in run.chunks()]
    assert first[: len(run.LONGEST)] == run.LONGEST[: len(first)], "a file was renamed, or LONGEST is too long"


def test_paths_take_the_place_of_all_files() -> None:
    paths = ["tests/test_run.py", "tests/test_run.py::test_the_longest_files_come_first"]
    assert run.paths_among(["-x", *paths, "-k", "tests or kernels"]) == (paths, ["-x", "-k", "tests or kernels"])


def test_the_summary_counts_what_is_left() -> None:
    outcomes = [run.Outcome([], 0, f"left to the full run: {n} cases\n3 passed in 1 s") for n in (1200, 34)]
    assert run.summary(outcomes)[0] == "1,234 cases of the full matrix are left to LLMCL_TEST_FULL=1"
    assert run.summary(outcomes)[-1] == "6 passed"
    (first, *_) = run.summary([run.Outcome([], 0, "met in pairs by others: 7 cases\n3 passed in 1 s")])
    assert first == "7 cases are left out: others have their pairs of values"


def test_the_summary_names_a_driver_that_is_not_usable_once() -> None:
    """A compiler's message may name a temporary file, which is another in each process."""
    said = [
        f"== {run.SECTION} ==\ntested on one: A, 1\nnot usable: {name} (PoCL), 3.0: /tmp/{n}.c: error\n3 passed in 1 s"
        for n, name in enumerate("BBC")
    ]
    assert run.summary([run.Outcome([], 0, one) for one in said])[:-1] == [
        "tested on one: A, 1",
        "not usable: B (PoCL), 3.0: /tmp/0.c: error",
        "not usable: C (PoCL), 3.0: /tmp/2.c: error",
    ]
