"""Fuses consecutive launches in few-row steps into one launch: products, norms, attention and KV appends.

A separate launch costs about 5 us: its work-groups begin only when all earlier groups have ended, then fetch code and
wait for their first weights. In a chain, the next link requests its weights meanwhile. A batched step becomes a single
launch for all layers (nvidia/few_rows_chain.cl).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np

from llmcl.kernels.common.addresses import addresses_of
from llmcl.kernels.common.cost import fused_cost
from llmcl.kernels.common.dtype import QUANTIZED, dtype_of_kernel, is_16_bit
from llmcl.kernels.common.functions import as_function, number_of, source_of, weight_dtype, with_constants
from llmcl.kernels.common.persistent import BoundChains, ListedStep, PersistentStep
from llmcl.kernels.common.step_state import StepState
from llmcl.kernels.nvidia.attention import (
    HopperAttentionPrefill,
    NvidiaAttentionDecode,
    NvidiaRopeAppend,
    prompt_unit_bytes,
    unit_bytes,
)
from llmcl.kernels.nvidia.chain_link import (
    MOST_ROWS,
    NORM,
    NORM_ADDED,
    NORM_PARTS,
    ROWS_NORM,
    WARP,
    Link,
    is_of,
    norm_link,
    with_arg,
)
from llmcl.kernels.nvidia.expert_links import EXPERTS, mixture_at, mixture_links
from llmcl.kernels.nvidia.linear import supports_ptx
from llmcl.kernels.nvidia.linear_few_rows import (
    HOPPER_LOCAL_BYTES,
    PIECE_COLUMNS,
    FewRowsShape,
    NvidiaLinearFewRows,
    fitting_shape,
    group_bytes,
    local_bytes,
)
from llmcl.runtime.device import Buffer, Device, KernelArg, Launch
from llmcl.runtime.program import KernelSource, read_source

FILE = "nvidia/few_rows_chain.cl"
PRODUCT = NvidiaLinearFewRows.file
ATTENTION, APPEND = NvidiaAttentionDecode.file, NvidiaRopeAppend.file
PROMPT, PROMPT_LINK = HopperAttentionPrefill.file, "nvidia/attention_short_prompt.cl"
ADJUST, ADJUST_LINK = "portable/qkv_adjust.cl", "nvidia/adjust_heads.cl"
LINKS = PRODUCT, NORM, ADJUST, ATTENTION, APPEND, PROMPT
SHARED = "common/common.cl", "nvidia/ptx.cl", "nvidia/wait_until.cl"
HEAD = "#define CHAINED 1\n"
COUNTER_WORDS = 32  # an L2 cache line
X_PARTS = 8  # maximum number of column parts of a gated MLP's output; each part has a counter
PROMPT_ROWS = 8  # ROWS in nvidia/attention_short_prompt.cl
PROMPT_SPLITS = 32  # maximum number of KV splits of cached keys in a short prompt's attention
K_PARTS = 2  # column parts of a product before a norm; each part has separate work-groups
MEETING_PARTS, MEETING_COLUMNS = (4, 2), 2048  # K_PARTS without a norm, and the minimum column count
HEAD_START = 5 / 8  # extra steps for an early work-group, as a share of the steps in a gated MLP's group
SUPER_BLOCK_ROWS = 16  # rows per step up to which splitting is faster for weights in super-blocks
MOST_ROWS_BETWEEN = 16  # rows per step if attention is not a link
LINK_INTS, LINE_WORDS = 3, 16  # words per link for numbers, words per L1 cache line
ON_A_UNIT, WITH_EXPERTS = 2, 3  # work-groups on a compute unit at once: without experts, with experts
GROUP_WARPS = 8, 4  # warps per work-group: more, fewer
# Argument types. Attention's K and V types follow the state and are missing here.
PRODUCT_PARAMS = (
    *("__global const uchar*", "__global const uint4*", "__global void*", "__global const int*", "int"),
    *("__global const float*", "__global uint*", "__global float*", "__global uint*"),
)
SUMS, MEETING = 7, 8  # argument indices in a product
ADJUST_PARAMS = "__global float*", "__global const float*", "__global const float*"
APPEND_PARAMS = "__global float*", "__global const float*", "__global const int*"
PROMPT_PARAMS = "__global const float*", "__global const float*", "__global const int*"
ATTENTION_PARAMS = (
    *("__global const float*", "__global const float*", "__global const int*"),
    *("__global float*", "__global float*", "__global void*", "__global int*"),
)


class NvidiaFewRowsChain(PersistentStep):
    """Runs on devices with enough local memory for two chain work-groups on a compute unit: Hopper. Handles steps with
    up to MOST_ROWS rows, where a chain was measured to be faster than separate launches.
    """

    name, file = "nvidia", FILE
    rounds_to_16_bits = True
    few_rows = True

    def supports_device(self, device: Device) -> bool:
        return supports_ptx(device) and local_bytes(device) == HOPPER_LOCAL_BYTES

    def unsupported_reason(self, device: Device, step: ListedStep) -> str | None:
        if self.key("bfloat16") in device.cache.excluded:
            return "llmcl doctor found it to be wrong"
        if all(len(chain) == 1 for chain in chains(step.launches, step.max_rows)):
            return "no two of its launches may be links of a chain"
        return None

    def bind(self, device: Device, step: ListedStep) -> BoundChains:
        parts = []
        for chain in chains(step.launches, step.max_rows):
            parts.append(chain[0] if len(chain) == 1 else chained(device, chain, step.max_rows, step.state))
        return BoundChains(parts)


def chains(launches: Sequence[Launch], max_rows: int) -> list[list[Launch]]:
    """Groups the launches, in order, into chains. A launch outside every chain forms a list by itself."""
    units = _units(launches, max_rows)
    with_attention = any(is_link and any(map(_is_attention, unit)) for is_link, unit in units)
    if max_rows > (MOST_ROWS if with_attention else MOST_ROWS_BETWEEN):
        return [[launch] for launch in launches]
    fused: list[list[Launch]] = []
    for is_link, neighbours in groupby(units, lambda pair: pair[0]):
        of_kind = [unit for _, unit in neighbours]
        if not is_link or all(_is_attention(launch) for unit in of_kind for launch in unit):
            fused += [[launch] for unit in of_kind for launch in unit]
            continue
        fused.append([launch for unit in of_kind for launch in unit])
    return fused


def _units(launches: Sequence[Launch], max_rows: int) -> list[tuple[bool, list[Launch]]]:
    """Splits the launches, in order, into (may be links, launches) units. Launches in a unit stay together: a mixture
    of experts, two consecutive norms, or KV append with a prompt's attention.
    """
    units: list[tuple[bool, list[Launch]]] = []
    at = 0
    while at < len(launches):
        if (mixture := mixture_at(launches, at)) is not None:
            units.append((True, [*mixture.launches]))
            at += len(mixture.launches)
            continue
        if _are_norms(launches[at : at + 2]):
            units.append((True, [*launches[at : at + 2]]))
            at += 2
            continue
        launch, before = launches[at], launches[at - 1] if at else None
        is_link = _is_link(launch, before, max_rows)
        if is_link and is_of(launch, PROMPT):
            units[-1][1].append(launch)
        else:
            units.append((is_link, [launch]))
        at += 1
    return units


def _are_norms(launches: Sequence[Launch]) -> bool:
    """Tells whether the first norm adds a block's normalised output to x, which the second norm reads."""
    if len(launches) < 2 or not is_of(launches[0], ROWS_NORM) or not is_of(launches[1], NORM):
        return False
    (adds_to_x, norm), constants = launches, source_of(launches[0]).constants
    whole = constants["ROW"] == constants["HIDDEN"] == number_of(source_of(norm), "HIDDEN") and constants["ADD"] is True
    return whole and constants["EPS"] == source_of(norm).constants["EPS"] and adds_to_x.args[2] is norm.args[0]


