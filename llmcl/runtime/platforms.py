"""Which OpenCL devices there are, what each can do, and which one is used.

No device is on a list of allowed ones: OpenCL 1.2 with a compiler and ordinary float32 is enough. Nothing
here opens a context, so listing devices is cheap and leaves no trace on them; whether a driver's compiler works
is found out in another process (device_probe.py), and remembered.
"""

from __future__ import annotations

import logging
import platform
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmcl.errors import DeviceError
from llmcl.runtime.icd import half_installed, prepare_icd_loader

if TYPE_CHECKING:
    import pyopencl as cl

__all__ = [
    "DeviceEntry",
    "choose_device",
    "explain_choice",
    "find_devices",
    "prepare_icd_loader",
    "rank_devices",
    "select_device",
]

_log = logging.getLogger(__name__)

POCL = "Portable Computing Language"  # its platform's name
KINDS = ("gpu", "accelerator", "cpu", "custom")  # in order of preference
MINIMUM_VERSION = (1, 2)
_SOFTWARE = re.compile(r"llvmpipe|softpipe|swrast|oclgrind|emulat", re.IGNORECASE)
_GENERIC_DRIVER = re.compile(r"rusticl|clover|portable computing language", re.IGNORECASE)


@dataclass(frozen=True)
class DeviceEntry:
    """One device of one platform; the same hardware has an entry for each driver that offers it."""

    index: int
    """Position in `find_devices()`, which lists the preferred device first; a fault does not change it."""
    name: str
    kind: str
    """One of KINDS; simulators and software renderers are "cpu", whatever they claim."""
    vendor: str
    platform_name: str
    platform_version: str
    platform_vendor: str
    driver_version: str
    opencl_version: tuple[int, int]
    opencl_c_version: tuple[int, int]
    """The OpenCL C version compiled by default."""
    compute_units: int
    max_work_group_size: int
    local_mem_bytes: int
    global_mem_bytes: int
    max_alloc_bytes: int
    """The largest single buffer."""
    host_available_bytes: int | None
    """For a device in the host's memory: what the operating system and the container leave free."""
    unified_memory: bool
    has_fp16: bool
    has_subgroups: bool
    ptx_arch: int
    """The architecture whose PTX the driver takes in inline assembly, 90 for sm_90; 0: none."""
    is_intel_cpu: bool
    is_pocl: bool
    is_software: bool
    """A simulator or a software renderer: made to be correct, not fast."""
    extensions: tuple[str, ...]
    lacks: str | None
    """What the device does not have and llmcl needs."""
    device: cl.Device = field(repr=False, compare=False)
    fault: str | None = None
    """How its driver failed at a small kernel; None: it did not, or was not asked (see `device_probe.checked`)."""

    @property
    def label(self) -> str:
        return f"{self.name} ({self.platform_name})"

    @property
    def why_not(self) -> str | None:
        """Why the device cannot be used."""
        return self.lacks or self.fault

    @property
    def usable(self) -> bool:
        return self.why_not is None

    @property
    def remedy(self) -> str | None:
        """What makes it usable, or serves instead."""
        if self.usable:
            return None
        if self.lacks:
            return "update its driver or choose another device"
        if self.is_pocl:
            return (
                "install another PoCL, such as the system's package (Debian and Ubuntu: `apt-get install "
                "pocl-opencl-icd`), or choose another device"
            )
        return "update or reinstall its driver, or choose another device"


# ---- finding ----------------------------------------------------------------------------------------------


def find_devices() -> list[DeviceEntry]:
    """Every device of every platform, the preferred one first, those that lack something last; [] if there is none.

    Their drivers are not tried here. Raises DeviceError where pyopencl itself cannot be imported.
    """
    prepare_icd_loader()
    try:
        import pyopencl as cl
    except ImportError as error:
        raise DeviceError(
            f"pyopencl cannot be imported: {error}; reinstall it: `pip install --force-reinstall pyopencl`"
        ) from error
    try:
        platforms = cl.get_platforms()
    except cl.Error:  # the ICD loader's way to say that there is none
        platforms = []
    entries = []
    for cl_platform in platforms:
        try:
            devices = cl_platform.get_devices()
        except cl.Error:  # a driver without hardware
            continue
        for device in devices:
            try:
                entries.append(_describe(cl_platform, device))
            except cl.Error:  # a device that answers no questions: lost, or reset
                continue
    return rank_devices(entries)


