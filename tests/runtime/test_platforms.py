"""Finding devices and choosing one: the rules on made-up devices, the rest on this machine's."""

from __future__ import annotations

import dataclasses
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmcl.errors import DeviceError
from llmcl.runtime.device_probe import checked
from llmcl.runtime.host_memory import host_available_bytes
from llmcl.runtime.platforms import KINDS, DeviceEntry, find_devices, rank_devices, vendor_facts
from llmcl.runtime.selection import choose_device, explain_choice, select_device

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
        "facts": {},
        "is_software": False,
        "extensions": (),
        "lacks": None,
        "device": None,
    }
    return DeviceEntry(**{**values, **changes})


DISCRETE = entry("Card A", "gpu", "Maker A", global_mem_bytes=12 * GIB)
LARGER = entry("Card B", "gpu", "Maker B", global_mem_bytes=24 * GIB)
LARGER_GENERIC = entry("Card B", "gpu", "rusticl", global_mem_bytes=25 * GIB)
INTEGRATED = entry("Chip graphics", "gpu", "Maker C", global_mem_bytes=48 * GIB, unified_memory=True)
ACCELERATOR = entry("Board", "accelerator", "Maker D")
INTEL_CPU = entry("Processor", "cpu", "Intel(R) OpenCL", facts={"is_intel_cpu": True})
POCL = entry(
    "pthread-Processor",
    "cpu",
    "Portable Computing Language",
    platform_version="OpenCL 3.0 PoCL 3.0",
    facts={"is_pocl": True},
)
OTHER_CPU = entry("Processor", "cpu", "Maker E", compute_units=64)
LLVMPIPE = entry("llvmpipe (LLVM 15)", "cpu", "rusticl", is_software=True, compute_units=128)
TOO_OLD = entry("Old card", "gpu", "Maker F", lacks="it offers OpenCL 1.1, and 1.2 is needed")
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
        ("pocl", POCL),
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


@pytest.mark.parametrize("request_", [10**5000, "9" * 5000, 1.5, b"cpu", []], ids=lambda x: type(x).__name__)
def test_what_names_no_device_is_refused_in_short(request_: Any) -> None:
    with pytest.raises(DeviceError) as caught:
        choose_device(IN_ORDER, request_)
    assert str(caught.value).startswith(("device ", "a device or platform with '99"))
    assert len(str(caught.value).splitlines()[0]) < 220
    assert choose_device(IN_ORDER, np.int64(0)) == choose_device(IN_ORDER, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("request_", [9, "old card"])
def test_a_device_that_lacks_something_is_refused_by_what_it_lacks(request_: str | int) -> None:
    with pytest.raises(DeviceError, match=r"Old card \(Maker F\) cannot be used: it offers OpenCL 1\.1, and 1\.2 is"):
        choose_device(IN_ORDER, request_)


def test_only_unusable_devices_are_no_devices() -> None:
    with pytest.raises(DeviceError, match="Old card"):
        choose_device([TOO_OLD])
    assert "Old card" in explain_choice([TOO_OLD])


REFUSING = "its driver cannot compile a small kernel (error: unknown target CPU 'generic')"
BROKEN_POCL = dataclasses.replace(POCL, fault=REFUSING)


@pytest.mark.parametrize("request_", [None, "cpu", "processor"])
def test_a_driver_with_a_fault_is_passed_over(request_: str | None, caplog: pytest.LogCaptureFixture) -> None:
    """The others keep their places; those after the first that works are not asked."""
    asked: list[str] = []

    def fault(entry: DeviceEntry) -> str | None:
        asked.append(entry.platform_name)
        return REFUSING if entry.fact("is_intel_cpu") else None

    chosen = choose_device([INTEL_CPU, POCL, OTHER_CPU], request_, fault=fault)
    assert chosen.fact("is_pocl") and chosen.index == 1 and chosen.usable
    assert asked == ["Intel(R) OpenCL", "Portable Computing Language"]
    (message,) = caplog.messages
    assert REFUSING in message and message.endswith(f"Using {POCL.label}")


@pytest.mark.parametrize("request_", [1, "pocl", "pthread"])
def test_a_request_for_a_driver_with_a_fault_says_what_is_wrong_and_what_to_do(request_: str | int) -> None:
    with pytest.raises(DeviceError) as caught:
        choose_device([INTEL_CPU, BROKEN_POCL, OTHER_CPU], request_)
    first, *listed = str(caught.value).splitlines()
    assert first.startswith(f"{POCL.label} cannot be used: {REFUSING}; install")
    assert "pocl-opencl-icd" in first
    assert caught.value.exit_code == 3
    assert [REFUSING in line for line in listed] == [False, True, False]


def test_of_two_drivers_with_a_name_the_one_that_works_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    newer = dataclasses.replace(POCL, name="pthread-skylake", platform_version="OpenCL 3.0 PoCL 3.1")
    assert choose_device([BROKEN_POCL, newer], "pocl").name == "pthread-skylake"
    assert REFUSING in caplog.text


def test_the_explanation_passes_over_what_has_a_fault() -> None:
    broken = dataclasses.replace(INTEL_CPU, fault=REFUSING)
    sentence = explain_choice([broken, POCL])
    assert sentence.startswith(f"Device 1 would be used, {POCL.label}: device 0, {INTEL_CPU.label}, is preferred but")
    assert "pocl-opencl-icd" in explain_choice([BROKEN_POCL])


def test_no_device_for_lack_of_memory_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """No driver begins with 400 MB of address space."""
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (400 << 20, resource.RLIM_INFINITY))
    with pytest.raises(DeviceError, match=r"may use 400 MiB of address space.*raise it \(ulimit -v unlimited\)"):
        choose_device([])
    with pytest.raises(DeviceError, match=r"(?s)'intel' in its name was not found.*this process may use 400 MiB"):
        choose_device([POCL], "intel")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64 << 30, 64 << 30))
    assert "install" in explain_choice([])


