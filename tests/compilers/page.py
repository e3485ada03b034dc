"""docs/devices.md: the tables between its marks are those of docs/results/compilers.json."""

from __future__ import annotations

import re
from pathlib import Path

from compilers.gpus import GPUS, Gpu
from compilers.table import ROOT, Table, worst
from compilers.toolchains import Figures
from llmcl.tools import markdown

PAGE = ROOT / "docs" / "devices.md"
MARK = re.compile(r"<!-- table: (\w+) -->\n.*?<!-- end -->", re.DOTALL)
STORAGE_TYPE = re.compile(r"(bf|BF|f|F|q)\d+(_\w)?")


def with_tables(text: str, table: Table) -> str:
    made = {"compiled": compiled, "occupancy": occupancy}
    return MARK.sub(lambda match: f"<!-- table: {match[1]} -->\n{made[match[1]](table)}\n<!-- end -->", text)


def write_page(table: Table, page: Path = PAGE) -> None:
    page.write_text(with_tables(page.read_text(encoding="utf-8"), table), encoding="utf-8")


def compiled(table: Table) -> str:
    """A line for each GPU: what was compiled for it, and what spills."""
    header = ["GPU", "compiler", "programs", "kernels that spill, decode", "kernels that spill, other"]
    rows = []
    for gpu in _gpus(table):
        counts = [
            str(sum(bool(_memory(row)) and (table.uses[kind] == "decode") is decode for kind, row in _rows(table, gpu)))
            for decode in (True, False)
        ]
        known = any(row for _, row in _rows(table, gpu))
        cells = [gpu.label, table.versions[gpu.vendor], str(table.programs[gpu.target])]
        rows.append([*cells, *(counts if known else ["not known", "not known"])])
    return "\n".join(markdown.table("llrrr", header, rows))


def occupancy(table: Table) -> str:
    """A line for each kernel and storage type: the worst of all models, epilogues and mods."""
    gpus = [gpu for gpu in _gpus(table) if any(row for _, row in _rows(table, gpu))]
    lines = []
    kernels: dict[tuple[str, str], dict[str, list[Figures]]] = {}
    for gpu in gpus:
        for kind, row in _rows(table, gpu):
            if row:
                of_kernel = kernels.setdefault((_kernel(kind), table.uses[kind]), {})
                of_kernel.setdefault(gpu.target, []).append(row)
    for (kernel, use), rows in sorted(kernels.items(), key=lambda item: (item[0][1], item[0][0])):
        cells = [_cell(gpu, worst(rows[gpu.target])) if gpu.target in rows else "" for gpu in gpus]
        lines.append([f"`{kernel}`", use, *cells])
    header = ["kernel", "used in", *(gpu.target for gpu in gpus)]
    return "\n".join(markdown.table("ll" + "r" * len(gpus), header, lines))


def _kernel(kind: str) -> str:
    """A kind of kernel without all but its storage types."""
    words = kind.split()
    return " ".join([words[0], *(word for word in words[1:] if STORAGE_TYPE.fullmatch(word))])


def _cell(gpu: Gpu, row: Figures) -> str:
    text = f"{row.occupancy} ({row.registers})" if gpu.vendor == "amd" else str(row.occupancy)
    memory = _memory(row)
    return f"**{text}, {memory}**" if memory else text


def _memory(row: Figures | None) -> str:
    if row is None:
        return ""
    return "spills" if row.spilled else f"{row.scratch_bytes} bytes" if row.scratch_bytes else ""


def _gpus(table: Table) -> list[Gpu]:
    return [gpu for gpu in GPUS if gpu.target in table.worst]


def _rows(table: Table, gpu: Gpu) -> list[tuple[str, Figures | None]]:
    return [*table.worst[gpu.target].items()]