def _describe(cl_platform: cl.Platform, device: cl.Device) -> DeviceEntry:
    name, platform_name = _clean(device.name), _clean(cl_platform.name)
    is_software = bool(_SOFTWARE.search(f"{name} {platform_name}"))
    kind = "cpu" if is_software else _kind(device.type)
    unified = bool(device.host_unified_memory) or kind == "cpu"
    extensions = tuple(device.extensions.split())
    return DeviceEntry(
        index=0,
        name=name,
        kind=kind,
        vendor=_clean(device.vendor),
        platform_name=platform_name,
        platform_version=_clean(cl_platform.version),
        platform_vendor=_clean(cl_platform.vendor),
        driver_version=_clean(device.driver_version),
        opencl_version=_version(device.version),
        opencl_c_version=_version(device.opencl_c_version),
        compute_units=device.max_compute_units,
        max_work_group_size=device.max_work_group_size,
        local_mem_bytes=device.local_mem_size,
        global_mem_bytes=device.global_mem_size,
        max_alloc_bytes=device.max_mem_alloc_size,
        host_available_bytes=host_available_bytes() if unified else None,
        unified_memory=unified,
        has_fp16="cl_khr_fp16" in extensions,
        has_subgroups="cl_khr_subgroups" in extensions
        or "cl_intel_subgroups" in extensions
        or _query(device, "max_num_sub_groups", 0) > 0,
        ptx_arch=10 * _query(device, "compute_capability_major_nv", 0)
        + _query(device, "compute_capability_minor_nv", 0),
        is_intel_cpu=kind == "cpu" and not is_software and platform_name.startswith("Intel"),
        is_pocl=platform_name == POCL,
        is_software=is_software,
        extensions=extensions,
        lacks=_lacks(device),
        device=device,
    )


def _lacks(device: cl.Device) -> str | None:
    import pyopencl as cl

    version = min(_version(device.version), _version(device.opencl_c_version))
    needed_float = cl.device_fp_config.INF_NAN | cl.device_fp_config.ROUND_TO_NEAREST
    if version < MINIMUM_VERSION:
        return f"it offers OpenCL {version[0]}.{version[1]}, and 1.2 is needed"
    if not device.available:
        return "its driver says that it is not available"
    if not device.compiler_available:
        return "its driver has no compiler"
    if not device.endian_little:
        return "it is big-endian"
    if device.single_fp_config & needed_float != needed_float:
        return "its float32 has no infinities or does not round to nearest"
    return None


def _kind(device_type: int) -> str:
    import pyopencl as cl

    for kind, bit in (
        ("cpu", cl.device_type.CPU),
        ("gpu", cl.device_type.GPU),
        ("accelerator", cl.device_type.ACCELERATOR),
    ):
        if device_type & bit:
            return kind
    return "custom"


