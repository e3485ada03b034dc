"""Fixtures for every test: OpenCL devices, and a cache of the tests' own.

A test with the fixture `device` (or `cl_entry`) runs once on each OpenCL device found, and its id names it.
`LLMCL_TEST_DEVICE=pocl,gpu` keeps to the devices whose id, name or platform holds one of these words;
`LLMCL_TEST_REQUIRE=pocl,llvmpipe` makes it an error when one of these is missing. The end of a run says
which of the implementations that llmcl is tested on were not found, and which devices have a driver that does not work.
Of several PoCLs the preferred one is tested; a word for another alone (`pocl-2`, `3.1+debian`) asks for that.

A run has two tiers. Without LLMCL_TEST_FULL=1 it has the first device alone, the one that llmcl would choose, unless
LLMCL_TEST_DEVICE names others, and no case marked `slow` (`-m slow` asks for those). With it, a slow case runs on the
first device that takes it, all others on every device.
"""

from __future__ import annotations

import gc
import io
import logging
import os
import runpy
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import instructions
import pytest
from browser import find_browser
from echo_engine import Engine
from helpers import option_variables
from hypothesis import HealthCheck, settings
from own_cache import use_own_cache
from programs import ROOT, Run
from tiers import is_full
from which_devices import chosen_devices, named_devices, not_chosen, runs_variant, taken

from llmcl.runtime.cache_files import cache_dir, make_folder
from llmcl.runtime.device_probe import checked
from llmcl.runtime.platforms import DeviceEntry, find_devices