@pytest.mark.parametrize("kilobytes", [400_000, pytest.param(700_000, marks=pytest.mark.slow)])
def test_a_process_with_too_little_address_space_asks_no_driver(kilobytes: int) -> None:
    """PoCL ends the process with 400 MB; with 700 MB a driver opened a device and failed later."""
    command = f"ulimit -v {kilobytes}; exec {shlex.quote(sys.executable)} -m llmcl devices"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    said = " ".join((ended.stdout + ended.stderr).split())
    assert f"may use {kilobytes >> 10} MiB of address space" in said and "(ulimit -v unlimited)" in said
    assert "PTHREAD" not in said


@pytest.mark.parametrize(
    ("system", "machine", "says"),
    [
        ("linux", "x86_64", 'pip install "llmcl[cpu]"'),
        ("linux", "aarch64", "pocl-opencl-icd"),
        ("win32", "AMD64", 'pip install "llmcl[cpu]"'),
        ("win32", "ARM64", "graphics driver"),
        ("darwin", "arm64", "brew install pocl"),
    ],
)
def test_no_device_says_what_to_install(system: str, machine: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", system)
    monkeypatch.setattr("platform.machine", lambda: machine)
    with pytest.raises(DeviceError, match=r"no OpenCL device was found; install .*driver|PoCL"):
        choose_device([])
    assert says in explain_choice([])
    assert ("pip install" in explain_choice([])) == (machine in ("x86_64", "AMD64"))


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


def test_vendor_facts() -> None:
    """As pyopencl names the properties of cl_nv_device_attribute_query; other devices raise AttributeError."""
    h100 = SimpleNamespace(compute_capability_major_nv=9, compute_capability_minor_nv=0)
    assert vendor_facts(h100, "NVIDIA CUDA", is_cpu=False) == {"ptx_arch": 90, "is_intel_cpu": False, "is_pocl": False}
    other = SimpleNamespace()
    assert vendor_facts(other, "Intel(R) OpenCL", is_cpu=True)["is_intel_cpu"]
    assert not any(vendor_facts(other, "Intel(R) OpenCL Graphics", is_cpu=False).values())
    assert vendor_facts(other, "Portable Computing Language", is_cpu=True)["is_pocl"]
    assert DISCRETE.fact("ptx_arch") == 0


def test_every_device_found_is_described(cl_entry: DeviceEntry) -> None:
    assert cl_entry.usable and cl_entry.unusable_reason is None
    assert cl_entry.kind in KINDS
    assert cl_entry.opencl_version >= (1, 2) and cl_entry.opencl_c_version >= (1, 2)
    assert cl_entry.compute_units >= 1 and cl_entry.max_work_group_size >= 1
    assert cl_entry.local_mem_bytes >= 16384
    assert 0 < cl_entry.max_alloc_bytes <= cl_entry.global_mem_bytes
    assert cl_entry.fact("is_intel_cpu") + cl_entry.fact("is_pocl") + cl_entry.is_software <= 1
    if cl_entry.kind == "cpu" and sys.platform == "linux":
        assert cl_entry.host_available_bytes is not None and cl_entry.host_available_bytes > 0
    assert cl_entry.device.name.strip().split() == cl_entry.name.split()


def test_the_list_is_ranked_and_stable() -> None:
    first, second = find_devices(), find_devices()
    assert [(e.index, e.label) for e in first] == [(e.index, e.label) for e in second]
    assert [e.index for e in first] == list(range(len(first)))
    usable = [entry for entry in checked(first) if entry.usable]
    assert select_device().index == usable[0].index
    assert select_device(usable[-1].index).label == usable[-1].label


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
