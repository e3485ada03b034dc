"""The calls of tables 6 and 7 as a result of docs/results/: scripts/plot_results.py makes a table and a chart of it."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from attention_bench.measuring import Bench, Call, processor_seconds
from attention_bench.torch_flex import Torch
from llmcl.errors import UsageError
from llmcl.runtime.device import Device
from llmcl.runtime.roofline import read_bandwidth

NAMES = {"ours": "llmcl", "torch compiled": "torch.compile"}
SDPA = "scaled_dot_product_attention"


def visible_pairs(mask_mod: Any, length: int) -> int:
    """Pairs of a query and a key that it sees, of as many queries as keys."""
    if mask_mod is None:
        return length * length
    keys = np.arange(length)[None]
    strips = (np.arange(first, min(first + 256, length))[:, None] for first in range(0, length, 256))
    return sum(int(np.broadcast_to(mask_mod(0, 0, rows, keys), (len(rows), length)).sum()) for rows in strips)


def check_comparable(device: Device, tables: Sequence[int]) -> None:
    """Raises UsageError where a run of these tables would compare nothing with PyTorch."""
    if not {6, 7} & {*tables}:
        raise UsageError("--result is of tables 6 and 7; expected one of them: -t 6,7")
    if Torch.found("cpu" if device.is_cpu else "cuda") is None:
        raise UsageError("--result compares with PyTorch, which does not work here; install torch or leave it out")


def as_result(bench: Bench, command: str) -> dict[str, Any]:
    """A result as scripts/plot_results.py describes it; on a GPU with the share of what PyTorch's product reaches."""
    calls = [call for call in bench.calls if NAMES.keys() <= call.ms.keys()]
    found = Torch.found("cuda")
    peak_flops = None if found is None or bench.device.is_cpu else _product_rate(found)
    panels = [_panel("a call", "ms", False, calls, {who: [call.ms[who] for call in calls] for who in NAMES})]
    notes = _notes(bench)
    if peak_flops is not None:
        bandwidth = read_bandwidth(bench.device)
        shares = {
            who: [100e3 * (c.flops / peak_flops + c.nbytes / bandwidth) / c.ms[who] for c in calls] for who in NAMES
        }
        panels.append(_panel("share of the peak", "%", True, calls, shares))
        notes += (
            f" The peak is that of a product of 8192^3 in bfloat16 by cuBLAS, {peak_flops / 1e12:.0f} TFLOP/s, and "
            "counts visible pairs of query and key alone; in decode it is a streaming read, "
            f"{bandwidth / 1e12:.2f} TB/s."
        )
    entry = bench.device.entry
    return {
        "title": f"{entry.name}: flex_attention on arrays",
        "device": entry.name,
        "driver": f"{entry.driver_version}, {entry.platform_version}",
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "command": command,
        "notes": notes,
        "panels": panels,
    }


def write_result(text: dict[str, Any]) -> str:
    return json.dumps(text, indent=2) + "\n"


def _panel(name: str, unit: str, higher: bool, calls: Sequence[Call], series: dict[str, list[float]]) -> dict[str, Any]:
    rounded = {NAMES[who]: [float(f"{value:.3g}") for value in values] for who, values in series.items()}
    rows = [call.name for call in calls]
    return {"name": name, "unit": unit, "higher_is_better": higher, "rows": rows, "series": rounded}


def _notes(bench: Bench) -> str:
    notes = [f"{table.title}." for table in bench.tables if table.number in (6, 7)]
    if bench.clock is processor_seconds:
        notes.append("Milliseconds of processors, as the machine had other work.")
    sdpa = [f"{call.ms['SDPA']:.3g} ms for {call.name}" for call in bench.calls if "SDPA" in call.ms]
    found = Torch.found("cpu")
    if found is not None:
        notes.append(f"torch.compile(flex_attention) of PyTorch {found.torch.__version__.partition('+')[0]}.")
    if sdpa:
        notes.append(f"Its {SDPA} takes {', '.join(sdpa)}.")
    return " ".join(notes)


def _product_rate(found: Torch) -> float:
    """Operations a second of PyTorch's product of bfloat16 matrices of 8192 x 8192: the best of several."""
    torch, n = found.torch, 8192
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    times = []
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.matmul(a, b)  # so that the device does not wait for the host
        begin.record()
        torch.matmul(a, b)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return float(2.0 * n**3 / (1e-3 * min(times)))
