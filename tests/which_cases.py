"""Which cases of the matrix of devices, variants and parameters a run has: the rules of `--quick` and `--pairs`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import combinations
from typing import Any

import pytest

from llmcl.runtime.platforms import DeviceEntry

Pair = tuple[tuple[str, object], tuple[str, object]]


def left_to_the_full_run(items: Sequence[pytest.Item], devices: Sequence[DeviceEntry]) -> set[pytest.Item]:
    """The cases that `--quick` leaves out.

    A test that takes no device runs with all its cases. On the first device one runs with as many cases as have each
    value of its parameters. One marked `matrix` runs with its first case and its last in each variant of its kernel. In
    a variant that the device does not choose a test runs with its last case. On every other device the first case of
    each file of tests/kernels runs, in the others. A test or a case marked `full` does not run, nor on another device
    than a GPU one marked `as_gpu`.
    """
    first = devices[0]
    on_the_first: dict[tuple[str, object], list[pytest.Item]] = {}  # by test and variant
    on_another: dict[tuple[str, int], dict[object, list[pytest.Item]]] = {}  # by file and device, then by variant
    for item in items:
        if item.get_closest_marker("full") or (item.get_closest_marker("as_gpu") and first.kind != "gpu"):
            continue
        parameters = parameters_of(item)
        variant = parameters.get("variant", parameters.get("kind"))
        entry = parameters.get("cl_entry")
        if entry is None or entry.index == first.index:
            on_the_first.setdefault((item.nodeid.partition("[")[0], variant), []).append(item)
        elif item.nodeid.startswith("tests/kernels/"):
            variants = on_another.setdefault((item.nodeid.partition("::")[0], entry.index), {})
            variants.setdefault(variant, []).append(item)
    kept: set[pytest.Item] = set()
    for (test, variant), cases in on_the_first.items():
        is_matrix = cases[0].get_closest_marker("matrix")
        has_others = any(other == test for other, named in on_the_first if named != variant)
        if variant == not_chosen(first) and has_others:
            kept.add(next((case for case in cases[::-1] if not case.get_closest_marker("skip")), cases[-1]))
        else:
            takes_a_device = "cl_entry" in parameters_of(cases[0])
            kept.update([cases[0], cases[-1]] if is_matrix else with_each_value(cases) if takes_a_device else cases)
    by_index = {entry.index: entry for entry in devices}
    for (_, index), variants in on_another.items():
        for variant, cases in variants.items():
            if variant != not_chosen(by_index[index]) or not variants.keys() & {"cpu", "portable"} - {variant}:
                kept.add(next((case for case in cases if not case.get_closest_marker("skip")), cases[0]))
    return {item for item in items if item not in kept}


def with_each_value(cases: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Of the cases of a test as many as have each value of its parameters. Those that are skipped have none."""
    skipped = {case for case in cases if case.get_closest_marker("skip")}
    return skipped | covering({case: {*values_of(case)} for case in cases if case not in skipped})


def covering(found: dict[pytest.Item, set[Any]], met: Collection[Any] = ()) -> set[pytest.Item]:
    """As many of these cases as have everything that is found in any of them and not in `met`."""
    kept, missing = set(), set().union(*found.values()) - set(met)
    while missing:
        best = max(found, key=lambda case: len(found[case] & missing))
        kept.add(best)
        missing -= found[best]
    return kept


def met_in_pairs(items: Sequence[pytest.Item], devices: Sequence[DeviceEntry]) -> set[pytest.Item]:
    """The cases that `--pairs` leaves out: others have each pair of their values.

    A device and a variant of the kernel count as one value. The first device keeps all cases, but of a test marked
    `matrix` as many as have all pairs. Every other device keeps as many as meet it with all values, and in the variant
    that it does not choose the first case. Of a test marked `matrix` that is no kernel's it keeps the last case.
    """
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if ("cl_entry" in parameters_of(item) or is_matrix(item)) and not item.get_closest_marker("skip"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return {case for cases in tests.values() for case in {*cases} - fewest(cases, devices)}


def fewest(cases: Sequence[pytest.Item], devices: Sequence[DeviceEntry]) -> set[pytest.Item]:
    """Of the cases of a test those that `met_in_pairs` keeps."""
    by_target: dict[tuple[object, object], list[pytest.Item]] = {}  # by device and variant
    for case in cases:
        by_target.setdefault(target_of(case), []).append(case)
    kept, todo = set(), []
    for (index, variant), of_target in by_target.items():
        entry = next((entry for entry in devices if entry.index == index), devices[0])
        others = {other for device, other in by_target if device == index} - {variant}
        if entry != devices[0] and variant == not_chosen(entry) and others:
            kept.add(of_target[0])
        elif entry != devices[0] and is_matrix(of_target[0]) and not of_target[0].nodeid.startswith("tests/kernels/"):
            kept.add(of_target[-1])
        elif entry == devices[0] and not is_matrix(of_target[0]):
            kept.update(of_target)
        else:
            todo += of_target
    met = {pair for case in kept for pair in pairs_of(case)}
    return kept | covering({case: pairs_of(case) for case in todo}, met)


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


def target_of(case: pytest.Item) -> tuple[object, object]:
    """The index of the device, and the variant; None where a test takes none."""
    parameters = parameters_of(case)
    entry = parameters.get("cl_entry")
    return entry and entry.index, parameters.get("variant")


def parameters_of(item: pytest.Item) -> dict[str, Any]:
    return getattr(getattr(item, "callspec", None), "params", {})


def is_matrix(item: pytest.Item) -> bool:
    return item.get_closest_marker("matrix") is not None and hasattr(item, "callspec")


def not_chosen(entry: DeviceEntry) -> str:
    """The variant of kernels that is for devices of the other kind; a software renderer takes what GPUs take."""
    return "portable" if entry.kind == "cpu" and not entry.is_software else "cpu"
