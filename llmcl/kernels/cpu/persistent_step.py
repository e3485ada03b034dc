"""A persistent kernel for CPUs: work-groups run several launches together and synchronise in between.

Submitting and starting a kernel costs microseconds, and a decode step has some 180 kernels. Here they become functions
in one kernel, `cpu/persistent_step.cl`. The launches become a table: function, arguments, and the work-group count for
each row count. Each work-group runs the same code as in a separate launch, so results are bit-identical.

Work-groups take work units in turn. If a unit's core was given to another process, a waiting work-group takes the unit
over. If it can't, it exits: its thread sleeps, the core is free, and the remaining work-groups finish. All work-groups
return for the next launch, so a long list is split into several launches.

A launch may run several steps in a row. Between launches a driver's threads yield their cores (Intel's call
`sched_yield`, PoCL's sleep) and may then wait for milliseconds; within a launch they keep running. A device that runs
ahead of the host doesn't need several steps: its next launch is already queued.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence

import numpy as np

from llmcl.kernels.common import step_state
from llmcl.kernels.common.addresses import addresses_of
from llmcl.kernels.common.functions import as_function, source_of
from llmcl.kernels.common.persistent import ListedStep, PersistentStep
from llmcl.kernels.cpu.variant import CpuVariant
from llmcl.runtime.cores import cores_now
from llmcl.runtime.device import Buffer, Device, KernelArg, Launch
from llmcl.runtime.program import KernelSource, read_source

FILE = "cpu/persistent_step.cl"
# Included once before the functions: independent of build constants.
SHARED = ("common/common.cl", "cpu/unit.cl")
# Iterations of the waiting loop, about 0.6 ns each. After TAKE_SPINS a work-group takes over a held unit: longer than a
# piece takes (cpu/unit.cl). After LEAVE_SPINS it exits: far longer than a computing core makes others wait. Both grow
# with the bytes read.
TAKE_SPINS = 100_000
LEAVE_SPINS = 200_000
BYTES_PER_SPIN = 8
FLOPS_PER_BYTE = 8  # flops a core computes in the time of one byte, for several rows
ENTRY_HEAD = 3  # words in an entry before its arguments
PART_BYTES = 64 << 20  # read by each core per launch, some 2 to 4 ms
STEPS = 7  # most steps per launch: few enough for a smooth answer stream
SYNC_SLOTS = 32
GROUP_SLOTS = 16  # a work-group's word fills a cache line
MAX_GROUPS = 1 << 12  # limit of a single counter word, shared with the units
MAX_UNITS = 1 << 20
MAX_TIMES = 8  # more than STEPS
MAX_ENTRIES = (1 << 16) // MAX_TIMES  # PoCL assumes an index space offset below 1 << 16

_WORK_GROUP = """\
#define get_group_id(d) ((d) == 0 ? work_group.x : (d) == 1 ? work_group.y : work_group.z)
#define get_num_groups(d) ((d) == 0 ? n_groups.x : (d) == 1 ? n_groups.y : n_groups.z)
#define get_local_id(d) 0
"""
_KERNEL_PARAMS = "const uint3 work_group, const uint3 n_groups, volatile __global uint* own, uint word, "


class CpuPersistentStep(CpuVariant, PersistentStep):
    file = FILE  # on a CPU, kernels may use addresses of buffers that aren't kernel arguments

    def unsupported_reason(self, device: Device, step: ListedStep) -> str | None:
        if device.queue_properties:
            return "each kernel is timed"
        if self.key("float32") in device.cache.excluded:
            return "llmcl doctor found it to be wrong"
        if any(max(launch.local) > 1 for launch in step.launches):
            return "a kernel has several work-items in a work-group"
        launches = (*step.launches, *step.then)
        units = sum(math.prod(launch.groups(step.max_rows)) for launch in launches)
        if device.compute_units >= MAX_GROUPS or STEPS * units >= MAX_UNITS or len(launches) >= MAX_ENTRIES:
            return "it has too many work-groups to count"
        return None

    def bind(self, device: Device, step: ListedStep) -> PersistentKernel:
        return PersistentKernel(device, step)


class PersistentKernel:
    """Fuses launches into a few `parts`, one per PART_BYTES read by each core. If one part is enough, also binds
    `whole_steps`, provided the step's end can be included and the device doesn't run ahead.

    sync: the counters in cpu/persistent_step.cl.
    """

    def __init__(self, device: Device, step: ListedStep, *, groups: int | None = None):
        """groups: number of work-groups; None: one per core currently available."""
        max_rows, ends = step.max_rows, _part_ends(device, step)
        takes_all = not device.runs_ahead and len(ends) == 1 and all(max(launch.local) == 1 for launch in step.then)
        then = step.then if takes_all else ()
        launches = (*step.launches, *then)
        kinds: dict[tuple[str, ...], int] = {}
        firsts: list[Launch] = []
        self._launches = launches  # keeps the buffers alive: the driver doesn't know that the kernel uses them
        weakref.finalize(self, device.close)  # so a running launch finishes before the buffers are freed
        slots = ENTRY_HEAD + max(len(launch.args) for launch in launches)
        addresses = addresses_of(device, (arg for launch in launches for arg in launch.args if isinstance(arg, Buffer)))
        table = np.zeros((len(launches) + 1, slots), np.int64)
        sizes = np.array([[_size(launch, n) for launch in launches] for n in range(1, max_rows + 1)], np.uint32)
        spins = TAKE_SPINS, LEAVE_SPINS
        for i, launch in enumerate(launches):
            source = source_of(launch)
            key = (launch.name, source.file, source.prelude, repr(sorted(source.constants.items())))
            if key not in kinds:
                kinds[key] = len(kinds)
                firsts.append(launch)
            values = [addresses[id(arg)] if isinstance(arg, Buffer) else _bits(arg) for arg in launch.args]
            table[i, : ENTRY_HEAD + len(values)] = kinds[key], *spins, *values
            spins = _spins(launch, max_rows, step.max_position)
        table[-1, 1:ENTRY_HEAD] = spins
        sync_slots = SYNC_SLOTS + GROUP_SLOTS * (groups or device.compute_units)
        self.sync = device.zeros(4 * sync_slots, "counters of a persistent step")
        args = (
            device.upload(table, "entries of a persistent step"),
            device.upload(sizes, "work-groups of a persistent step"),
            np.int32(len(launches)),
            step.state.state,
            np.int32(max_rows),
            self.sync,
        )
        rows_slot = step_state.CONSTANTS["STATE_N_TOKENS"]
        constants = {
            "ENTRY_SLOTS": slots,
            "MAX_GROUPS": MAX_GROUPS,
            "MAX_TIMES": MAX_TIMES,
            "ROWS_SLOT": rows_slot,
            "SYNC_SLOTS": SYNC_SLOTS,
        }
        merged = KernelSource(FILE, "persistent_step", constants, _functions(firsts))

        def groups_now(n_tokens: int) -> tuple[int]:
            return (groups or min(device.compute_units, cores_now()),)

        def bound(end: int, n_steps: int) -> Launch:
            return Launch(device, merged, args, groups_now, (1,), offset=(end * MAX_TIMES + n_steps,))

        self.parts = [*(bound(end, 0) for end in ends[:-1]), bound(ends[-1], 1)]
        self.whole_steps: Mapping[int, Launch] = {STEPS: bound(len(launches), STEPS)} if then else {}


def _bits(arg: np.generic) -> int:
    """Returns a number as a table word: an int, or a float32's bits."""
    return int(arg.view(np.int32) if isinstance(arg, np.float32) else arg)


