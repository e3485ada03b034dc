"""Drivers installed with pip: the rules on made-up folders, the rest in a fresh process, as a user starts it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from llmcl.runtime import icd
from llmcl.runtime.cache_files import cache_dir


class Machine:
    """A made-up machine: the system's ICD folder, folders with pip's libraries, and which libraries work."""

    def __init__(self, root: Path):
        self.system, self.environment = root / "vendors", root / "environment-vendors"
        self.system.mkdir()
        self.environment.mkdir()
        self.root = root
        self.broken: set[str] = set()
        self.probed: list[str] = []

    def library(self, path: str) -> str:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        return str(file)

    def probe(self, library: str) -> str | None:
        self.probed.append(library)
        return "libtbb.so.12 is missing" if library in self.broken else None

    def plan(self, *folders: str) -> tuple[dict[str, str] | None, tuple[str, ...]]:
        libraries = [self.root / folder for folder in folders]
        return icd.plan_entries([self.system, self.environment], libraries, self.probe)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_on_windows_the_driver_of_pip_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in icd.USER_VARIABLES:
        monkeypatch.setenv(variable, "")
    icd.name_windows_driver(tmp_path)
    assert os.environ["OCL_ICD_FILENAMES"] == ""  # there is none
    library = tmp_path / icd.WINDOWS_LIBRARY
    library.parent.mkdir(parents=True)
    library.touch()
    icd.name_windows_driver(tmp_path)
    assert os.environ["OCL_ICD_FILENAMES"] == str(library)
    monkeypatch.setenv("OCL_ICD_FILENAMES", "mine.dll")
    icd.name_windows_driver(tmp_path)
    assert os.environ["OCL_ICD_FILENAMES"] == "mine.dll"


def test_pip_library_joins_the_entries_of_the_system(machine: Machine) -> None:
    (machine.system / "mesa.icd").write_text("libMesaOpenCL.so.1\n")
    (machine.system / "gone.icd").write_text("/nowhere/libgone.so\n")
    (machine.system / "empty.icd").write_text("")
    (machine.system / "binary.icd").write_bytes(b"\xff\xfe\xff")
    (machine.system / "notes.txt").write_text("libnot.so\n")
    pip = machine.library("pip/libintelocl.so")
    assert machine.plan("nothing", "pip") == ({"mesa.icd": "libMesaOpenCL.so.1", icd.OUR_ENTRY: pip}, ())


def test_without_pip_libraries_the_system_is_left_alone(machine: Machine) -> None:
    system = machine.library("opt/libintelocl.so")
    (machine.system / "intel.icd").write_text(system)
    machine.broken.add(system)
    assert machine.plan("pip") == (None, ())
    assert machine.probed == []


def test_the_system_library_is_preferred_to_pips(machine: Machine) -> None:
    (machine.system / "intel.icd").write_text(machine.library("opt/libintelocl.so"))
    machine.library("pip/libintelocl.so")
    assert machine.plan("pip") == (None, ())


def test_pips_library_stands_in_for_a_broken_one_of_the_system(machine: Machine) -> None:
    broken = machine.library("opt/libintelocl.so.2024")
    machine.broken.add(broken)
    (machine.system / "intel.icd").write_text(broken)
    (machine.system / "pocl.icd").write_text("libpocl.so.2")
    pip = machine.library("pip/libintelocl.so")
    entries, notes = machine.plan("pip")
    assert entries == {"pocl.icd": "libpocl.so.2", icd.OUR_ENTRY: pip}
    assert len(notes) == 1 and broken in notes[0] and "libtbb.so.12" in notes[0]


def test_a_half_installed_pip_library_changes_nothing(machine: Machine) -> None:
    (machine.system / "pocl.icd").write_text("libpocl.so.2")
    machine.broken.add(machine.library("pip/libintelocl.so"))
    entries, notes = machine.plan("pip")
    assert entries is None
    assert "libtbb.so.12" in notes[0]


def test_of_two_pip_libraries_the_first_that_works_is_taken(machine: Machine) -> None:
    machine.broken.add(machine.library("a/libintelocl.so"))
    second = machine.library("b/libintelocl.so")
    machine.library("c/libintelocl.so")
    entries, _ = machine.plan("a", "b", "c")
    assert entries == {icd.OUR_ENTRY: second}
    assert machine.root / "c" / "libintelocl.so" not in map(Path, machine.probed)


def test_a_library_known_by_two_names_is_one(machine: Machine) -> None:
    real = machine.library("pip/libintelocl.so")
    (machine.system / "intel.icd").write_text(real)
    (machine.root / "other").symlink_to(machine.root / "pip")
    assert machine.plan("pip", "other") == (None, ())
    assert machine.probed == []


def test_the_environments_own_vendor_folder_is_seen(machine: Machine) -> None:
    (machine.system / "pocl.icd").write_text("libpocl.so.2")
    (machine.environment / "pocl.icd").write_text(machine.library("conda/libpocl.so.2"))
    (machine.environment / "other.icd").write_text(machine.library("conda/libother.so"))
    entries, _ = machine.plan()
    assert entries == {"pocl.icd": "libpocl.so.2", "other.icd": str(machine.root / "conda/libother.so")}


def test_written_folders_are_exact_and_shared_only_when_equal(tmp_path: Path) -> None:
    first = icd.write_entries(tmp_path, {"a.icd": "liba.so"})
    (first / "stranger.icd").write_text("libstranger.so\n")
    (first / "a.icd").write_text("damaged")
    assert icd.write_entries(tmp_path, {"a.icd": "liba.so"}) == first
    assert icd.read_vendor_folder(first) == {"a.icd": "liba.so"}
    other = icd.write_entries(tmp_path, {"a.icd": "libother.so"})
    assert other != first and first.is_dir()


def test_folders_of_environments_that_are_gone_are_removed(tmp_path: Path) -> None:
    library = tmp_path / "environment" / "libintelocl.so"
    library.parent.mkdir()
    library.touch()
    old = icd.write_entries(tmp_path / "icd", {"a.icd": str(library)})
    icd.write_entries(tmp_path / "icd", {"a.icd": "libother.so"})
    assert old.is_dir()
    library.unlink()
    icd.write_entries(tmp_path / "icd", {"a.icd": "libthird.so"})
    assert not old.exists()


def test_a_cache_that_cannot_be_written_is_replaced_for_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    obstacle = tmp_path / "file"
    obstacle.touch()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # a process of tests/run.py ends without what atexit holds
    monkeypatch.setattr(icd, "_temporary", [])
    folder = icd.write_entries(obstacle / "icd", {"a.icd": "liba.so"})
    assert folder.parent == tmp_path
    assert icd.read_vendor_folder(folder) == {"a.icd": "liba.so"}
    monkeypatch.setenv("OCL_ICD_VENDORS", str(folder))
    monkeypatch.setenv(icd.OUR_MARK, str(folder))
    icd.loader_has_read()
    assert not folder.exists() and "OCL_ICD_VENDORS" not in os.environ and icd.OUR_MARK not in os.environ


def test_only_a_successful_probe_is_remembered(
    tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "lib" / "libintelocl.so"
    library.parent.mkdir()
    library.touch()
    answers: list[str | None] = ["broken", None, "not asked"]
    monkeypatch.setattr(icd, "probe_in_child", lambda path: answers.pop(0))
    assert icd.remembered_probe(str(library)) == "broken"
    assert icd.remembered_probe(str(library)) is None
    assert icd.remembered_probe(str(library)) is None
    assert answers == ["not asked"]
    os.utime(library.parent, ns=(1, 1))  # as when a library beside it is removed
    assert icd.remembered_probe(str(library)) == "not asked"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux driver libraries are probed")
def test_the_probe_survives_what_is_not_a_driver(tmp_path: Path) -> None:
    text = tmp_path / "libintelocl.so"
    text.write_text("not a library")
    assert str(text) in (icd.probe_in_child(str(text)) or "")
    assert "clGetPlatformIDs" in (icd.probe_in_child("libc.so.6") or "")


@pytest.mark.parametrize(
    ("entry_", "expected"),
    [
        ("/venv/lib/python3.12/site-packages", "/venv/lib"),
        ("/home/user/.local/lib/python3.12/site-packages", "/home/user/.local/lib"),
        ("/venv/lib64/python3.12/site-packages", "/venv/lib"),
        ("/usr/local/lib/python3.12/dist-packages", "/usr/local/lib"),
        ("/any/target", "/any/target/lib"),
    ],
)
def test_libraries_are_sought_beside_the_packages(monkeypatch: pytest.MonkeyPatch, entry_: str, expected: str) -> None:
    monkeypatch.setattr(sys, "path", ["", entry_])
    assert Path(expected) in icd.library_folders()


def test_a_package_without_its_libraries_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "prefix"))
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert icd.half_installed() is None
    (tmp_path / "intel_opencl_rt-2026.2.0.dist-info").mkdir()
    assert str(tmp_path) in (icd.half_installed() or "")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / icd.INTEL_CPU_LIBRARY).touch()
    assert icd.half_installed() is None


LIST_PLATFORMS = """
import os
from llmcl.runtime.platforms import find_devices
from llmcl.runtime.selection import select_device
for entry in find_devices():
    print(entry.platform_name)
