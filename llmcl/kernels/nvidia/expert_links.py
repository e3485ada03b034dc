"""A mixture of experts as links in a chain (nvidia/few_rows_chain.py), from the norm before the router to the next
norm.

norm, also leaving float32 rows | router | choice and grouping | gate and up | down | next norm, adding up
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmcl.kernels.common.dtype import KERNEL_NAMES, TILE_ROWS, is_16_bit
from llmcl.kernels.common.experts import FEW_BLOCK_ROWS, block_count
from llmcl.kernels.common.functions import number_of, source_of, weight_dtype, with_constants
from llmcl.kernels.common.step_state import CONSTANTS, StepState
from llmcl.kernels.nvidia.chain_link import (
    MOST_ROWS,
    NORM,
    NORM_ADDED,
    NORM_PARTS,
    NORM_ROWS,
    ROWS_NORM,
    Link,
    is_of,
    norm_link,
    with_arg,
)
from llmcl.kernels.nvidia.experts import TILES, NvidiaExpertsFewRows
from llmcl.kernels.nvidia.linear_few_rows import NvidiaLinearFewRows, experts_bytes, experts_shape
from llmcl.runtime.device import Buffer, Launch
from llmcl.runtime.program import KernelSource

ADD, PACK = "portable/add_bias.cl", "nvidia/pack_activations.cl"
ROUTERS = NvidiaLinearFewRows.file, "portable/linear_few_rows.cl"
CHOOSE, GROUP, EXPERTS = "portable/choose_experts.cl", "portable/group_by_expert.cl", NvidiaExpertsFewRows.file
SUM = "portable/experts_sum.cl"
IN_TURN = (ADD,), (ROWS_NORM,), (PACK,), ROUTERS, (CHOOSE,), (GROUP,), (PACK,), (EXPERTS,), (EXPERTS,), (SUM,), (NORM,)
MAY_LACK = 0, 2, 6  # indices into IN_TURN
ROUTER_RUNS = 8  # runs of 8 columns that a router warp requests at once
MOST_EXPERTS, MOST_CHOSEN = 1024, 32  # limits in nvidia/choose_few_rows.cl
ROUTER_FILE, CHOOSE_FILE = "nvidia/router_few_rows.cl", "nvidia/choose_few_rows.cl"
CHOOSE_PARAMS: tuple[str, ...] = (
    "__global const float*",
    "__global float*",
    "__global int*",
    "__global int4*",
    "__global const int*",
)
EXPERTS_PARAMS = (
    *("__global const uchar*", "__global const uint4*", "__global const int*", "__global const int*"),
    *("__global const float*", "__global void*", "int"),
)
BIAS_PARAM = "__global const float*"


@dataclass(frozen=True)
class Mixture:
    """The consecutive launches for a mixture of experts."""

    launches: Sequence[Launch]
    added: Launch | None  # adds a bias to x, if present
    norm: Launch
    router: Launch
    choose: Launch
    group: Launch
    pack: Launch  # packs rows for the experts
    gate_up: Launch
    down: Launch
    sum: Launch
    next_norm: Launch


def mixture_at(launches: Sequence[Launch], first: int) -> Mixture | None:
    """Returns the mixture that begins at launch number `first`, or None if the launches can't be links."""
    in_turn: list[Launch | None] = []
    at = first
    for i, files in enumerate(IN_TURN):
        if at < len(launches) and is_of(launches[at], *files):
            in_turn.append(launches[at])
            at += 1
        elif i in MAY_LACK:
            in_turn.append(None)
        else:
            return None
    added, norm, router_pack, router, choose, group, pack, gate_up, down, total, next_norm = in_turn
    pack = pack or router_pack  # a single pack launch serves both the router and the experts if both take the same rows
    assert norm and router and choose and group and gate_up and down and total and next_norm
    if pack is None:
        return None
    mixture = Mixture(launches[first:at], added, norm, router, choose, group, pack, gate_up, down, total, next_norm)
    return mixture if _can_be_links(mixture) else None