def _is_attention(launch: Launch) -> bool:
    return is_of(launch, ATTENTION, PROMPT)


def _is_link(launch: Launch, before: Launch | None, max_rows: int) -> bool:
    source = launch.source
    if not isinstance(source, KernelSource) or source.file not in LINKS:
        return False
    if source.file == ADJUST:  # a warp handles a head
        return number_of(source, "HEAD_DIM") % WARP == 0 and not {"VALUE_NORM", "ROTATE"} & {*source.constants}
    if source.file == APPEND:  # for a single sequence only
        return "STATE_PIECES" not in source.constants
    if source.file == PROMPT:  # single sequence, keys appended by the previous launch, no user functions
        if before is None or not is_of(before, APPEND) or before.args[3] is not launch.args[2] or source.prelude:
            return False
        appended = number_of(source_of(before), "N_KV_HEADS")  # 0 if the keys come from another layer
        return appended == number_of(source, "N_KV_HEADS") and "STATE_PIECES" not in source.constants
    if source.file == ATTENTION:  # covers all rows in a step, no arrays from user functions
        groups = launch.groups(1), launch.groups(max_rows)
        return len(launch.args) == len(_attention_params(source)) and [g[2:] for g in groups] == [(1,), (max_rows,)]
    return True


def group_warps(launches: Sequence[Launch]) -> int:
    """Returns the warps per work-group for a chain.

    Uses the larger count if attention then fits into a work-group's share of local memory. 16-bit weights need fewer
    instructions per byte: the smaller count is faster in single-layer chains, and with attention whose lanes hold many
    accumulators.
    """
    most, least = GROUP_WARPS
    sources, share = [source_of(launch) for launch in launches], HOPPER_LOCAL_BYTES // ON_A_UNIT
    attentions = [source for source in sources if source.file == ATTENTION]
    if any(_attention_bytes(source, most) > share for source in attentions):
        return least
    if any(source.file == EXPERTS for source in sources):  # experts leave few registers for other links
        return least
    if any(not is_16_bit(weight_dtype(source)) for source in sources if source.file == PRODUCT):
        return most
    several = sum(source.file in (ATTENTION, PROMPT) for source in sources) > 1
    return most if several and all(number_of(a, "GROUP_SIZE") <= 4 for a in attentions) else least