print("vendors:", os.environ.get("OCL_ICD_VENDORS"))
"""
HAS_PIP_INTEL = any((folder / icd.INTEL_CPU_LIBRARY).is_file() for folder in icd.library_folders())
needs_pip_intel = pytest.mark.skipif(
    not HAS_PIP_INTEL or "oclgrind" in os.environ.get("LD_PRELOAD", ""),
    reason='the package intel-opencl-rt is not installed: pip install "llmcl[cpu]" on x86-64',
)


def run_python(code: str, cache: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A Python process whose environment holds nothing but the search path, the cache and `environment`."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env={"PATH": os.environ.get("PATH", ""), "LLMCL_CACHE_DIR": str(cache), **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )


@needs_pip_intel
def test_a_pip_installed_driver_needs_no_environment_variable(tmp_path: Path) -> None:
    lines = run_python(LIST_PLATFORMS, tmp_path).stdout.splitlines()
    assert any(line.startswith("Intel") for line in lines[:-1])
    assert lines[-1].startswith(f"vendors: {tmp_path}")


@needs_pip_intel
@pytest.mark.parametrize("variable", icd.USER_VARIABLES)
def test_a_users_choice_of_drivers_is_respected(tmp_path: Path, variable: str) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    code = LIST_PLATFORMS + "from llmcl.runtime.selection import explain_choice; print(explain_choice([]))"
    lines = run_python(code, tmp_path / "cache", **{variable: str(empty)}).stdout.splitlines()
    assert not any(line.startswith("Intel") for line in lines)
    assert not (tmp_path / "cache").exists()
    assert f"{variable}={empty} is set" in lines[-1]


@needs_pip_intel
def test_a_half_installed_driver_is_left_out_and_named(tmp_path: Path) -> None:
    source = next(folder for folder in icd.library_folders() if (folder / icd.INTEL_CPU_LIBRARY).is_file())
    half = tmp_path / "lib"
    half.mkdir()
    for file in source.glob("*.so*"):
        if not file.name.startswith("libcommon_clang"):
            (half / file.name).symlink_to(file)
    code = f"""