# A run draws the examples of the last one, so that a run fails only by a change: `pytest --hypothesis-profile=new`
# draws others. A shared machine makes examples and their drawing slow at times, which is no defect.
settings.register_profile("new", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("llmcl", settings.get_profile("new"), derandomize=True)
settings.load_profile("llmcl")

if TYPE_CHECKING:
    from llmcl.engine.llm import LLM
    from llmcl.runtime.device import Device

os.environ.setdefault("LLMCL_COMPILE_JOBS", "1")  # tests run side by side themselves
LEFT = pytest.StashKey[int]()  # the number of cases that are left to the full run
NOT_CHOSEN = pytest.StashKey[int]()  # of cases of variants that their device does not choose
ELSEWHERE = pytest.StashKey[int]()  # of slow cases that another device runs
EXPECTED = {
    "intel-cpu": 'pip install "llmcl[cpu]", x86-64 only',
    "pocl": 'pip install "llmcl[pocl]", or the system package pocl-opencl-icd',
    "llvmpipe": "the system package mesa-opencl-icd, with RUSTICL_ENABLE=llvmpipe",
    "oclgrind": "the system package oclgrind",
    "gpu": "a GPU and its vendor's OpenCL driver",
    "chromium": "the system package chromium; the server's page is not tested in a browser",
}


@cache
def all_devices() -> list[DeviceEntry]:
    return checked(find_devices())


@cache
def found_devices() -> dict[str, DeviceEntry]:
    """Every usable device by its id."""
    return named_devices(all_devices())


@cache
def tested_devices() -> dict[str, DeviceEntry]:
    wanted = os.environ.get("LLMCL_TEST_DEVICE", "")
    devices = chosen_devices(found_devices(), wanted)
    return devices if wanted or is_full() else dict([*devices.items()][:1])


def missing(names: list[str]) -> list[str]:
    found = [*found_devices(), *(["oclgrind"] if shutil.which("oclgrind") else [])]
    found += ["chromium"] if find_browser() else []
    return [name for name in names if not any(known.startswith(name) for known in found)]


def pytest_configure() -> None:
    try:
        instructions.hide()
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None
    use_own_cache()
    # A shell's background job ignores Ctrl-C, and so would the tests of it and the programs that they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_sessionstart() -> None:
    required = os.environ.get("LLMCL_TEST_REQUIRE", "").split(",")
    absent = missing([name for name in required if name not in ("", "compilers")])  # check_compilers.py asks for those
    if absent:
        unusable = "".join(
            f"\n{entry.label} is not usable: {entry.unusable_reason}"
            for entry in all_devices()
            if entry.unusable_reason
        )
        raise pytest.UsageError(f"LLMCL_TEST_REQUIRE names what is not found: {', '.join(absent)}{unusable}")
    if not tested_devices():
        raise pytest.UsageError(
            f"no OpenCL device to test on (LLMCL_TEST_DEVICE={os.environ.get('LLMCL_TEST_DEVICE', '')!r}); "
            f"found: {', '.join(found_devices()) or 'none'}"
        )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "cl_entry" in metafunc.fixturenames:
        devices = tested_devices()
        metafunc.parametrize("cl_entry", devices.values(), ids=devices.keys(), indirect=True, scope="session")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what the tier and the devices do not run; the summary says how many cases."""
    devices = [*tested_devices().values()]
    left: list[pytest.Item] = []
    of_another_variant: list[pytest.Item] = []
    slow: dict[str, list[pytest.Item]] = {}  # by what is left of a case's id without its device
    names = [*tested_devices()]
    no_gpu = bool(missing(["gpu"]))
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        variant, entry = parameters.get("variant"), parameters.get("cl_entry")
        small = item.get_closest_marker("oclgrind")
        small_in = (small.args or ("cpu", "portable")) if small else ()
        if no_gpu and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no GPU found"))
        if item.get_closest_marker("slow") and not is_full() and not config.option.markexpr:
            left.append(item)
        elif variant and entry and not runs_variant(variant, entry, devices, small_in):
            of_another_variant.append(item)
        elif entry and item.get_closest_marker("slow"):
            slow.setdefault(item.nodeid.replace(names[devices.index(entry)], "", 1), []).append(item)
        elif parameters.get("kind") == "cpu" and not_chosen(devices[0]) == "cpu":
            item.add_marker(pytest.mark.skip(reason="the first device is no CPU, whose variants take others minutes"))
    elsewhere = [item for items_of_a_case in slow.values() for item in by_device(items_of_a_case, devices)[1:]]
    config.stash[LEFT], config.stash[NOT_CHOSEN], config.stash[ELSEWHERE] = map(
        len, (left, of_another_variant, elsewhere)
    )
    deselected = {*left, *of_another_variant, *elsewhere}
    config.hook.pytest_deselected(items=[*deselected])
    items[:] = [item for item in items if item not in deselected]


def by_device(items: list[pytest.Item], devices: list[DeviceEntry]) -> list[pytest.Item]:
    return sorted(items, key=lambda item: devices.index(item.callspec.params["cl_entry"]))  # type: ignore[attr-defined]


def pytest_collection_finish() -> None:
    gc.freeze()  # what was collected stays to the end, and garbage is not looked for there


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for words, key in (
        ("left to the full run", LEFT),
        ("of variants that the device does not choose", NOT_CHOSEN),
        ("slow ones that another device runs", ELSEWHERE),
    ):
        if config.stash.get(key, 0):
            terminalreporter.line(f"{words}: {config.stash[key]} cases")
    terminalreporter.section("OpenCL implementations")
    terminalreporter.line(instructions.in_words())
    for name, entry in tested_devices().items():
        terminalreporter.line(f"tested on {name}: {entry.label}, {entry.platform_version}")
    if tuple(found_devices()) == ("oclgrind",):
        return  # the simulator hides the others
    why = "by LLMCL_TEST_DEVICE" if os.environ.get("LLMCL_TEST_DEVICE") else "left to the full run"
    for name, entry in found_devices().items():
        if name not in tested_devices():
            other = entry.fact("is_pocl") and name != "pocl"
            reason = f"another PoCL is tested; LLMCL_TEST_DEVICE={name} asks for this" if other else why
            terminalreporter.line(f"left out: {name}, {entry.label}, {entry.driver_version} ({reason})")
    for entry in all_devices():
        if not entry.usable:
            terminalreporter.line(f"not usable: {entry.label}, {entry.driver_version}: {entry.unusable_reason}")
    for name in missing([*EXPECTED]):
        terminalreporter.line(f"not found: {name} ({EXPECTED[name]})")


@pytest.fixture(scope="module")
def separate_launches_in_module() -> Iterator[None]:
    """No model of a module has a persistent kernel on a CPU, which takes a second to compile for each shape.

    tests/kernels/test_persistent_step.py shows that it computes the same bits.
    """
    with pytest.MonkeyPatch.context() as patch:
        have_separate_launches(patch)
        yield


@pytest.fixture
def separate_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """No model has a persistent kernel on a CPU."""
    have_separate_launches(monkeypatch)


def have_separate_launches(patch: pytest.MonkeyPatch) -> None:
    from llmcl.kernels.cpu.persistent_step import CpuPersistentStep

    patch.setattr(CpuPersistentStep, "supports_device", lambda row, device: False)


@pytest.fixture(scope="session")
def cl_entry(request: pytest.FixtureRequest) -> DeviceEntry:
    """Each OpenCL device found, as `find_devices()` describes it."""
    entry: DeviceEntry = request.param
    return entry


@pytest.fixture(scope="session")
def device(cl_entry: DeviceEntry) -> Iterator[Device]:
    """Each OpenCL device found, opened once for all tests."""
    from llmcl.runtime.device import Device

    opened = Device.open(cl_entry)
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def default_entry() -> DeviceEntry:
    """The one device that llmcl would choose, as `find_devices()` describes it."""
    return next(iter(tested_devices().values()))


@pytest.fixture(scope="module", params=["as it is", pytest.param("as a GPU", marks=pytest.mark.slow)])
def either_entry(request: pytest.FixtureRequest, default_entry: DeviceEntry) -> DeviceEntry:
    """The default device as it is, and taken for a GPU."""
    return taken(default_entry, request.param)


@pytest.fixture(scope="session")
def default_device(default_entry: DeviceEntry) -> Iterator[Device]:
    """The same, opened: for tests whose subject is not the device."""
    from llmcl.runtime.device import Device

    opened = Device.open(default_entry)
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def smollm2(default_device: Device) -> Iterator[LLM]:
    """The demo model on the default device, activations and cache in float32, a context of 1024 tokens.

    Its weights stay quantised: a token then takes a sixth of the time that it would with weights in float32.
    """
    import llmcl

    options: dict[str, Any] = {"activation_dtype": "float32", "kv_dtype": "float32", "max_context": 1024}
    with llmcl.load("smollm2", device=default_device.entry.index, **options) as llm:
        yield llm


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder for this test and the programs it starts."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("LLMCL_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def no_findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder for this test and the programs it starts in which nothing is said of a device that was tuned or
    judged. What drivers compiled and answered is that of all tests.
    """
    folder, shared = tmp_path / "cache", cache_dir()
    folder.mkdir(mode=0o700)
    make_folder(shared / "programs")
    for path in shared.iterdir():
        if path.name != "devices":
            (folder / path.name).symlink_to(path)
    monkeypatch.setenv("LLMCL_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Stands in for every model that the command line loads."""
    import llmcl

    engine = Engine()

    def load(model: str, **settings: Any) -> Engine:
        engine.loaded = settings | {"model": model}
        return engine

    monkeypatch.setattr(llmcl, "load", load)
    for name in option_variables():
        monkeypatch.delenv(name)
    return engine


@pytest.fixture
def run_here(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """run_here("llmcl", *arguments, stdin="", **variables): as a process gives it, but in this one, which is quicker.

    In place of "llmcl" the name of a file of scripts/ may stand. The options' own variables are not set.
    """
    from llmcl.cli import main

    def run(program: str, *arguments: str, stdin: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
        with monkeypatch.context() as patch:
            for name in option_variables():
                patch.delenv(name)
            patch.setenv("LLMCL_CACHE_DIR", os.environ["LLMCL_CACHE_DIR"])  # `llmcl warm` sets it
            for name, value in variables.items():
                patch.setenv(name, value)
            patch.chdir(ROOT)
            patch.setattr(sys, "argv", [program, *arguments])
            patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
            with pytest.raises(SystemExit) as end:
                main() if program == "llmcl" else runpy.run_path(str(ROOT / "scripts" / program), run_name="__main__")
        assert isinstance(end.value.code, int)
        return subprocess.CompletedProcess([program, *arguments], end.value.code, *capsys.readouterr())

    return run


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs `llmcl` with these arguments in this process; its exit code."""
    from llmcl.cli import main

    def invoke(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["llmcl", *arguments])
        with pytest.raises(SystemExit) as exit:
            main()
        assert isinstance(exit.value.code, int)
        return exit.value.code

    return invoke


@pytest.fixture(autouse=True)
def logger_as_it_was() -> Iterator[None]:
    """A command that is run in this process changes it (-q, -v), and a later test would miss a warning."""
    logger = logging.getLogger("llmcl")
    level, handlers = logger.level, logger.handlers
    yield
    logger.setLevel(level)
    logger.handlers = handlers
