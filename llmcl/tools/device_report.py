"""Writes the report of `llmcl doctor --report`: a device, its limits, check results and read speed, for sending.

The rates are measured in another process (`python -m llmcl.tools.device_report DEVICE` prints them), because a driver
may crash or hang.
"""

from __future__ import annotations

import getpass
import json
import platform
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from llmcl import __version__
from llmcl.runtime import child_process
from llmcl.runtime.device import Device
from llmcl.runtime.platforms import DeviceEntry
from llmcl.runtime.probe import what_failed
from llmcl.runtime.roofline import arithmetic_peak, read_bandwidth
from llmcl.tools.doctor import PASS, UNUSED, Outcome
from llmcl.tools.markdown import table

TIMEOUT_S = 120.0
PACKAGES = ("pyopencl", "numpy")


def device_report(entry: DeviceEntry, outcomes: Sequence[Outcome], seconds: float) -> str:
    """Formats the report as Markdown. outcomes: from `doctor.diagnose`. seconds: duration of the checks. Also measures
    the device's rates, which takes seconds."""
    memory = f"{_gib(entry.global_mem_bytes)}, largest buffer {_gib(entry.max_alloc_bytes)}"
    kind = "software renderer or simulator" if entry.is_software else entry.kind
    passed, failed = (
        [o for o in outcomes if (o.status == PASS) is good and o.status != UNUSED] for good in (True, False)
    )
    rows = {
        "device": f"{entry.name}, {kind}, {entry.vendor}",
        "platform": f"{entry.platform_name}, {entry.platform_version}",
        "driver": entry.driver_version,
        "OpenCL": f"{_dotted(entry.opencl_version)}, OpenCL C {_dotted(entry.opencl_c_version)}",
        "compute units": str(entry.compute_units),
        "work-group": f"at most {entry.max_work_group_size} work-items",
        "local memory": f"{entry.local_mem_bytes:,} bytes a work-group",
        "memory": memory + (", shared with the host" if entry.unified_memory else ""),
        **measured_rates(entry),
        "checks": f"{len(passed)} passed, {len(failed)} did not, in {seconds:.0f} s with compilation",
        "llmcl": f"{__version__}, Python {platform.python_version()}, {', '.join(map(_package, PACKAGES))}",
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "extensions": " ".join(entry.extensions),
    }
    lines = [f"# llmcl on {entry.name}", "", *table("ll", ["", ""], map(_cells, rows.items())), ""]
    kernels = []
    for o in (*failed, *passed):
        error = "" if o.error is None else f"{o.error:.0e}"
        check = o.check
        kernels.append(
            _cells([check.kernel, check.variant_name, check.dtype, o.status, error, "yes" if o.in_use else "no"])
        )
    lines += table("llllrl", ["kernel", "variant", "type", "result", "error", "used"], kernels)
    for o in failed:
        title = f"{o.check.kernel}, {o.check.variant_name}, {o.check.dtype}: {o.status}"
        lines += ["", f"## {title}", "", "```text", o.detail.replace("```", "'''"), "```"]
    return without_names("\n".join(lines)) + "\n"


def measured_rates(entry: DeviceEntry, timeout_s: float = TIMEOUT_S) -> dict[str, str]:
    """Returns read bandwidth and arithmetic peak as text, or the reason for their absence."""
    rates: Mapping[str, float] = {}
    try:
        code, said = child_process.run(
            child_process.command(__name__, str(entry.index)), timeout_s, streams=["stdout", "stderr"]
        )
        if code is None:
            why = f"no end within {timeout_s:.0f} s"
        else:
            reports = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
            rates = reports[-1] if reports else {}
            why = what_failed(said) or f"exit status {code}"
    except (OSError, ValueError) as error:
        why = str(error)
    if not rates:
        return {"rates": f"not measured: {why}"}
    return {
        "read bandwidth": f"{rates['bytes_per_s'] / 1e9:,.1f} GB/s",
        "arithmetic peak": f"{rates['flops'] / 1e9:,.0f} GFLOP/s in float32",
    }


def without_names(text: str) -> str:
    """Removes user and machine names from a text; paths in driver messages contain them."""
    try:
        user = getpass.getuser()
    except (ImportError, KeyError, OSError):  # a process without an account
        user = ""
    names = {str(Path.home()): "~", platform.node(): "HOST", user: "USER"}
    for name, stand_in in names.items():
        if len(name) > 2 and name != "root":
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", stand_in, text)
    return text


def _package(name: str) -> str:
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return f"{name} of an unknown version"


def _dotted(number: tuple[int, int]) -> str:
    return ".".join(map(str, number))


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB"


def _cells(texts: Iterable[str]) -> list[str]:
    return [text.replace("|", "/") for text in texts]


if __name__ == "__main__":
    opened = Device.open(int(sys.argv[1]))
    print(json.dumps({"bytes_per_s": read_bandwidth(opened), "flops": arithmetic_peak(opened)}), flush=True)
