"""Finding drivers and devices, and choosing one: the rules on made-up devices, the rest on this machine's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmcl.errors import DeviceError
from llmcl.paths import cache_dir
from llmcl.runtime import icd
from llmcl.runtime.platforms import (
    KINDS,
    DeviceEntry,
    choose_device,
    explain_choice,
    find_devices,
    host_available_bytes,
    rank_devices,
    select_device,
)

GIB = 1 << 30


def entry(name: str, kind: str, platform: str, **changes: Any) -> DeviceEntry:
    values: dict[str, Any] = {
        "index": 0,
        "name": name,
        "kind": kind,
        "vendor": "maker",
        "platform_name": platform,
        "platform_version": "OpenCL 3.0",
        "platform_vendor": "maker",
        "driver_version": "1",
        "opencl_version": (3, 0),
        "opencl_c_version": (1, 2),
        "compute_units": 8,
        "max_work_group_size": 1024,
        "local_mem_bytes": 32768,
        "global_mem_bytes": 8 * GIB,
        "max_alloc_bytes": 2 * GIB,
        "host_available_bytes": None,
        "unified_memory": kind == "cpu",
        "has_fp16": False,
        "has_subgroups": False,
        "ptx_arch": 0,
        "is_intel_cpu": False,
        "is_pocl": False,
        "is_software": False,
        "extensions": (),
        "usable": True,
        "why_not": None,
        "device": None,
    }
    return DeviceEntry(**{**values, **changes})


DISCRETE = entry("Card A", "gpu", "Maker A", global_mem_bytes=12 * GIB)
LARGER = entry("Card B", "gpu", "Maker B", global_mem_bytes=24 * GIB)
LARGER_GENERIC = entry("Card B", "gpu", "rusticl", global_mem_bytes=25 * GIB)
INTEGRATED = entry("Chip graphics", "gpu", "Maker C", global_mem_bytes=48 * GIB, unified_memory=True)
ACCELERATOR = entry("Board", "accelerator", "Maker D")
INTEL_CPU = entry("Processor", "cpu", "Intel(R) OpenCL", is_intel_cpu=True)
POCL = entry("pthread-Processor", "cpu", "Portable Computing Language", is_pocl=True)
OTHER_CPU = entry("Processor", "cpu", "Maker E", compute_units=64)
LLVMPIPE = entry("llvmpipe (LLVM 15)", "cpu", "rusticl", is_software=True, compute_units=128)
TOO_OLD = entry("Old card", "gpu", "Maker F", usable=False, why_not="it offers OpenCL 1.1, and 1.2 is needed")
IN_ORDER = [
    LARGER,
    DISCRETE,
    LARGER_GENERIC,
    INTEGRATED,
    ACCELERATOR,
    INTEL_CPU,
    POCL,
    OTHER_CPU,
    LLVMPIPE,
    TOO_OLD,
]


# ---- choosing ---------------------------------------------------------------------------------------------


@given(st.permutations(IN_ORDER))
def test_the_ranking_does_not_depend_on_the_order_found(entries: list[DeviceEntry]) -> None:
    ranked = rank_devices(entries)
    assert [(e.name, e.platform_name) for e in ranked] == [(e.name, e.platform_name) for e in IN_ORDER]
    assert [e.index for e in ranked] == list(range(len(IN_ORDER)))


def test_equal_devices_keep_the_order_of_their_driver() -> None:
    twins = [entry("Card", "gpu", "Maker", device=handle) for handle in ("first", "second")]
    assert [e.device for e in rank_devices(twins)] == ["first", "second"]


@pytest.mark.parametrize(
    ("request_", "chosen"),
    [
        (None, LARGER),
        ("", LARGER),
        (1, DISCRETE),
        ("1", DISCRETE),
        (" 5 ", INTEL_CPU),
        ("gpu", LARGER),
        ("GPU", LARGER),
        ("cpu", INTEL_CPU),
        ("accelerator", ACCELERATOR),
        ("card a", DISCRETE),
        ("portable", POCL),
        ("llvmpipe", LLVMPIPE),
        ("rusticl", LARGER_GENERIC),
        ("processor", INTEL_CPU),
    ],
)
def test_a_request_names_a_device(request_: str | int | None, chosen: DeviceEntry) -> None:
    found = choose_device(IN_ORDER, request_)
    assert (found.name, found.platform_name) == (chosen.name, chosen.platform_name)


@pytest.mark.parametrize("request_", ["voodoo", "99", 99, -1, "-1", "custom"])
def test_an_unknown_device_is_answered_with_those_found(request_: str | int) -> None:
    with pytest.raises(DeviceError) as caught:
        choose_device(IN_ORDER, request_)
    message = str(caught.value)
    assert str(request_) in message
    assert "--device" in message
    listed = [line for line in message.splitlines() if line.startswith("  ")]
    assert len(listed) == len(IN_ORDER)
    assert listed[6] == "  6: pthread-Processor, Portable Computing Language, cpu"


@pytest.mark.parametrize("request_", [9, "old card"])
def test_a_device_that_lacks_something_is_refused_by_what_it_lacks(request_: str | int) -> None:
    with pytest.raises(DeviceError, match=r"Old card \(Maker F\) cannot be used: it offers OpenCL 1\.1, and 1\.2 is"):
        choose_device(IN_ORDER, request_)


def test_only_unusable_devices_are_no_devices() -> None:
    with pytest.raises(DeviceError, match="Old card"):
        choose_device([TOO_OLD])
    assert "Old card" in explain_choice([TOO_OLD])


def test_no_device_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeviceError, match=r"no OpenCL device was found; install .*driver"):
        choose_device([])
    if sys.platform == "linux":
        monkeypatch.setattr("platform.machine", lambda: "x86_64")
        assert 'pip install "llmcl[cpu]"' in explain_choice([])
        monkeypatch.setattr("platform.machine", lambda: "aarch64")
        assert "pocl-opencl-icd" in explain_choice([])


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ([POCL], "the only one"),
        ([INTEL_CPU, POCL], "Intel's is preferred to PoCL"),
        ([POCL, OTHER_CPU], "PoCL to others"),
        ([DISCRETE, INTEL_CPU], "a GPU is preferred"),
        ([ACCELERATOR, INTEL_CPU], "an accelerator to a CPU"),
        ([POCL, LLVMPIPE], "software renderers and simulators come last"),
        ([DISCRETE, INTEGRATED], "memory of its own"),
        ([LARGER, LARGER_GENERIC], "vendor's driver"),
        ([LARGER, DISCRETE], "more memory"),
        ([DISCRETE, TOO_OLD], "meets the minimum"),
        ([DISCRETE, DISCRETE], "first of equals"),
    ],
)
def test_the_explanation_names_what_decided(entries: list[DeviceEntry], reason: str) -> None:
    for order in (entries, entries[::-1]):
        sentence = explain_choice(order)
        assert entries[0].label in sentence
        assert reason in sentence


# ---- finding ----------------------------------------------------------------------------------------------


def test_every_device_found_is_described(cl_entry: DeviceEntry) -> None:
    assert cl_entry.usable and cl_entry.why_not is None
    assert cl_entry.kind in KINDS
    assert cl_entry.opencl_version >= (1, 2) and cl_entry.opencl_c_version >= (1, 2)
    assert cl_entry.compute_units >= 1 and cl_entry.max_work_group_size >= 1
    assert cl_entry.local_mem_bytes >= 16384
    assert 0 < cl_entry.max_alloc_bytes <= cl_entry.global_mem_bytes
    assert cl_entry.is_intel_cpu + cl_entry.is_pocl + cl_entry.is_software <= 1
    if cl_entry.kind == "cpu" and sys.platform == "linux":
        assert cl_entry.host_available_bytes is not None and cl_entry.host_available_bytes > 0
    assert cl_entry.device.name.strip().split() == cl_entry.name.split()


def test_the_list_is_ranked_and_stable() -> None:
    first, second = find_devices(), find_devices()
    assert [(e.index, e.label) for e in first] == [(e.index, e.label) for e in second]
    assert [e.index for e in first] == list(range(len(first)))
    assert select_device().label == first[0].label
    assert select_device(len(first) - 1 if first[-1].usable else 0).usable


def write_machine(root: Path, meminfo_kb: int, group: str, files: dict[str, str]) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable:   {meminfo_kb} kB\n", encoding="ascii")
    (root / "proc/self/cgroup").write_text(group, encoding="ascii")
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="ascii")
    return root


V2 = {"memory.current": "3000\n", "memory.stat": "anon 5\ninactive_file 500\n"}


@pytest.mark.parametrize(
    ("group", "files", "expected"),
    [
        ("0::/\n", {}, 8 * 1024),
        ("0::/\n", {"memory.max": "max\n", **V2}, 8 * 1024),
        ("0::/\n", {"memory.max": "4000\n", **V2}, 1500),
        ("0::/a/b\n", {f"a/{name}": text for name, text in {"memory.max": "4000\n", **V2}.items()}, 1500),
        ("0::/\n", {"memory.max": "2000\n", **V2}, 0),
        ("0::/\n", {"memory.max": "9999999\n", **V2}, 8 * 1024),
        (
            "5:cpu:/\n4:memory:/box\n0::/\n",
            {
                "memory/memory.limit_in_bytes": "4000",
                "memory/memory.usage_in_bytes": "3000",
                "memory/memory.stat": "inactive_file 7\ntotal_inactive_file 7\n",
            },
            1007,
        ),
    ],
)
def test_free_host_memory_heeds_the_control_group(
    tmp_path: Path, group: str, files: dict[str, str], expected: int
) -> None:
    assert host_available_bytes(write_machine(tmp_path, 8, group, files)) == expected


def test_free_host_memory_may_be_unknown(tmp_path: Path) -> None:
    assert host_available_bytes(tmp_path) is None


# ---- ICD files --------------------------------------------------------------------------------------------


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


def test_a_cache_that_cannot_be_written_is_replaced_for_this_process(tmp_path: Path) -> None:
    obstacle = tmp_path / "file"
    obstacle.touch()
    folder = icd.write_entries(obstacle / "icd", {"a.icd": "liba.so"})
    assert icd.read_vendor_folder(folder) == {"a.icd": "liba.so"}


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


# ---- a fresh process, as a user starts it -----------------------------------------------------------------

LIST_PLATFORMS = """
import os
from llmcl.runtime.platforms import find_devices, select_device
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
    code = LIST_PLATFORMS + "from llmcl.runtime.platforms import explain_choice; print(explain_choice([]))"
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
from llmcl.runtime.platforms import prepare_icd_loader
prepare_icd_loader()
os.environ["LLMCL_CACHE_DIR"] = {str(tmp_path / "child")!r}
subprocess.run([sys.executable, "-c", {LIST_PLATFORMS!r}], check=True)
"""
    assert f"vendors: {tmp_path / 'child'}" in run_python(code, tmp_path / "parent").stdout


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


def test_listing_devices_opens_none_of_them(tmp_path: Path) -> None:
    code = """
import pyopencl as cl
opened = []
cl.Context = lambda *args, **kwargs: opened.append(args)
from llmcl.runtime.platforms import explain_choice, find_devices
find_devices(), explain_choice()
assert not opened
"""
    run_python(code, tmp_path, **{name: os.environ[name] for name in ("LD_PRELOAD",) if name in os.environ})


def test_the_cache_folder_can_be_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LLMCL_CACHE_DIR", str(tmp_path))
    assert cache_dir() == tmp_path
    monkeypatch.delenv("LLMCL_CACHE_DIR")
    assert cache_dir() != tmp_path
    assert "llmcl" in cache_dir().parts
