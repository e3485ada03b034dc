"""Selects the device: the preferred or the requested device, if its driver works."""

from __future__ import annotations

import logging
import platform
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from numbers import Integral

from llmcl.errors import DeviceError, shown
from llmcl.runtime.device_probe import fault
from llmcl.runtime.host_memory import scarcity
from llmcl.runtime.icd import half_installed, prepare_icd_loader
from llmcl.runtime.platforms import CRITERIA, KINDS, DeviceEntry, find_devices, rank_devices

_log = logging.getLogger(__name__)


def select_device(request: str | int | None = None) -> DeviceEntry:
    """Returns the device to use: the preferred one, or the device that `request` names (see `choose_device`).

    Tests drivers in order of preference until one works.
    """
    return choose_device(find_devices(), request, fault=fault)


def choose_device(
    entries: Sequence[DeviceEntry],
    request: str | int | None = None,
    *,
    fault: Callable[[DeviceEntry], str | None] = lambda entry: entry.fault,
) -> DeviceEntry:
    """Returns the device in `entries` that `request` names. If several match, returns the preferred device without a
    fault.

    `request` is an index (also as a string of digits), a kind ("gpu", "cpu", "accelerator"), or part of the device or
    platform name, otherwise of the platform version, in upper or lower case. None or "" leaves the choice to the
    ranking. Logs a warning for each preferred device with a fault.

    Raises DeviceError, listing all devices, if no device matches or the match cannot be used.
    """
    ranked = rank_devices(entries)
    if not ranked:
        raise DeviceError(f"no OpenCL device was found; {_advice_without_device()}")
    if not isinstance(request, str | Integral | None):
        raise DeviceError(f"device is {shown(request)}; expected an index, a kind (gpu, cpu) or part of a name")
    text = request.strip() if isinstance(request, str) else ""
    if isinstance(request, Integral) or re.fullmatch(r"-?[0-9]{1,9}", text):
        index = int(request or 0)
        matching, wanted = [entry for entry in ranked if entry.index == index], f"device {shown(index)}"
    elif text == "":
        matching, wanted = ranked, "a device that llmcl can use"
    elif text.lower() in KINDS:
        matching, wanted = (
            [entry for entry in ranked if entry.kind == text.lower()],
            f"a device of kind {text.lower()}",
        )
    else:
        needle = text.lower()
        named = [e for e in ranked if needle in e.name.lower() or needle in e.platform_name.lower()]
        matching = named or [e for e in ranked if needle in e.platform_version.lower()]  # "PoCL", "CUDA" are only there
        wanted = f"a device or platform with {shown(text)} in its name"
    passed_over: list[DeviceEntry] = []
    for entry in matching:
        tried = replace(entry, fault=None if entry.lacks else fault(entry))
        if tried.usable:
            for other in passed_over:
                _log.warning(
                    "%s cannot be used: %s; %s. Using %s", other.label, other.unusable_reason, other.remedy, tried.label
                )
            return tried
        passed_over.append(tried)
    faults = {entry.index: entry for entry in passed_over}
    ranked = [faults.get(entry.index, entry) for entry in ranked]
    listing = "\n".join(_line(entry) for entry in ranked)
    if passed_over:
        first = passed_over[0]
        raise DeviceError(f"{first.label} cannot be used: {first.unusable_reason}; {first.remedy}. Found:\n{listing}")
    if "," in text:
        wanted += " (only generate, chat, run, serve, bench, perplexity and warm take several devices)"
    notes = "".join(f"\n{note}" for note in [*prepare_icd_loader(), *filter(None, [scarcity()])])
    raise DeviceError(
        f"{wanted} was not found; choose with --device an index, a kind (gpu, cpu) or part of a name. "
        f"Found:\n{listing}{notes}"
    )


def explain_choice(entries: Sequence[DeviceEntry]) -> str:
    """Returns one sentence: the device used without a request, and the reason."""
    ranked = rank_devices(entries)
    if not ranked:
        return f"No OpenCL device was found; {_advice_without_device()}"
    usable = [entry for entry in ranked if entry.usable]
    if not usable:
        return f"No device can be used: of {ranked[0].label}, {ranked[0].unusable_reason}; {ranked[0].remedy}."
    first = usable[0]
    if first.index > 0:
        reason = f"device 0, {ranked[0].label}, is preferred but cannot be used"
    elif len(ranked) == 1:
        reason = "it is the only one"
    else:
        reason = next((reason for value, reason in CRITERIA if value(first) != value(ranked[1])), CRITERIA[-1][1])
    return f"Device {first.index} would be used, {first.label}: {reason}."


def _line(entry: DeviceEntry) -> str:
    return f"  {entry.index}: {entry.name}, {entry.platform_name}, {entry.kind}" + (
        "" if entry.usable else f" (cannot be used: {entry.unusable_reason})"
    )


def _driver_to_install(system: str, machine: str) -> str:
    """Say what brings an OpenCL driver to a system (`sys.platform`) on a processor (`platform.machine()`)."""
    if system == "darwin":
        return (
            "install PoCL for the CPU (`brew install pocl`, or pocl from conda-forge); macOS' own OpenCL is deprecated "
            "and llmcl has not been tried with it"
        )
    from_pip = 'install a driver for the CPU with `pip install "llmcl[cpu]"`'
    if system == "win32":
        gpu = "the graphics driver of your GPU's vendor, which brings OpenCL"
        return f"{from_pip}, or {gpu}" if machine == "AMD64" else f"install {gpu}"
    gpu = "the OpenCL driver of your GPU's vendor"
    if machine == "x86_64":
        return f"{from_pip}, or {gpu}"
    pocl = "PoCL for the CPU (Debian and Ubuntu: `apt-get install pocl-opencl-icd`; conda-forge: pocl)"
    return f"install {gpu}, or {pocl}"


def _advice_without_device() -> str:
    if (why := scarcity()) is not None:
        return f"{why}."
    notes = [*prepare_icd_loader(), half_installed()]
    return " ".join([f"{_driver_to_install(sys.platform, platform.machine())}.", *filter(None, notes)])
