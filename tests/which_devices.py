"""Which of the devices found the tests run on, and what they are called in the ids of tests."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Collection, Sequence

from tiers import is_full

from llmcl.runtime.platforms import DeviceEntry


def device_id(entry: DeviceEntry) -> str:
    """A short name of what is under test: the implementation, or for a GPU its model."""
    if entry.is_software:
        return "oclgrind" if "Oclgrind" in entry.platform_name else entry.name.split(" ")[0].lower()
    if entry.kind == "cpu" and (entry.fact("is_intel_cpu") or entry.fact("is_pocl")):
        return "intel-cpu" if entry.fact("is_intel_cpu") else "pocl"
    return f"{entry.kind}-" + re.sub(r"[^a-z0-9]+", "-", f"{entry.name} {entry.platform_name}".lower()).strip("-")


def named_devices(entries: Sequence[DeviceEntry]) -> dict[str, DeviceEntry]:
    """The usable devices by their ids."""
    devices: dict[str, DeviceEntry] = {}
    for entry in entries:
        if entry.usable:
            name = device_id(entry)
            devices[f"{name}-{entry.index}" if name in devices else name] = entry
    return devices


def chosen_devices(found: dict[str, DeviceEntry], wanted: str) -> dict[str, DeviceEntry]:
    """Those that a list of words asks for: all without one, but one PoCL, unless a word is for another alone."""
    words = [word.lower() for word in wanted.split(",") if word]

    def named_by(name: str) -> set[str]:
        entry = found[name]
        text = f"{name} {entry.name} {entry.platform_name} {entry.platform_version}".lower()
        return {word for word in words if word in text}

    return {
        name: entry
        for name, entry in found.items()
        if (
            named_by(name) - named_by("pocl")
            if entry.fact("is_pocl") and name != "pocl"
            else named_by(name) or not words
        )
    }


def not_chosen(entry: DeviceEntry) -> str:
    """The variant of kernels that is for devices of the other kind; a software renderer takes what GPUs take."""
    return "portable" if entry.kind == "cpu" and not entry.is_software else "cpu"


def runs_variant(
    variant: str, entry: DeviceEntry, devices: Sequence[DeviceEntry], small_in: Collection[str] = ()
) -> bool:
    """Whether a case of a kernel's variant runs on one of the tested devices; small_in: in which variants it is small.

    A device runs the variants that it chooses, Oclgrind the small cases. In the full run the first device also runs the
    small cases of the portable variant, and all of them if no other device chooses it; `make test` leaves the small
    cases to Oclgrind where that is installed, which then runs no others. Other compilers than a CPU's take tens of
    seconds for a CPU's variant.
    """
    if device_id(entry) == "oclgrind" and variant in ("cpu", "portable"):
        return variant in small_in and (variant == "portable" or is_full())
    if variant != not_chosen(entry):
        return True
    if variant != "portable" or entry is not devices[0]:
        return False
    if is_full():
        return variant in small_in or all(not_chosen(other) == variant for other in devices)
    return variant in small_in and shutil.which("oclgrind") is None


def taken(entry: DeviceEntry, how: str) -> DeviceEntry:
    """how: "as it is", or "as a GPU", which gets the kernels for GPUs and runs a step ahead of the host."""
    return dataclasses.replace(entry, kind="gpu") if how == "as a GPU" else entry