from llmcl.runtime import icd
icd.library_folders = lambda: [icd.Path({str(half)!r})]
{LIST_PLATFORMS}
print(icd.prepare_icd_loader())
"""
    lines = run_python(code, tmp_path / "cache").stdout.splitlines()
    assert not any(line.startswith("Intel") for line in lines)
    assert lines[-2] == "vendors: None"
    assert str(half) in lines[-1] and "libcommon_clang" in lines[-1] and "pip install" in lines[-1]


@needs_pip_intel
def test_a_child_process_makes_its_own_choice(tmp_path: Path) -> None:
    code = f"""
import os, subprocess, sys
from llmcl.runtime.icd import prepare_icd_loader
prepare_icd_loader()
os.environ["LLMCL_CACHE_DIR"] = {str(tmp_path / "child")!r}
subprocess.run([sys.executable, "-c", {LIST_PLATFORMS!r}], check=True)
"""
    assert f"vendors: {tmp_path / 'child'}" in run_python(code, tmp_path / "parent").stdout


@needs_pip_intel
def test_no_folder_is_left_behind_by_a_process_that_a_signal_ends(tmp_path: Path) -> None:
    obstacle, temporary = tmp_path / "file", tmp_path / "tmp"
    obstacle.touch()
    temporary.mkdir()
    code = """
import os, signal
from llmcl.runtime.platforms import find_devices
print(*{entry.platform_name for entry in find_devices()}, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    with pytest.raises(subprocess.CalledProcessError) as ended:
        run_python(code, obstacle / "cache", TMPDIR=str(temporary))
    assert "Intel" in ended.value.stdout and ended.value.returncode == -signal.SIGKILL
    assert not list(temporary.iterdir())


@pytest.mark.slow
@needs_pip_intel
def test_processes_that_start_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LIST_PLATFORMS]
    environment = {**os.environ, "LLMCL_CACHE_DIR": str(tmp_path)}
    for name in (icd.OUR_MARK, *icd.USER_VARIABLES):
        environment.pop(name, None)
    children = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    outputs = [child.communicate(timeout=120)[0] for child in children]
    assert all(child.returncode == 0 for child in children)
    assert "Intel" in outputs[0]
    assert set(outputs) == {outputs[0]}


@pytest.mark.slow
def test_listing_devices_opens_none_of_them(tmp_path: Path) -> None:
    code = """
import pyopencl as cl
opened = []
cl.Context = lambda *args, **kwargs: opened.append(args)
from llmcl.runtime.platforms import find_devices
from llmcl.runtime.device_probe import checked
from llmcl.runtime.selection import explain_choice
explain_choice(checked(find_devices()))
assert not opened
"""
    run_python(code, tmp_path, **{name: os.environ[name] for name in ("LD_PRELOAD",) if name in os.environ})


def test_the_cache_folder_can_be_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LLMCL_CACHE_DIR", str(tmp_path))
    assert cache_dir() == tmp_path
    monkeypatch.delenv("LLMCL_CACHE_DIR")
    assert cache_dir() != tmp_path
    assert "llmcl" in cache_dir().parts
