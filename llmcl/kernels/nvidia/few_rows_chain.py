"""Products of few rows that follow one another, and the norms between them, in one launch.

A launch of its own costs a product some 5 us at its ends: its groups begin when all groups before have ended, and then
wait for their first weights. In a chain the next product's weights are asked for meanwhile. Between attention and
attention a layer has four products, which then are one launch (nvidia/few_rows_chain.cl).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from llmcl.kernels.common.cost import fused_cost
from llmcl.kernels.common.dtype import KERNEL_NAMES, is_16_bit
from llmcl.kernels.common.functions import as_function
from llmcl.kernels.common.persistent import ListedStep, PersistentStep
from llmcl.kernels.nvidia.linear import supports_ptx
from llmcl.kernels.nvidia.linear_few_rows import (
    HOPPER_LOCAL_BYTES,
    PIECE_COLUMNS,
    FewRowsShape,
    NvidiaLinearFewRows,
    fitting_shape,
    local_bytes,
    piece_bytes,
)
from llmcl.runtime.device import Device, KernelArg, Launch
from llmcl.runtime.program import KernelSource, read_source

FILE = "nvidia/few_rows_chain.cl"
PRODUCT, NORM = NvidiaLinearFewRows.file, "nvidia/rms_norm_token.cl"
SHARED = "common/common.cl", "nvidia/ptx.cl", "nvidia/wait_until.cl"
HEAD = "#define CHAINED 1\n"
WARPS, TILES = 4, 2
GROUPS = 2  # on a compute unit at once
STORED = {name: dtype for dtype, name in KERNEL_NAMES.items()}
LINE_WORDS = 32  # of a counter: a line of the second-level cache
MOST_LINKS, MOST_ROWS = 8, 16
PRODUCT_PARAMS = (
    *("__global const uchar* weight", "__global const uint4* x", "__global void* out", "__global const int* state"),
    *("const int out_row", "__global const float* norm", "__global uint* normed", "__global float* squares"),
)
NORM_PARAMS = (
    "__global const float* x",
    "__global const float* weight",
    "__global uint4* out",
    "__global const int* state",
)


@dataclass
class BoundChains:
    """A step's launches, of which those in chains are one for each chain."""

    parts: list[Launch]


@dataclass(frozen=True)
class Link:
    """A launch as it is in a chain. n_groups: of a step of as many rows as there may be; call: what a group does, with
    {kind}, {group}, {waits} and the arguments by name; local: bytes of local memory; rows: of a step at most.
    """

    launch: Launch
    source: KernelSource
    params: tuple[str, ...]
    n_groups: int
    call: str
    local: int
    rows: int


class NvidiaFewRowsChain(PersistentStep):
    """For devices that have local memory for two groups of a chain on a compute unit: Hopper. Products of up to
    MOST_ROWS rows with 16-bit weights, where it was measured to be faster than a launch for each.
    """

    name, file = "nvidia", FILE
    few_rows = True

    def supports_device(self, device: Device) -> bool:
        return supports_ptx(device) and local_bytes(device) == HOPPER_LOCAL_BYTES

    def unsupported_reason(self, device: Device, step: ListedStep) -> str | None:
        if self.key("bfloat16") in device.cache.excluded:
            return "llmcl doctor found it to be wrong"
        if all(len(chain) == 1 for chain in chains(step.launches)):
            return "no two products of few rows follow one another"
        return None

    def bind(self, device: Device, step: ListedStep) -> BoundChains:
        parts = []
        for chain in chains(step.launches):
            parts.append(chain[0] if len(chain) == 1 else chained(device, chain, step.max_rows))
        return BoundChains(parts)


def chains(launches: Sequence[Launch]) -> list[list[Launch]]:
    """The launches in order, those together that follow one another in a chain."""
    found: list[list[Launch]] = []
    for is_link, neighbours in groupby(launches, _is_link):
        of_kind = [*neighbours]
        size = MOST_LINKS if is_link else 1
        found += [of_kind[i : i + size] for i in range(0, len(of_kind), size)]
    return found


def _is_link(launch: Launch) -> bool:
    source = launch.source
    if not isinstance(source, KernelSource) or source.file not in (PRODUCT, NORM):
        return False
    return source.file == NORM or (is_16_bit(_dtype(source)) and _int(source, "MAX_ROWS") <= MOST_ROWS)