def _as_argument(arg: KernelArg, word: str) -> str:
    """Returns the expression that converts a table `word` back to the argument."""
    if isinstance(arg, Buffer):
        return f"(__global void*){word}"
    return f"as_float((int){word})" if isinstance(arg, np.float32) else f"(int){word}"


def _part_ends(device: Device, step: ListedStep) -> list[int]:
    """Returns the launch indices at which a part ends."""
    ends, part_bytes = [], 0.0
    for i, launch in enumerate(step.launches):
        part_bytes += _bytes(launch, step.max_rows, 0)
        if part_bytes > PART_BYTES * device.compute_units or i == len(step.launches) - 1:
            ends.append(i + 1)
            part_bytes = 0
    return ends


def _size(launch: Launch, n_rows: int) -> tuple[int, ...]:
    """Work-groups in three dimensions."""
    return (*launch.groups(n_rows), 1, 1)[:3]


def _bytes(launch: Launch, n_rows: int, position: int) -> float:
    """Returns the launch's cost in bytes: bytes read, plus flops in byte equivalents for several rows."""
    if launch.cost is None:
        return 0
    cost = launch.cost(n_rows, position)
    return cost.nbytes + (cost.flops / FLOPS_PER_BYTE if n_rows > 1 else 0)


def _spins(launch: Launch, n_rows: int, position: int) -> tuple[int, int]:
    """Returns how long to wait for the launch before taking a unit over, and before exiting.

    A unit reading weights has pieces with a fixed size. A unit reading keys and values may be a single piece.
    """
    nbytes = _bytes(launch, n_rows, position)
    of_position = (nbytes - _bytes(launch, n_rows, 0)) / max(1, math.prod(_size(launch, n_rows)))
    return TAKE_SPINS + int(2 * of_position / BYTES_PER_SPIN), LEAVE_SPINS + int(nbytes / BYTES_PER_SPIN)


def _functions(launches: Sequence[Launch]) -> str:
    """Returns the kernels as functions, and RUN_ENTRY, which calls a function by number."""
    cases = ""
    for number, launch in enumerate(launches):
        args = "".join(f", {_as_argument(arg, f'(at)[{i}]')}" for i, arg in enumerate(launch.args))
        cases += f" case {number}: {launch.name}_{number}(work_group, n_groups, own, word{args}); break;"
    functions = "".join(
        as_function(source_of(launch), f"_{number}", SHARED, _WORK_GROUP, _KERNEL_PARAMS)
        for number, launch in enumerate(launches)
    )
    run_entry = f"#define RUN_ENTRY(kernel, work_group, n_groups, own, word, at) switch (kernel) {{{cases} }}\n"
    shared = "".join(read_source(file, SHARED[:i]) for i, file in enumerate(SHARED))
    return f"{shared}{functions}{run_entry}"
