"""`llmcl devices`: lists OpenCL devices and llmcl's choice."""

from __future__ import annotations

import shutil
import textwrap
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from llmcl.cli import options as opt
from llmcl.errors import counted
from llmcl.tools import json_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmcl.runtime.platforms import DeviceEntry

WIDTH = 80
LABEL_WIDTH = 13


def devices(device: opt.Device = None, format: opt.Format = "text") -> None:
    """List the OpenCL devices with their limits and capabilities, and say which one is used and why."""
    from llmcl.runtime.device_probe import checked
    from llmcl.runtime.platforms import find_devices
    from llmcl.runtime.selection import choose_device, explain_choice

    entries = checked(find_devices(), again=True)
    selected: int | list[int] | None
    if device and "," in device:
        selected, reason = _several(entries, device)
    elif device or not entries:
        chosen = choose_device(entries, device)  # raises if there is none, saying what to install
        reason = f"Device {chosen.index} would be used, {chosen.label}: --device {device} names it."
        selected = chosen.index
    else:
        reason = explain_choice(entries)
        selected = next((entry.index for entry in entries if entry.usable), None)
    if format == "json":
        listed = [_as_dict(entry) for entry in entries]
        print(json_text.dumps({"devices": listed, "selected": selected, "reason": reason}))
        return
    width = min(WIDTH, shutil.get_terminal_size().columns)
    for entry in entries:
        print(_described(entry, width) + "\n")
    print(_wrapped("", reason, width))


def _several(entries: Sequence[DeviceEntry], names: str) -> tuple[list[int], str]:
    """Returns the devices named, and what a model divided among them by layers would get."""
    from llmcl.engine.split import SplitRequest, memory_rates
    from llmcl.runtime.device import Device
    from llmcl.runtime.selection import choose_device

    requests = SplitRequest.of(names, None, None).devices
    chosen = [choose_device(entries, request) for request in requests if isinstance(request, str)]
    rates = memory_rates([Device.open(entry) for entry in chosen])
    shares = (
        f"{rate / sum(rates):.0%} on device {entry.index}, {entry.label} ({rate / 1e9:.0f} GB/s)"
        for entry, rate in zip(chosen, rates, strict=True)
    )
    reason = f"--split layer would divide a model's layers by the speed of the memories: {'; '.join(shares)}."
    return [entry.index for entry in chosen], reason


def _described(entry: DeviceEntry, width: int) -> str:
    """Describes a device in at most `width` columns: index and name, then a line per subject."""
    version, c_version = (".".join(map(str, pair)) for pair in (entry.opencl_version, entry.opencl_c_version))
    memory = f"{_size(entry.global_mem_bytes)}, largest buffer {_size(entry.max_alloc_bytes)}"
    if entry.unified_memory:
        memory += ", shared with the host"
    if entry.host_available_bytes is not None:
        memory += f" ({_size(entry.host_available_bytes)} available now)"
    features = {"fp16": entry.has_fp16, "sub-groups": entry.has_subgroups}
    kind = f"{entry.kind} (software renderer or simulator)" if entry.is_software else entry.kind
    lines = {
        "platform": f"{entry.platform_name}, {entry.platform_version}",
        "driver": f"{entry.driver_version}, OpenCL {version}, OpenCL C {c_version}",
        "kind": f"{kind}, {counted(entry.compute_units, 'compute unit')}",
        "memory": memory,
        "local memory": f"{_size(entry.local_mem_bytes)} a work-group",
        "work-group": f"at most {entry.max_work_group_size} work-items",
        "features": ", ".join(name for name, present in features.items() if present) or "none beyond the core",
    }
    if not entry.usable:
        lines["unusable"] = f"{entry.unusable_reason}; {entry.remedy}"
    text = [_wrapped(f"{entry.index}: ", entry.name, width)]
    text += [_wrapped(f"   {label:<{LABEL_WIDTH}} ", value, width) for label, value in lines.items()]
    return "\n".join(text)


def _wrapped(label: str, value: str, width: int) -> str:
    indent = " " * len(label)  # no break at hyphens, to allow copying commands
    return textwrap.fill(value, width, initial_indent=label, subsequent_indent=indent, break_on_hyphens=False)


def _size(n_bytes: int) -> str:
    for unit, bytes_each in (("GiB", 2**30), ("MiB", 2**20)):
        if n_bytes >= bytes_each:
            return f"{n_bytes / bytes_each:.1f} {unit}"
    return f"{n_bytes / 2**10:.0f} KiB"


def _as_dict(entry: DeviceEntry) -> dict[str, Any]:
    names = [field.name for field in fields(entry) if field.name not in ("facts", "lacks", "device", "fault")]
    values = {name: getattr(entry, name) for name in (*names, "usable", "remedy")} | dict(entry.facts)
    values["why_not"] = entry.unusable_reason  # programs read this name
    for name in ("opencl_version", "opencl_c_version"):
        values[name] = ".".join(map(str, values[name]))
    return values
