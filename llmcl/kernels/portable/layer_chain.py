"""Fuses a layer's decode kernels into one launch, on devices known to have the required memory fence.

A launch costs microseconds and waits for the launch before; launches dominate a small model's step. Here a layer's
kernels form one launch (portable/layer_chain.cl) in plain OpenCL C: a work-group only waits for work-groups that have
already started.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from llmcl.kernels.common.cost import fused_cost
from llmcl.kernels.common.dtype import ITEM_BYTES, TILE_ROWS, is_16_bit
from llmcl.kernels.common.functions import as_function, number_of, source_of, weight_dtype
from llmcl.kernels.common.persistent import BoundChains, ListedStep, PersistentStep
from llmcl.runtime.device import Buffer, Device, KernelArg, Launch
from llmcl.runtime.program import KernelSource, read_source

FILE = "portable/layer_chain.cl"
PRODUCT, ATTENTION, MERGE = "portable/linear_decode.cl", "portable/attention_decode.cl", "portable/attention_merge.cl"
LINKS = PRODUCT, ATTENTION, MERGE
# Shared sources: independent of any single kernel's build constants.
SHARED = "common/common.cl", "common/sub_groups.cl", "portable/widen.cl", "portable/await_links.cl"
_HEAD = """\
#define CHAINED 1
#define get_group_id(d) ((d) == 0 ? work_group.x : (d) == 1 ? work_group.y : work_group.z)
"""
LINK_PARAMS = "const uint3 work_group, __local uchar* memory, const awaited* link, "
ITEMS = {64: 512, 128: 256}  # work-items per work-group, keyed by the largest supported head dimension
MOST_ITEMS = max(ITEMS.values())
MOST_LINKS = 8
LINE_WORDS = 32  # words per counter, a cache line


class PortableLayerChain(PersistentStep):
    """Fuses single-row steps: products with 16-bit weights, attention and its merge. Other weights or wider heads were
    no faster than separate launches, or weren't measured.
    """

    name, file = "portable", FILE
    few_rows = True
    one_row = True
    runs_anywhere = False

    def supports_device(self, device: Device) -> bool:
        """Whether the device is an NVIDIA GPU, which has the fence in portable/await_links.cl."""
        return device.entry.kind == "gpu" and device.entry.ptx_arch > 0

    def unsupported_reason(self, device: Device, step: ListedStep) -> str | None:
        if device.queue_properties:
            return "each kernel is timed"
        if self.key("bfloat16") in device.cache.excluded:
            return "llmcl doctor found it to be wrong"
        if step.max_rows > 1 or step.state.n_sequences:
            return "it is for one token of one sequence"
        joined = (chain for chain in chains(device, step.launches) if len(chain) > 1)
        if not any(_has(chain, PRODUCT, 2) for chain in joined):
            return "no layer has portable attention and products with 16-bit weights, one after the other"
        return None

    def bind(self, device: Device, step: ListedStep) -> BoundChains:
        parts: list[Launch] = []
        for chain in chains(device, step.launches):
            parts += [chained(device, chain)] if len(chain) > 1 else chain
        return BoundChains(parts)


def chains(device: Device, launches: Sequence[Launch]) -> list[list[Launch]]:
    """Splits the launches, in order, into chains to fuse. A chain holds neighbours that include attention, and ends
    before its first kernel recurs.

    A kernel that occurs once in the step stays separate: fusing it would compile a program for a single launch.
    """
    keys = [_key(launch) for launch in launches]
    times = Counter(keys)
    found: list[list[Launch]] = []
    first = None  # key of the open chain's first kernel
    for launch, key in zip(launches, keys, strict=True):
        is_link = key is not None and times[key] > 1 and group_items(device, [launch]) > 0
        if is_link and first is not None and key != first and len(found[-1]) < MOST_LINKS:
            found[-1].append(launch)
            continue
        found.append([launch])
        first = key if is_link else None
    return [part for chain in found for part in ([chain] if _has(chain, ATTENTION) else [[launch] for launch in chain])]


def _has(chain: Sequence[Launch], file: str, least: int = 1) -> bool:
    """Whether at least `least` launches run the kernel in `file`."""
    sources = (launch.source for launch in chain)
    return sum(isinstance(source, KernelSource) and source.file == file for source in sources) >= least


def _key(launch: Launch) -> str | None:
    """Identifies the compiled code for a launch; None if the launch can't be fused."""
    source = launch.source
    if not isinstance(source, KernelSource) or source.file not in LINKS or "DOT" in source.constants:
        return None
    if source.file == PRODUCT and not is_16_bit(weight_dtype(source)):
        return None
    if source.file != PRODUCT and number_of(source, "HEAD_DIM") > max(ITEMS):
        return None
    return repr((source.file, sorted(source.constants.items()), source.prelude))