def most_tiles(dtype: str, n_tiles: int, max_rows: int, places: int) -> int:
    """Returns the tiles per work-group for a weight. places: work-groups on the device at once.

    Each work-group reads all activations, more bytes than two quantised tiles. Takes four tiles if enough work-groups
    remain.
    """
    enough = places if max_rows <= 8 else places * 3 // 4
    return 4 if not is_16_bit(dtype) and n_tiles >= 4 * enough else 2


def chained(device: Device, launches: Sequence[Launch], max_rows: int, state: StepState) -> Launch:
    """Fuses `launches` into one launch for steps with up to `max_rows` rows."""
    warps = group_warps(launches)
    on_a_unit = WITH_EXPERTS if any(is_of(launch, EXPERTS) for launch in launches) else ON_A_UNIT
    places, local = on_a_unit * device.compute_units, HOPPER_LOCAL_BYTES // on_a_unit
    links: list[Link] = []
    heads = [number_of(source_of(launch), "N_Q_HEADS") for launch in launches if is_of(launch, PROMPT)]
    # Shared by all links: only one link uses the counts at a time, and leaves zeros.
    arrivals = device.zeros(4 * max_rows * max(heads), "arrivals of a prompt") if heads else None
    at = 0
    while at < len(launches):
        launch = launches[at]
        if (mixture := mixture_at(launches, at)) is not None:
            links += mixture_links(mixture, max_rows, warps, places, local, state)
            at += len(mixture.launches)
            continue
        if _are_norms(launches[at : at + 2]):
            links.append(_norms_link(launch, launches[at + 1], max_rows, warps))
            at += 2
            continue
        if arrivals is not None and is_of(launch, PROMPT):
            links[-1] = _prompt_link(launch, launches[at - 1], max_rows, warps, state, arrivals)
        else:
            links.append(_link(launch, max_rows, warps, places, local))
        at += 1
    links = _in_parts(_meeting(device, _over_groups(links, max_rows, places, state), max_rows, places))
    kinds: dict[str, int] = {}
    functions, calls = "", ""
    for link in links:
        if link.key in kinds:
            continue
        kind = kinds[link.key] = len(kinds)
        functions += as_function(link.source, f"_{kind}", SHARED, HEAD)
        call_args = [
            f"({param})link[{LINK_INTS + i}]" if isinstance(arg, Buffer) else str(arg)
            for i, (param, arg) in enumerate(zip(link.params, link.args, strict=True))
        ]
        call = link.call.format(kind=kind, args=", ".join(call_args))
        calls += f"{'else ' if kind else ''}if (kind == {kind}) {call} "
    counters, table, used = _table(device, links, [kinds[link.key] for link in links])
    constants: dict[str, object] = {
        "ITEMS": WARP * warps,
        "COUNTER_WORDS": COUNTER_WORDS,
        "LINK_WORDS": table.shape[1],
        "CHAIN_BYTES": max(link.local for link in links),
        "CHAIN_ROWS": max(link.rows for link in links),
    }
    texts = "".join(read_source(name, SHARED[:i]) for i, name in enumerate(SHARED))
    merged = KernelSource(FILE, "few_rows_chain", constants, f"{texts}\n{functions}#define RUN_LINK {calls}\n")
    n_groups = sum(link.n_groups for link in links)
    firsts = np.cumsum([0, *(link.n_groups for link in links[:-1])]).astype(np.int32)
    args: list[KernelArg] = [
        device.zeros(4 * COUNTER_WORDS * counters, "counters of a chain"),
        device.upload(firsts, "first groups of a chain's links"),
        device.upload(table, "links of a chain"),
        *(np.int32(n) for n in (len(links), counters, links[-1].n_groups)),
    ]
    cost = fused_cost(*(launch.cost for launch in launches if launch.cost is not None))
    return device.launch_type(device, merged, args, (n_groups,), (WARP * warps,), cost).using(used)


