"""Which cases of the matrix of devices, variants and parameters a run has: the rules of `--quick` and `--pairs`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import pytest
from covering import covering

from llmcl.runtime.platforms import DeviceEntry

Pair = tuple[tuple[str, object], tuple[str, object]]


def left_to_the_full_run(items: Sequence[pytest.Item], devices: Sequence[DeviceEntry]) -> set[pytest.Item]:
    """The cases that `--quick` leaves out.

    A test that takes no device runs with all its cases. On the first device one runs with as many cases as have each
    value of its parameters. One marked `matrix` runs with its first case and its last in each variant of its kernel. In
    a variant that the device does not choose a test that has no others runs on the first other device that chooses it
    if there is one: Intel's compiler takes six times as long for a portable kernel as that of a software renderer. Of
    the others the last case runs, of a file of tests/kernels that of its first test, if no other device chooses the
    variant. On every other device the first case of a test marked `each_device` runs, in the variant that it chooses. A
    test or a case marked `full` or `exhaustive` does not run, nor on another device than a GPU one marked `as_gpu`.
    """
    first = devices[0]
    on_the_first: dict[tuple[str, object], list[pytest.Item]] = {}  # by test and variant
    on_another: dict[tuple[str, int], list[pytest.Item]] = {}  # by test and device: in the variant that it chooses
    by_index = {entry.index: entry for entry in devices}
    chosen_by = next((entry.index for entry in devices[1:] if not_chosen(entry) != not_chosen(first)), None)
    where_chosen: dict[str, list[pytest.Item]] = {}  # by test: in the variant that the first device does not choose
    for item in items:
        if item.get_closest_marker("full") or is_exhaustive(item):
            continue
        if item.get_closest_marker("as_gpu") and first.kind != "gpu":
            continue
        parameters = parameters_of(item)
        variant = parameters.get("variant", parameters.get("kind"))
        entry = parameters.get("cl_entry")
        if entry is None or entry.index == first.index:
            on_the_first.setdefault((test_of(item), variant), []).append(item)
        else:
            if item.get_closest_marker("each_device") and variant != not_chosen(by_index[entry.index]):
                on_another.setdefault((test_of(item), entry.index), []).append(item)
            in_the_other = entry.index == chosen_by and variant == not_chosen(first)
            if in_the_other and item.nodeid.startswith("tests/kernels/") and not item.get_closest_marker("skip"):
                where_chosen.setdefault(test_of(item), []).append(item)
    kept: set[pytest.Item] = set()
    not_met: dict[str, list[pytest.Item]] = {}  # by file or test: in the variant that no device chooses
    for (test, variant), cases in on_the_first.items():
        has_others = any(other == test for other, named in on_the_first if named != variant)
        is_matrix = cases[0].get_closest_marker("matrix")
        if variant == not_chosen(first) and has_others:
            if test not in where_chosen:
                which = test.partition("::")[0] if test.startswith("tests/kernels/") else test
                not_met.setdefault(which, []).append(first_that_runs(cases[::-1]))
        else:
            if variant == not_chosen(first):
                cases = where_chosen.get(test, cases)
            takes_a_device = "cl_entry" in parameters_of(cases[0])
            kept.update([cases[0], cases[-1]] if is_matrix else with_each_value(cases) if takes_a_device else cases)
    kept.update(first_that_runs(cases) for cases in not_met.values())
    kept.update(first_that_runs(cases) for cases in on_another.values())
    return {item for item in items if item not in kept}


def first_that_runs(cases: Sequence[pytest.Item]) -> pytest.Item:
    """The first that is not skipped, if there is one."""
    return next((case for case in cases if not case.get_closest_marker("skip")), cases[0])


def with_each_value(cases: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Of the cases of a test as many as have each value of its parameters. Those that are skipped have none."""
    skipped = {case for case in cases if case.get_closest_marker("skip")}
    return skipped | covering({case: {*values_of(case)} for case in cases if case not in skipped})


