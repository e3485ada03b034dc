"""What `make test` leaves to the full run, and that no test file is left out."""

from __future__ import annotations

import shutil
import signal
from types import SimpleNamespace
from typing import Any

import pytest
import run
import which_devices
from which_devices import runs_variant

CPU, OTHER_CPU, RENDERER, SIMULATOR = (
    SimpleNamespace(
        kind="cpu", is_software=software, platform_name=platform, name=name, fact=lambda name: name == "is_intel_cpu"
    )
    for software, platform, name in [
        (False, "Intel(R) OpenCL", "a CPU"),
        (False, "Portable Computing Language", "a CPU"),
        (True, "rusticl", "llvmpipe (LLVM)"),
        (True, "Oclgrind", "Oclgrind Simulator"),
    ]
)


@pytest.mark.parametrize(
    ("entry", "devices", "full", "expected"),
    [
        (CPU, [CPU], False, {"cpu", "cpu small", "portable small"}),  # without Oclgrind
        (CPU, [CPU, OTHER_CPU, RENDERER], True, {"cpu", "cpu small", "portable small"}),
        (CPU, [CPU, OTHER_CPU], True, {"cpu", "cpu small", "portable", "portable small"}),
        (OTHER_CPU, [CPU, OTHER_CPU], True, {"cpu", "cpu small"}),
        (RENDERER, [RENDERER], False, {"portable", "portable small"}),
        (SIMULATOR, [SIMULATOR], False, {"portable small"}),
        (SIMULATOR, [SIMULATOR], True, {"cpu small", "portable small"}),
    ],
)
def test_a_device_runs_the_variants_that_it_chooses(
    entry: Any, devices: list[Any], full: bool, expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(which_devices, "is_full", lambda: full)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    small_in: dict[str, tuple[str, ...]] = {"": (), " small": ("cpu", "portable")}
    kept = {
        variant + size
        for variant in ("cpu", "portable")
        for size in small_in
        if runs_variant(variant, entry, devices, small_in[size])
    }
    assert kept == expected


def test_the_simulator_runs_the_small_cases_of_the_portable_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(which_devices, "is_full", lambda: False)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert not runs_variant("portable", CPU, [CPU], ("cpu", "portable"))
    assert not runs_variant("cpu", SIMULATOR, [SIMULATOR], ("portable",))


def test_slow_cases_are_left_to_the_full_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a file with both. Within this process: to import what tests import takes seconds."""
    file = str(run.ROOT / "tests/reference/test_sampling.py")
    for full, mark, left in (("", "", True), ("1", "", False), ("", "slow", False)):
        monkeypatch.setenv(run.FULL, full)
        options = ["-q", "--collect-only", *(["-m", mark] if mark else []), *run.IGNORED]
        code = pytest.main([file, *options, "-p", "no:cacheprovider"])
        said = capsys.readouterr().out
        assert code == 0, said
        assert ("left to the full run: 5 cases" in said) == left
        assert ("[1.7-" in said) != left


def test_every_file_is_run_once() -> None:
    files = [name for group in run.chunks() for name in group]
    assert sorted(files) == sorted(str(path.relative_to(run.ROOT)) for path in run.ROOT.glob("tests/**/test_*.py"))


def test_the_longest_files_come_first() -> None:
    first = [group[0] for group in run.chunks()]
    assert first[: len(run.LONGEST)] == run.LONGEST[: len(first)], "a file was renamed, or LONGEST is too long"


def test_paths_take_the_place_of_all_files() -> None:
    paths = ["tests/test_run.py", "tests/test_run.py::test_the_longest_files_come_first"]
    assert run.paths_among(["-x", *paths, "-k", "tests or kernels"]) == (paths, ["-x", "-k", "tests or kernels"])


def test_the_summary_counts_what_is_left() -> None:
    outcomes = [run.Outcome([], 0, f"left to the full run: {n} cases\n3 passed in 1 s") for n in (1200, 34)]
    assert run.summary(outcomes)[0] == "1,234 slow cases are left to LLMCL_TEST_FULL=1"
    assert run.summary(outcomes)[-1] == "6 passed"
    said = "of variants that the device does not choose: 7 cases\n3 passed in 1 s"
    assert run.summary([run.Outcome([], 0, said)])[0] == "7 cases are of kernels that the device does not choose"


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


def test_a_process_that_catches_sigabrt_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "GRACE_S", 0.1)
    process = run.APART.Process(target=signal.pause)
    process.start()
    monkeypatch.setattr(signal, "SIGABRT", signal.SIGCONT)
    run.end(process, process.pid or 0)
    assert process.exitcode == -signal.SIGKILL