def _table(device: Device, links: Sequence[Link], kinds: Sequence[int]) -> tuple[int, np.ndarray, list[Buffer]]:
    """Returns the number of counters, the table `links` (nvidia/few_rows_chain.cl), and the buffers whose addresses the
    table holds.
    """
    used = list({id(arg): arg for link in links for arg in link.args if isinstance(arg, Buffer)}.values())
    addresses = addresses_of(device, used)
    words = LINK_INTS + max(len(link.args) for link in links)
    table = np.zeros((len(links), -(-words // LINE_WORDS) * LINE_WORDS), np.uint64)
    first = counter = counter_before = count = 0
    for link, kind, row in zip(links, kinds, table, strict=True):
        ints = kind, first, link.n_groups // link.parts, counter, counter_before, count
        row[:LINK_INTS] = np.array(ints, np.int32).view(np.uint64)
        for i, arg in enumerate(link.args):
            row[LINK_INTS + i] = addresses[id(arg)] if isinstance(arg, Buffer) else 0
        first += link.n_groups
        counter_before, count = counter, link.n_groups // link.parts
        counter += link.parts
    return counter, table, used


def _in_parts(links: list[Link]) -> list[Link]:
    """Splits a gated MLP's results into parts with separate counters.

    The gated product has many work-groups, and they end at different times. With parts, the next product can begin
    before all groups have ended.
    """
    split = [*links]
    for i in range(len(links) - 1):
        maker, taker = split[i : i + 2]
        if "GATE" not in maker.source.constants or maker.args[2] is not taker.args[1]:
            continue
        source = taker.source
        columns = number_of(source, "K")
        step = PIECE_COLUMNS * number_of(source, "WARPS") * number_of(source, "DEPTH")
        if columns != maker.n_groups * 8 * number_of(maker.source, "TILES"):
            continue
        of_a_group = columns // (number_of(source, "K_PARTS") if "K_PARTS" in source.constants else 1)
        if of_a_group % step:
            continue
        parts = next(n for n in range(X_PARTS, 0, -1) if columns % (n * step) == maker.n_groups % n == 0 or n == 1)
        split[i : i + 2] = replace(maker, parts=parts), replace(taker, source=with_constants(source, X_PARTS=parts))
    return split


def _over_groups(links: list[Link], max_rows: int, places: int, state: StepState) -> list[Link]:
    """Splits the columns in a quantised product before a norm over K_PARTS work-groups.

    Applies if the product's work-groups would leave every other place free. The first group adds to x. The norm adds
    the other groups' sums.
    """
    split = [*links]
    for i in range(len(links) - 1):
        maker, taker = split[i : i + 2]
        product, norm = maker.source, taker.source
        if (product.file, norm.file) != (PRODUCT, NORM) or maker.args[2] is not taker.args[0]:
            continue
        dtype, columns = weight_dtype(product), number_of(product, "OUT_STRIDE")
        if is_16_bit(dtype) or (max_rows > SUPER_BLOCK_ROWS and QUANTIZED[dtype].block > PIECE_COLUMNS):
            continue
        if K_PARTS * maker.n_groups > places or number_of(product, "K") % (K_PARTS * PIECE_COLUMNS):
            continue
        sums = state.scratch(f"sums of {columns} columns", 4 * (K_PARTS - 1) * MOST_ROWS * columns)
        split[i] = replace(
            maker,
            source=with_constants(product, K_PARTS=K_PARTS),
            args=with_arg(maker.args, SUMS, sums),
            n_groups=K_PARTS * maker.n_groups,
        )
        norm_source = with_constants(norm, PARTS=K_PARTS - 1, MAX_ROWS=max_rows)
        split[i + 1] = replace(taker, source=norm_source, args=with_arg(taker.args, NORM_PARTS, sums))
    return split


def _meeting(device: Device, links: list[Link], max_rows: int, places: int) -> list[Link]:
    """Splits the columns in products that feed another product without a norm between.

    Among work-groups with the same tiles, the last to begin adds all sums. Uses as many column parts as the free places
    allow.
    """
    split_links, words = [*links], 0
    for i, link in enumerate(links):
        source = link.source
        if source.file != PRODUCT or source.constants["LEAVES"] is not True:
            continue
        columns, blocks = number_of(source, "K"), link.n_groups * max_rows // 8
        fitting = (n for n in MEETING_PARTS if n * link.n_groups <= places and columns % (n * PIECE_COLUMNS) == 0)
        parts = next(fitting, 1) if columns >= MEETING_COLUMNS else 1
        if parts == 1:
            continue
        words = max(words, 4 * WARP * (parts - 1) * blocks * number_of(source, "TILES"))
        constants: dict[str, object] = {"K_PARTS": parts, "MEETS": 1}
        if i and parts == 2 and (first := _first_steps(links[i - 1], link, places)):
            constants["FIRST_STEPS"] = first
        split_links[i] = replace(link, source=with_constants(source, **constants), n_groups=parts * link.n_groups)
    if not words:
        return links
    meeting = device.alloc(4 * words, "sums of groups that share columns")
    device.fill(meeting, np.uint32(0xFFFFFFFF))  # ABSENT
    for i, (link, before) in enumerate(zip(split_links, links, strict=True)):
        if link is not before:
            split_links[i] = replace(link, args=with_arg(link.args, MEETING, meeting))
    return split_links


def _first_steps(maker: Link, taker: Link, places: int) -> int | None:
    """Returns the step count for the first group in each pair with shared columns. None: half the steps.

    The last work-groups in a gated MLP's product leave places free, so the next product's first groups begin early, by
    the run time of a gated group. If each pair's first group begins early, first groups take more steps.
    """
    begin_early = places - maker.n_groups % places
    if "GATE" not in maker.source.constants or not taker.n_groups <= begin_early <= taker.n_groups * 3 // 2:
        return None
    pieces = number_of(taker.source, "WARPS") * number_of(taker.source, "DEPTH")
    steps, left = divmod(number_of(taker.source, "K"), PIECE_COLUMNS * pieces)
    lead = int(HEAD_START * number_of(maker.source, "K")) // (PIECE_COLUMNS * pieces)
    first = min(steps // 2 + lead, steps - 2 * number_of(taker.source, "STAGES"))
    return first if steps % 2 == left == 0 and first > steps // 2 else None


def _link(launch: Launch, max_rows: int, warps: int, places: int, local: int) -> Link:
    """Makes a link for a launch. places: work-groups on the device at once, each with `local` bytes in local memory."""
    source = source_of(launch)
    if source.file == NORM:
        return norm_link(source, launch.args, max_rows, warps)
    if source.file == ADJUST:
        return _adjust_link(launch, source, max_rows, warps)
    if source.file == ATTENTION:
        return _attention_link(launch, source, max_rows, warps)
    if source.file == APPEND:
        tiles, heads = launch.groups(max_rows)
        call = f"rope_append_unit_{{kind}}(group / {heads}, group % {heads}, before, count, {{args}});"
        kernel = with_constants(source, LOCAL_SIZE=WARP * warps)
        kv = f"__global {source.constants['KV']}_t*"
        return Link(kernel, launch.args, (*APPEND_PARAMS, kv, kv), tiles * heads, call, 0, 1)
    kernel, shape = product_source(launch, warps, places, local)
    call = "few_rows_unit_{kind}(group, buffers, scales, before, count, {args});"
    n_groups = -(-number_of(kernel, "N_TILES") // shape.tiles)
    # placeholder for the sums: no other group shares the columns
    rows, args = number_of(kernel, "MAX_ROWS"), [*launch.args, launch.args[SUMS]]
    return Link(kernel, args, PRODUCT_PARAMS, n_groups, call, group_bytes(weight_dtype(kernel), shape, rows), rows)


def _norms_link(given: Launch, norm: Launch, max_rows: int, warps: int) -> Link:
    """Makes a link from two norms. given: the launch whose normalised input is added to x."""
    link = norm_link(with_constants(source_of(norm), NORMS_PART=True), norm.args, max_rows, warps)
    args = with_arg(with_arg(link.args, NORM_PARTS, given.args[0]), NORM_ADDED, given.args[1])
    return replace(link, args=args)


def _adjust_link(launch: Launch, source: KernelSource, max_rows: int, warps: int) -> Link:
    """Makes a link with work-groups in row order. Covers every row the buffer has room for, because the kernel does not
    know the step's row count.
    """
    qkv, n_q, n_kv = launch.args[0], number_of(source, "N_Q_HEADS"), number_of(source, "N_KV_HEADS")
    assert isinstance(qkv, Buffer)
    heads = launch.groups(1)[0] * number_of(source, "HEADS_PER_GROUP") * number_of(source, "HEADS_AT_ONCE")
    parts = -(-heads // warps)
    rows = min(max_rows, qkv.nbytes // (4 * (n_q + 2 * n_kv) * number_of(source, "HEAD_DIM")))
    names = "N_Q_HEADS", "N_KV_HEADS", "HEAD_DIM", "BIAS", "HEAD_NORM", "EPS"
    constants = {name: source.constants[name] for name in names}
    kernel = KernelSource(ADJUST_LINK, source.name, {**constants, "HEADS": heads, "WARPS": warps})
    call = f"adjust_heads_unit_{{kind}}(group % {parts}, group / {parts}, before, count, {{args}});"
    return Link(kernel, launch.args, ADJUST_PARAMS, parts * rows, call, 0, 1)


def _attention_link(launch: Launch, source: KernelSource, max_rows: int, warps: int) -> Link:
    """Makes a link with work-groups in row order: rows present in the step come first."""
    heads, splits, _ = launch.groups(max_rows)
    kernel = with_constants(source, WARPS=warps, SPLIT_TILES=1)
    call = (
        f"attention_unit_{{kind}}(group % {heads}, group / {heads} % {splits}, group / {heads * splits}, "
        "buffers, before, count, {args});"
    )
    local, params = _attention_bytes(kernel, warps), _attention_params(source)
    return Link(kernel, launch.args, params, heads * splits * max_rows, call, local, 1)


def _attention_params(source: KernelSource) -> tuple[str, ...]:
    kv = f"__global {source.constants['KV']}_t*"
    sinks = ["__global const float*"] if source.constants.get("HAS_SINKS") else []
    return (*ATTENTION_PARAMS[:3], kv, kv, *ATTENTION_PARAMS[3:], *sinks)


def _prompt_link(launch: Launch, append: Launch, max_rows: int, warps: int, state: StepState, arrivals: Buffer) -> Link:
    """Fuses attention with the KV append before."""
    source = source_of(launch)
    heads, size = number_of(source, "N_KV_HEADS"), number_of(source, "HEAD_DIM")
    q_heads = number_of(source, "N_Q_HEADS")
    blocks = -(-max_rows * q_heads // (heads * PROMPT_ROWS * warps))
    kv = f"__global {source.constants['KV']}_t*"
    sinks = ["__global const float*"] if source.constants.get("HAS_SINKS") else []
    states = MOST_ROWS * q_heads * PROMPT_SPLITS
    parts = [
        state.scratch(f"maxima and sums of {states} splits", 8 * states),
        state.scratch(f"accumulators of {states} splits of {size}", 4 * states * size),
        arrivals,
    ]
    args = [*append.args, launch.args[4], *parts, *launch.args[7 : 7 + len(sinks)]]
    params = (*PROMPT_PARAMS, kv, kv, "__global void*", "__global float*", "__global float*", "__global int*", *sinks)
    constants = {**source.constants, "WARPS": warps, "N_SPLITS": PROMPT_SPLITS, "MAX_ROWS": max_rows}
    kernel = KernelSource(PROMPT_LINK, source.name, constants)
    call = (
        f"attention_prompt_unit_{{kind}}(group / {heads * blocks}, group % {heads}, group / {heads} % {blocks}, "
        "buffers, before, count, {args});"
    )
    return Link(kernel, args, params, PROMPT_SPLITS * heads * blocks, call, prompt_unit_bytes(size, max_rows, warps), 1)


def _attention_bytes(source: KernelSource, warps: int) -> int:
    size, group, n_splits = (number_of(source, name) for name in ("HEAD_DIM", "GROUP_SIZE", "N_SPLITS"))
    dtype = dtype_of_kernel(str(source.constants["KV"]))
    return unit_bytes(size, group, dtype, warps, n_splits + bool(source.constants.get("HAS_SINKS")))


def product_source(launch: Launch, warps: int, places: int, local: int) -> tuple[KernelSource, FewRowsShape]:
    """Returns a product adapted to a chain's warp count and local memory per work-group."""
    source = source_of(launch)
    dtype, at_once = weight_dtype(source), 2 if "GATE" in source.constants else 1
    rows = number_of(source, "MAX_ROWS")
    tiles = most_tiles(dtype, number_of(source, "N_TILES"), rows, places)
    shape = fitting_shape(dtype, tiles, warps, at_once, rows, local)
    sizes = {"TILES": shape.tiles, "WARPS": shape.warps, "STAGES": shape.stages, "DEPTH": shape.depth}
    return with_constants(source, **sizes), shape