def chained(device: Device, launches: Sequence[Launch], max_rows: int) -> Launch:
    """These launches as one, of a step of at most so many rows."""
    kinds: dict[str, int] = {}
    functions, params, choice, first, waits = "", "", "", 0, "0, 0"
    args: list[KernelArg] = [device.zeros(4 * LINE_WORDS * len(launches), "counters of a chain")]
    links = [_link(launch, max_rows) for launch in launches]
    for i, link in enumerate(links):
        key = repr((link.source.file, sorted(link.source.constants.items())))
        if key not in kinds:
            kinds[key] = len(kinds)
            functions += as_function(link.source, f"_{kinds[key]}", SHARED, HEAD)
        names = {param.split()[-1]: f"{param.split()[-1]}_{i}" for param in link.params}
        params += "".join(f", {param}_{i}" for param in link.params)
        call = link.call.format(kind=kinds[key], group=f"(int)(unit) - {first}", waits=waits, **names)
        choice += f"{'else ' if i else ''}if ((unit) < {first + link.n_groups}u) {{ link = {i}; {call} }} "
        first += link.n_groups
        waits = f"COUNTER({i}), {link.n_groups}u"
        args += link.launch.args
    constants: dict[str, object] = {
        "ITEMS": 32 * WARPS,
        "N_LINKS": len(links),
        "LAST_GROUPS": links[-1].n_groups,
        "CHAIN_BYTES": max(link.local for link in links),
        "CHAIN_ROWS": max(link.rows for link in links),
    }
    texts = "".join(read_source(name, SHARED[:i]) for i, name in enumerate(SHARED))
    macros = f"#define PARAMS {params}\n#define RUN_UNIT(unit) {choice}\n"
    merged = KernelSource(FILE, "few_rows_chain", constants, f"{texts}\n{functions}{macros}")
    cost = fused_cost(*(launch.cost for launch in launches if launch.cost is not None))
    return device.launch_type(device, merged, args, (first,), (32 * WARPS,), cost)


def _link(launch: Launch, max_rows: int) -> Link:
    source = launch.source
    assert isinstance(source, KernelSource)
    if source.file == NORM:
        call = "rms_norm_unit_{kind}({group}, scales, {waits}, {x}, {weight}, {out}, {state});"
        own = KernelSource(source.file, source.name, {**source.constants, "GROUP_ITEMS": 32 * WARPS}, source.prelude)
        return Link(launch, own, NORM_PARAMS, max_rows, call, 0, WARPS)
    own, shape = product_source(launch)
    names = ", ".join(f"{{{param.split()[-1]}}}" for param in PRODUCT_PARAMS)
    call = f"few_rows_unit_{{kind}}({{group}}, buffers, scales, {{waits}}, {names});"
    n_groups = -(-_int(own, "N_TILES") // shape.tiles)
    return Link(launch, own, PRODUCT_PARAMS, n_groups, call, group_bytes(own, shape), _int(own, "MAX_ROWS"))


def chain_shape(dtype: str, tiles_at_once: int, max_rows: int) -> FewRowsShape:
    """How a product of a chain is cut: with the same number of warps in all, and a share of a compute unit's memory."""
    return fitting_shape(dtype, TILES, WARPS, tiles_at_once, max_rows, HOPPER_LOCAL_BYTES // GROUPS)


def product_source(launch: Launch) -> tuple[KernelSource, FewRowsShape]:
    """A product as it is in a chain."""
    source = launch.source
    assert isinstance(source, KernelSource)
    dtype, at_once = _dtype(source), 2 if "GATE" in source.constants else 1
    shape = chain_shape(dtype, at_once, _int(source, "MAX_ROWS"))
    own = {"TILES": shape.tiles, "WARPS": shape.warps, "STAGES": shape.stages, "DEPTH": shape.depth}
    return KernelSource(source.file, source.name, {**source.constants, **own}, source.prelude), shape


def group_bytes(source: KernelSource, shape: FewRowsShape) -> int:
    """LOCAL_BYTES of nvidia/linear_few_rows.cl."""
    rows = _int(source, "MAX_ROWS")
    stage = shape.depth * (shape.tiles * piece_bytes(_dtype(source)) + 2 * PIECE_COLUMNS * rows)
    return shape.warps * max(shape.stages * stage, 64 * shape.tiles * rows)


def _int(source: KernelSource, name: str) -> int:
    value = source.constants[name]
    assert isinstance(value, int)
    return value


def _dtype(source: KernelSource) -> str:
    name = source.constants["WEIGHT"]
    assert isinstance(name, str)
    return STORED.get(name, name)