def _version(text: str) -> tuple[int, int]:
    match = re.search(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _clean(text: str) -> str:
    return " ".join(text.replace("\0", " ").split())


def _ptx_arch(device: cl.Device) -> int:
    major, minor = (_query(device, f"compute_capability_{part}_nv", 0) for part in ("major", "minor"))
    return int(10 * major + minor)


def _query(device: cl.Device, name: str, default: Any) -> Any:
    """A property that older drivers do not know."""
    import pyopencl as cl

    try:
        return getattr(device, name)
    except (cl.Error, AttributeError):
        return default


def host_available_bytes(root: Path = Path("/")) -> int | None:
    """Bytes of host memory to be had without swapping, within the limits of this process's control group.

    None where the system does not say (it does on Linux).
    """
    try:
        meminfo = (root / "proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return None
    match = re.search(r"^MemAvailable:\s*(\d+) kB", meminfo, re.MULTILINE)
    available = int(match[1]) * 1024 if match else None
    for folder, limit_file, usage_file in _cgroup_folders(root):
        try:
            limit = int((folder / limit_file).read_text())
            usage = int((folder / usage_file).read_text())
            statistics = (folder / "memory.stat").read_text()
        except (OSError, ValueError):  # no such group, or "max": no limit
            continue
        cached = re.search(r"^(?:total_)?inactive_file (\d+)", statistics, re.MULTILINE)
        free = max(limit - usage + (int(cached[1]) if cached else 0), 0)  # cached pages of files give way
        available = free if available is None else min(available, free)
    return available


def _cgroup_folders(root: Path) -> list[tuple[Path, str, str]]:
    """This process's memory control groups, innermost first: folder, names of its limit and usage files."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    folders: list[tuple[Path, str, str]] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            base, names = root / "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        group = Path(path.strip("/"))
        folders.extend((base / part, *names) for part in dict.fromkeys([group, *group.parents, Path(".")]))
    return folders


# ---- choosing ---------------------------------------------------------------------------------------------

# What decides between two devices, in this order: the smaller value wins. The sentence is for
# `explain_choice`.
_CRITERIA: tuple[tuple[Callable[[DeviceEntry], Any], str], ...] = (
    (lambda e: e.lacks is not None, "it is the only one that meets the minimum"),
    (lambda e: e.is_software, "software renderers and simulators come last"),
    (lambda e: KINDS.index(e.kind), "a GPU is preferred to an accelerator, an accelerator to a CPU"),
    (
        lambda e: (0 if e.is_intel_cpu else 1 if e.is_pocl else 2) if e.kind == "cpu" else 0,
        "among CPU drivers Intel's is preferred to PoCL, PoCL to others",
    ),
    (lambda e: e.kind != "cpu" and e.unified_memory, "a device with memory of its own is preferred"),
    (
        lambda e: e.kind != "cpu" and bool(_GENERIC_DRIVER.search(e.platform_name)),
        "the vendor's driver is preferred to a generic one",
    ),
    (lambda e: 0 if e.kind == "cpu" else -e.global_mem_bytes, "the device with more memory is preferred"),
    (lambda e: -e.compute_units, "the device with more compute units is preferred"),
    (lambda e: (e.platform_name, e.name, e.driver_version), "the first of equals is taken"),
)


def rank_devices(entries: Sequence[DeviceEntry]) -> list[DeviceEntry]:
    """The entries in order of preference, `index` set to their position; equals keep their order."""
    ranked = sorted(entries, key=lambda entry: tuple(value(entry) for value, _ in _CRITERIA))
    return [replace(entry, index=index) for index, entry in enumerate(ranked)]


def select_device(request: str | int | None = None) -> DeviceEntry:
    """The device to use: the preferred one, or the one that `request` names (see `choose_device`).

    Drivers are tried in the order of preference until one works.
    """
    from llmcl.runtime.device_probe import fault

    return choose_device(find_devices(), request, fault=fault)


def choose_device(
    entries: Sequence[DeviceEntry],
    request: str | int | None = None,
    *,
    fault: Callable[[DeviceEntry], str | None] = lambda entry: entry.fault,
) -> DeviceEntry:
    """The device among `entries` that `request` names: of several the preferred one whose driver has no fault.

    `request` is an index (also as a string of digits), a kind ("gpu", "cpu", "accelerator"), or part of the
    name of the device or its platform, else of the platform's version, in upper or lower case; None or ""
    leaves the choice to the ranking. A warning names each device that was preferred but has a fault.

    Raises DeviceError, listing what was found, where there is no such device or where it cannot be used.
    """
    ranked = rank_devices(entries)
    if not ranked:
        raise DeviceError(f"no OpenCL device was found; {_advice_without_device()}")
    text = "" if request is None else str(request).strip()
    if text == "":
        matching, wanted = ranked, "a device that llmcl can use"
    elif re.fullmatch(r"-?[0-9]+", text):
        matching, wanted = [entry for entry in ranked if entry.index == int(text)], f"device {text}"
    elif text.lower() in KINDS:
        matching, wanted = (
            [entry for entry in ranked if entry.kind == text.lower()],
            f"a device of kind {text.lower()}",
        )
    else:
        needle = text.lower()
        named = [e for e in ranked if needle in e.name.lower() or needle in e.platform_name.lower()]
        matching = named or [e for e in ranked if needle in e.platform_version.lower()]  # only there "PoCL", "CUDA"
        wanted = f"a device or platform with {text!r} in its name"
    passed_over: list[DeviceEntry] = []
    for entry in matching:
        found = replace(entry, fault=None if entry.lacks else fault(entry))
        if found.usable:
            for other in passed_over:
                _log.warning(
                    "%s cannot be used: %s; %s. Using %s", other.label, other.why_not, other.remedy, found.label
                )
            return found
        passed_over.append(found)
    faults = {entry.index: entry for entry in passed_over}
    ranked = [faults.get(entry.index, entry) for entry in ranked]
    listing = "\n".join(_line(entry) for entry in ranked)
    if passed_over:
        first = passed_over[0]
        raise DeviceError(f"{first.label} cannot be used: {first.why_not}; {first.remedy}. Found:\n{listing}")
    notes = "".join(f"\n{note}" for note in prepare_icd_loader())
    raise DeviceError(
        f"{wanted} was not found; choose with --device an index, a kind (gpu, cpu) or part of a name. "
        f"Found:\n{listing}{notes}"
    )


def explain_choice(entries: Sequence[DeviceEntry] | None = None) -> str:
    """One sentence: which device would be used without a request, and why."""
    if entries is None:
        from llmcl.runtime.device_probe import checked

        entries = checked(find_devices())
    ranked = rank_devices(entries)
    if not ranked:
        return f"No OpenCL device was found; {_advice_without_device()}"
    usable = [entry for entry in ranked if entry.usable]
    if not usable:
        return f"No device can be used: of {ranked[0].label}, {ranked[0].why_not}; {ranked[0].remedy}."
    first = usable[0]
    if first.index > 0:
        reason = f"device 0, {ranked[0].label}, is preferred but cannot be used"
    elif len(ranked) == 1:
        reason = "it is the only one"
    else:
        reason = next((reason for value, reason in _CRITERIA if value(first) != value(ranked[1])), _CRITERIA[-1][1])
    return f"Device {first.index} would be used, {first.label}: {reason}."


def _line(entry: DeviceEntry) -> str:
    return f"  {entry.index}: {entry.name}, {entry.platform_name}, {entry.kind}" + (
        "" if entry.usable else f" (cannot be used: {entry.why_not})"
    )


def _advice_without_device() -> str:
    if sys.platform.startswith("linux") and platform.machine() == "x86_64":
        install = (
            'install a driver for the CPU with `pip install "llmcl[cpu]"`, or the OpenCL driver of your GPU\'s vendor'
        )
    else:
        install = (
            "install your GPU vendor's OpenCL driver, or PoCL for the CPU from the system's package manager "
            "(Debian and Ubuntu: `apt-get install pocl-opencl-icd`)"
        )
    notes = [*prepare_icd_loader(), half_installed()]
    return " ".join([f"{install}.", *filter(None, notes)])