def group_items(device: Device, launches: Sequence[Launch]) -> int:
    """Returns work-items per work-group for a chain; 0 if the device's group size or local memory is too small."""
    sources = [source_of(launch) for launch in launches]
    widest = max((number_of(source, "HEAD_DIM") for source in sources if source.file != PRODUCT), default=0)
    items = min(MOST_ITEMS, next(items for dims, items in ITEMS.items() if widest <= dims))
    needed = max(local_bytes(source, items) for source in sources) + 16
    fits = items <= device.entry.max_work_group_size and needed <= device.entry.local_mem_bytes
    return items if fits else 0


def local_bytes(source: KernelSource, items: int) -> int:
    """Local memory in bytes for a fused kernel, a multiple of 16."""
    if source.file == PRODUCT:
        piece_rows = 16 // ITEM_BYTES[weight_dtype(source)]
        return 4 * items * (piece_rows + 1) + 4 * items // TILE_ROWS
    if source.file == ATTENTION:
        heads, dims, keys = number_of(source, "GROUP_SIZE"), number_of(source, "HEAD_DIM"), number_of(source, "BLOCK_N")
        return 4 * heads * (4 * items + dims + 2 * keys) + (4 * heads + 15) // 16 * 16
    return 0


def chained(device: Device, launches: Sequence[Launch]) -> Launch:
    """Fuses the launches into one."""
    items = group_items(device, launches)
    kinds: dict[str, int] = {}
    names: dict[int, str] = {}
    args: list[KernelArg] = [device.zeros(4 * LINE_WORDS * (1 + len(launches)), "counters of a chain")]
    functions, params, choice, first, units = "", "", "", 0, 0
    waits = ["counters", "0u", "counters", "0u"]
    for i, launch in enumerate(launches):
        own, key = _as_link(launch, items), _key(launch)
        assert key is not None
        if key not in kinds:
            kinds[key] = len(kinds)
            functions += as_function(own, f"_{kinds[key]}", SHARED, _HEAD, LINK_PARAMS)
        values = []
        for j, arg in enumerate(launch.args):
            if isinstance(arg, Buffer) and id(arg) in names:
                values.append(names[id(arg)])
                continue
            name = f"buffer_{len(args)}" if isinstance(arg, Buffer) else f"number_{i}_{j}"
            params += f", __global uchar* {name}" if isinstance(arg, Buffer) else f", const int {name}"
            value = f"(__global void*){name}" if isinstance(arg, Buffer) else name
            names[id(arg)] = value
            values.append(value)
            args.append(arg)
        x, y, z = (*launch.groups(1), 1, 1)[:3]
        unit, units = f"((number) - {first}u)", x * y * z
        group = f"(uint3)({unit} % {x}u, {unit} / {x}u % {y}u, {unit} / {x * y}u)"
        choice += (
            f"{'else ' if i else ''}if ((number) < {first + units}u) {{ link = {i}; "
            f"const awaited before = {{{waits[0]}, {waits[2]}, {waits[1]}, {waits[3]}}}; "
            f"{own.name}_{kinds[key]}({group}, memory, &before, {', '.join(values)}); }} "
        )
        first += units
        waits = [f"DONE({i})", f"{units}u", *(waits[:2] if i else ["counters", "0u"])]
    constants: dict[str, object] = {
        "ITEMS": items,
        "N_LINKS": len(launches),
        "LAST_GROUPS": units,
        "CHAIN_BYTES": max(16, *(local_bytes(source_of(launch), items) for launch in launches)),
    }
    texts = "#define INTEL_LANES 16\n" + "".join(read_source(file, SHARED[:i]) for i, file in enumerate(SHARED))
    macros = f"#define PARAMS {params}\n#define RUN_LINK(number) {choice}\n"
    cost = fused_cost(*(launch.cost for launch in launches if launch.cost is not None))
    prelude = f"{texts}\n{functions}{macros}"
    return device.launch(
        FILE, "layer_chain", constants, args, groups=(first,), local=(items,), prelude=prelude, cost=cost
    )


def _as_link(launch: Launch, items: int) -> KernelSource:
    """Returns the kernel's source for the fused launch, where work-group sizes may differ from a separate launch."""
    source = source_of(launch)
    own = {name: value for name, value in source.constants.items() if name != "SUB_GROUP"}  # the program sets its own
    own["LOCAL_SIZE"] = items
    if source.file == PRODUCT:
        own["AHEAD"] = 0
    return KernelSource(source.file, source.name, own, source.prelude)