def _can_be_links(of: Mixture) -> bool:
    x, rows, routed = of.norm.args[0], of.norm.args[2], source_of(of.router)
    norm, choose, gate_up, down = (source_of(launch) for launch in (of.norm, of.choose, of.gate_up, of.down))
    n_experts = number_of(choose, "N_EXPERTS")
    same = [
        (of.added is None or of.added.args[0] is x),
        norm.constants["ADD"] is False,
        norm.constants["ROW"] == norm.constants["HIDDEN"],
        of.router.args[2] is of.choose.args[0],
        of.pack.args[0] is rows,
        of.gate_up.args[1] is of.pack.args[1],
        of.gate_up.args[5] is of.down.args[1],
        of.down.args[5] is of.sum.args[0],
        of.sum.args[1] is x,
        of.next_norm.args[0] is x,
        # A single buffer must hold all experts, and the router must compute all rows.
        n_experts == number_of(gate_up, "N_EXPERTS") == number_of(down, "N_EXPERTS") <= MOST_EXPERTS,
        number_of(routed, "N_TILES") == -(-number_of(choose, "ROW") // TILE_ROWS),
        is_16_bit(weight_dtype(routed)) or weight_dtype(routed) == "float32",
        number_of(choose, "TOP_K") <= MOST_CHOSEN,
    ]
    return all(same)


def mixture_links(of: Mixture, max_rows: int, warps: int, places: int, local: int, state: StepState) -> list[Link]:
    """Makes the links. places: work-groups on the device at once, each with `local` bytes in local memory."""
    x, rows = of.norm.args[0], of.norm.args[2]
    norm, choose, packed = source_of(of.norm), source_of(of.choose), source_of(of.pack)
    assert isinstance(x, Buffer) and isinstance(rows, Buffer)
    constants = {**CONSTANTS, "OUT": packed.constants["WEIGHT"], "HIDDEN": norm.constants["HIDDEN"]}
    constants |= {"EPS": norm.constants["EPS"], "HAS_ROWS": True, "HAS_ADDED": of.added is not None}
    first = norm_link(
        KernelSource(NORM, norm.name, constants), [x, of.norm.args[1], of.pack.args[1], state.state], max_rows, warps
    )
    args = with_arg(first.args, NORM_ROWS, rows)
    if of.added is not None:
        args = with_arg(args, NORM_ADDED, of.added.args[1])
    router = _router_link(of, rows, max_rows, warps, state)
    top_k = number_of(choose, "TOP_K")
    next_norm = norm_link(
        with_constants(source_of(of.next_norm), PARTS=top_k, PARTS_OF_TOKEN=True, MAX_ROWS=max_rows),
        of.next_norm.args,
        max_rows,
        warps,
    )
    sums = of.sum.args[0]
    return [
        Link(first.source, args, first.params, first.n_groups, first.call, first.local, first.rows),
        router,
        _choose_link(of, router, max_rows, warps),
        _experts_link(of.gate_up, max_rows, warps, places, local, "before, 0, before, count"),
        _experts_link(of.down, max_rows, warps, places, local, "before, count, before - COUNTER_WORDS, 1"),
        Link(
            next_norm.source,
            with_arg(next_norm.args, NORM_PARTS, sums),
            next_norm.params,
            next_norm.n_groups,
            next_norm.call,
            next_norm.local,
            next_norm.rows,
        ),
    ]


def _router_link(of: Mixture, rows: Buffer, max_rows: int, warps: int, state: StepState) -> Link:
    routed, dtype = source_of(of.router), weight_dtype(source_of(of.router))
    k, n, tiles = (number_of(routed, name) for name in ("K", "N", "N_TILES"))
    parts = -(-k // 8 // (ROUTER_RUNS * warps))
    sums = state.scratch(f"{parts} parts of {tiles} tiles of logits", 4 * parts * MOST_ROWS * TILE_ROWS * tiles)
    constants = {**CONSTANTS, "WEIGHT": KERNEL_NAMES[dtype], "K": k, "N": n, "MAX_ROWS": max_rows}
    source = KernelSource(ROUTER_FILE, "router", {**constants, "PARTS": parts, "WARPS": warps})
    params = (
        f"__global const {KERNEL_NAMES[dtype]}_t*",
        "__global const float*",
        "__global float*",
        "__global const int*",
    )
    call = f"router_unit_{{kind}}(group / {parts}, group % {parts}, (__local float*)buffers, before, count, {{args}});"
    return Link(source, [of.router.args[0], rows, sums, state.state], params, tiles * parts, call, 256 * warps, 1)


def _choose_link(of: Mixture, router: Link, max_rows: int, warps: int) -> Link:
    choose, (_, order, blocks, state) = source_of(of.choose), of.group.args
    n_experts, top_k = number_of(choose, "N_EXPERTS"), number_of(choose, "TOP_K")
    most = number_of(router.source, "MAX_ROWS")
    constants = {**CONSTANTS, "N_EXPERTS": n_experts, "TOP_K": top_k, "RENORMALIZE": choose.constants["RENORMALIZE"]}
    constants |= {"ROW": TILE_ROWS * -(-number_of(choose, "ROW") // TILE_ROWS), "MAX_ROWS": most, "WARPS": warps}
    constants |= {"PARTS": router.source.constants["PARTS"], "BLOCK_ROWS": FEW_BLOCK_ROWS}
    args = [router.args[2], of.choose.args[2], order, blocks, state]
    params = CHOOSE_PARAMS
    if "BIAS" in choose.constants:
        constants, args, params = {**constants, "BIAS": True}, [*args, of.choose.args[3]], (*params, BIAS_PARAM)
    source = KernelSource(CHOOSE_FILE, "choose", constants)
    call = "choose_unit_{kind}((__local int*)buffers, before, count, {args});"
    return Link(source, args, params, 1, call, 4 * (most * top_k + 3 * n_experts + 1), 1)


def _experts_link(launch: Launch, max_rows: int, warps: int, places: int, local: int, waits: str) -> Link:
    """Makes a link. waits: counters to wait for, as arguments for `experts_unit`: for x, then for the grouping."""
    source = source_of(launch)
    dtype, at_once = weight_dtype(source), 2 if source.constants["EPILOGUE"] == "EPILOGUE_SWIGLU" else 1
    shape = experts_shape(dtype, number_of(source, "K"), TILES, warps, at_once, local)
    link_source = with_constants(source, TILES=shape.tiles, WARPS=shape.warps, STAGES=shape.stages, DEPTH=shape.depth)
    n_experts, top_k = number_of(source, "N_EXPERTS"), number_of(source, "TOP_K")
    units = -(-number_of(source, "EXPERT_TILES") // shape.tiles)
    n_groups = min(places, units * block_count(max_rows, n_experts, top_k, FEW_BLOCK_ROWS))
    call = f"experts_unit_{{kind}}(group, {n_groups}, buffers, {waits}, {{args}});"
    params = EXPERTS_PARAMS if "BIAS" not in source.constants else (*EXPERTS_PARAMS, BIAS_PARAM)
    return Link(link_source, launch.args, params, n_groups, call, experts_bytes(dtype, shape), 1)
