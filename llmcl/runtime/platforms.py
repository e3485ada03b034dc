"""Finds OpenCL devices, describes their abilities, and ranks them.

There is no list of allowed devices: OpenCL 1.2 with a compiler and ordinary float32 is enough. Nothing here opens a
context, so listing is cheap and leaves no trace. A separate process tests whether a driver's compiler works
(device_probe.py), and the result is remembered.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from llmcl.errors import DeviceError
from llmcl.runtime.host_memory import LEAST_ADDRESS_SPACE, host_available_bytes, scarce_address_space
from llmcl.runtime.icd import loader_has_read, prepare_icd_loader

if TYPE_CHECKING:
    import pyopencl as cl

_log = logging.getLogger(__name__)

POCL = "Portable Computing Language"  # PoCL's platform name
KINDS = ("gpu", "accelerator", "cpu", "custom")  # in order of preference
MINIMUM_VERSION = (1, 2)
_SOFTWARE = re.compile(r"llvmpipe|softpipe|swrast|oclgrind|emulat", re.IGNORECASE)
_GENERIC_DRIVER = re.compile(r"rusticl|clover|portable computing language", re.IGNORECASE)


@dataclass(frozen=True)
class DeviceEntry:
    """One device on one platform. Hardware offered by several drivers has several entries."""

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
    facts: Mapping[str, int] = field(hash=False)
    """Facts about one vendor's devices, by name (see `vendor_facts`). Read with `fact`."""
    is_software: bool
    """A simulator or a software renderer: made to be correct, not fast."""
    extensions: tuple[str, ...]
    lacks: str | None
    """What the device does not have and llmcl needs."""
    device: cl.Device = field(repr=False, compare=False)
    fault: str | None = None
    """How its driver failed at a small kernel; None: it did not, or was not asked (see `device_probe.checked`)."""

    def fact(self, name: str) -> int:
        """Returns a vendor's fact, or 0 for a device without it."""
        return self.facts.get(name, 0)

    @property
    def label(self) -> str:
        return f"{self.name} ({self.platform_name})"

    @property
    def unusable_reason(self) -> str | None:
        """Why the device cannot be used, or None."""
        return self.lacks or self.fault

    @property
    def usable(self) -> bool:
        return self.unusable_reason is None

    @property
    def remedy(self) -> str | None:
        """What makes the device usable, or an alternative."""
        if self.usable:
            return None
        if self.lacks:
            return "update its driver or choose another device"
        if self.fact("is_pocl"):
            return (
                "install another PoCL, such as the system's package (Debian and Ubuntu: `apt-get install "
                "pocl-opencl-icd`), or choose another device"
            )
        return "update or reinstall its driver, or choose another device"


# ---- finding ----------------------------------------------------------------------------------------------


def find_devices() -> list[DeviceEntry]:
    """Returns every device on every platform, preferred first, unusable last; [] if there is none.

    Does not test drivers, and asks none if the address space is too small for any. Raises DeviceError if pyopencl
    cannot be imported.
    """
    if (limit := scarce_address_space()) is not None and limit < LEAST_ADDRESS_SPACE:
        return []
    prepare_icd_loader()
    try:
        import pyopencl as cl
    except ImportError as error:
        raise DeviceError(
            f"pyopencl cannot be imported: {error}; reinstall it: `pip install --force-reinstall pyopencl`"
        ) from error
    try:
        platforms = cl.get_platforms()
    except cl.Error:  # how the ICD loader reports that there are no platforms
        platforms = []
    loader_has_read()
    entries = []
    for cl_platform in platforms:
        try:
            devices = cl_platform.get_devices()
        except cl.Error:  # a driver without hardware
            continue
        for device in devices:
            try:
                entries.append(_describe(cl_platform, device))
            except cl.Error:  # a device that answers no queries: lost, or reset
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
        facts=vendor_facts(device, platform_name, kind == "cpu" and not is_software),
        is_software=is_software,
        extensions=extensions,
        lacks=_lacks(device),
        device=device,
    )


def vendor_facts(device: cl.Device, platform_name: str, is_cpu: bool) -> dict[str, int]:
    """Returns the facts that kernels and choices read, all in one place."""
    major, minor = (_query(device, f"compute_capability_{part}_nv", 0) for part in ("major", "minor"))
    return {
        "ptx_arch": 10 * major + minor,  # NVIDIA: the PTX that the driver takes in inline assembly, 90 for sm_90
        "is_intel_cpu": is_cpu and platform_name.startswith("Intel"),
        "is_pocl": platform_name == POCL,
    }


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

    kinds = ("cpu", "gpu", "accelerator")
    return next((kind for kind in kinds if device_type & getattr(cl.device_type, kind.upper())), "custom")


def _version(text: str) -> tuple[int, int]:
    match = re.search(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _clean(text: str) -> str:
    return " ".join(text.replace("\0", " ").split())


def _query(device: cl.Device, name: str, default: Any) -> Any:
    """Returns a property, or the default with drivers too old to know it."""
    import pyopencl as cl

    try:
        return getattr(device, name)
    except (cl.Error, AttributeError):
        return default


# ---- ranking ----------------------------------------------------------------------------------------------

# Compares two devices in this order; the smaller value wins. The sentence is for `explain_choice`.
CRITERIA: tuple[tuple[Callable[[DeviceEntry], Any], str], ...] = (
    (lambda e: e.lacks is not None, "it is the only one that meets the minimum"),
    (lambda e: e.is_software, "software renderers and simulators come last"),
    (lambda e: KINDS.index(e.kind), "a GPU is preferred to an accelerator, an accelerator to a CPU"),
    (
        lambda e: (0 if e.fact("is_intel_cpu") else 1 if e.fact("is_pocl") else 2) if e.kind == "cpu" else 0,
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
    """Returns the entries in order of preference, with `index` set to the position. Equals keep their order."""
    ranked = sorted(entries, key=lambda entry: tuple(value(entry) for value, _ in CRITERIA))
    return [replace(entry, index=index) for index, entry in enumerate(ranked)]