def met_in_pairs(items: Sequence[pytest.Item], devices: Sequence[DeviceEntry]) -> set[pytest.Item]:
    """The cases that `--pairs` leaves out: others have each pair of their values.

    The first device keeps all cases, but of a test marked `matrix` as many as have all pairs. In the variant that it
    does not choose, and on every other device, a case of each test is kept, and in each file as many as meet the device
    with all values of a parameter; of a test marked `matrix` that is no kernel's only the last. Tests and values that
    the first other device that chooses that variant meets in it are not met again on the first. In the variant that a
    device does not choose the first case of each file is kept at least. A case marked `exhaustive` is not.
    """
    chosen_by = next((entry.index for entry in devices[1:] if not_chosen(entry) != not_chosen(devices[0])), None)
    by_index = {entry.index: entry for entry in devices}
    tests: dict[str, list[pytest.Item]] = {}  # on the first device, or on none
    files: dict[tuple[str, int, bool], list[pytest.Item]] = {}  # elsewhere; is the variant the device's choice?
    others = variants_of([item for item in items if not item.get_closest_marker("skip")])
    for item in items:
        index, variant = target_of(item)
        if item.get_closest_marker("skip") or is_exhaustive(item) or not (index is not None or is_matrix(item)):
            continue
        entry = devices[0] if index is None else by_index[index]
        is_chosen = variant != not_chosen(entry) or len(others[test_of(item), index]) == 1
        if entry is devices[0] and is_chosen:
            tests.setdefault(test_of(item), []).append(item)
        else:
            files.setdefault((item.nodeid.partition("::")[0], entry.index, is_chosen), []).append(item)
    kept: set[pytest.Item] = set()
    for (file, index, is_chosen), cases in files.items():
        if is_chosen or index == devices[0].index:
            others_there = () if is_chosen or chosen_by is None else files.get((file, chosen_by, True), ())
            kept |= with_each_value_of_the_file(cases, others_there)
        else:
            kept.add(cases[0])
    met: dict[str, set[Pair]] = {}  # by test
    for case in kept:
        met.setdefault(test_of(case), set()).update(pairs_of(case))
    for test, cases in tests.items():
        found = {case: pairs_of(case) for case in cases}
        kept |= covering(found, met.get(test, ())) if is_matrix(cases[0]) else {*cases}
    left = {case for cases in (*tests.values(), *files.values()) for case in cases if case not in kept}
    return left | {item for item in items if is_exhaustive(item)}


def variants_of(items: Sequence[pytest.Item]) -> dict[tuple[str, int | None], set[object]]:
    """By test and the index of the device."""
    found: dict[tuple[str, int | None], set[object]] = {}
    for item in items:
        index, variant = target_of(item)
        found.setdefault((test_of(item), index), set()).add(variant)
    return found


def with_each_value_of_the_file(cases: Sequence[pytest.Item], elsewhere: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Of the cases of a file one of each test and as many as have all values, but for what is met elsewhere.

    The first where all is.
    """
    of_tests: dict[str, list[pytest.Item]] = {}
    for case in cases:
        of_tests.setdefault(test_of(case), []).append(case)
    tests_elsewhere = {test_of(case) for case in elsewhere}
    kept = {
        of_test[-1] if is_matrix(of_test[0]) else of_test[0]
        for test, of_test in of_tests.items()
        if test not in tests_elsewhere
    }
    todo = [case for case in cases if case.nodeid.startswith("tests/kernels/") or not is_matrix(case)]
    met = {value for case in (*kept, *elsewhere) for value in single_values_of(case)}
    return kept | covering({case: single_values_of(case) for case in todo}, met) or {cases[0]}


def pairs_of(case: pytest.Item) -> set[Pair]:
    """Of a case without parameters but its device and variant, that with itself."""
    values = values_of(case)
    return {*combinations(values, 2)} or {(values[0], values[0])}


def values_of(case: pytest.Item) -> list[tuple[str, object]]:
    """A device and a variant count as one value, and names that are given values together."""
    parameters = {
        name: repr(value) for name, value in parameters_of(case).items() if name not in ("cl_entry", "variant")
    }
    values: list[tuple[str, object]] = [("target", target_of(case))]
    for mark in case.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        values.append((str(names), tuple(parameters.pop(name.strip(), "") for name in names)))
    return [*values, *parameters.items()]


def single_values_of(case: pytest.Item) -> set[tuple[str, str]]:
    """Of each parameter but the device and the variant."""
    return {(name, repr(value)) for name, value in parameters_of(case).items() if name not in ("cl_entry", "variant")}


def target_of(case: pytest.Item) -> tuple[int | None, object]:
    """The index of the device, and the variant; None where a test takes none."""
    parameters = parameters_of(case)
    entry = parameters.get("cl_entry")
    return entry and entry.index, parameters.get("variant")


def test_of(case: pytest.Item) -> str:
    return case.nodeid.partition("[")[0]


def parameters_of(item: pytest.Item) -> dict[str, Any]:
    return getattr(getattr(item, "callspec", None), "params", {})


def is_matrix(item: pytest.Item) -> bool:
    return item.get_closest_marker("matrix") is not None and hasattr(item, "callspec")


def is_exhaustive(item: pytest.Item) -> bool:
    return item.get_closest_marker("exhaustive") is not None


def not_chosen(entry: DeviceEntry) -> str:
    """The variant of kernels that is for devices of the other kind; a software renderer takes what GPUs take."""
    return "portable" if entry.kind == "cpu" and not entry.is_software else "cpu"
