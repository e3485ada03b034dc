"""A persistent kernel for CPUs: work-groups go through several launches together and wait for each other in between.

Handing a kernel to the driver and starting it costs microseconds, and a decode step has some 180 of them. Here the
kernels become functions of one kernel, `cpu/persistent_step.cl`, and the launches a table that it reads: which
function, what arguments, and for each number of rows how many work-groups. Each work-group of a launch runs the same
code as before, so the bits are the same.

Work-groups take units of work in turn. Where one waits in vain for another, whose core the system gave to another
process, it takes that one's unit over. Where it cannot, it leaves: its thread sleeps, its core is free, and the rest is
done by those that are left. All take part again in the next launch, so a list that takes long is several.

A launch may do several steps in a row. Between launches a driver's threads give their cores to whoever wants them
(Intel's call `sched_yield`, PoCL's sleep) and then wait for milliseconds. In a launch they go on. A device that runs
ahead of the host needs none: its next launch is there when one ends.
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
from llmcl.runtime.cores import cores_now
from llmcl.runtime.device import Buffer, Device, KernelArg, Launch
from llmcl.runtime.program import KernelSource, read_source

FILE = "cpu/persistent_step.cl"
# Stand once before the functions: nothing in them depends on build constants.
SHARED = ("common/common.cl", "cpu/unit.cl")
# The spins of its waiting loop, some 0.6 ns each, after which a work-group takes over a unit that another holds: more
# than a piece of it takes (cpu/unit.cl). And after which it leaves: far more than a core that computes makes others
# wait. Both depend on the bytes that are read.
TAKE_SPINS = 100_000
LEAVE_SPINS = 200_000
BYTES_PER_SPIN = 8
FLOPS_PER_BYTE = 8  # that a core computes in the time of a byte, where rows are several
ENTRY_HEAD = 3  # what an entry has beside its arguments
PART_BYTES = 64 << 20  # that a core reads in a launch, some 2 to 4 ms
STEPS = 7  # in a row that a launch can do: few enough that an answer does not come in jerks
SYNC_SLOTS = 32
GROUP_SLOTS = 16  # for the word of a work-group, a cache line
MAX_GROUPS = 1 << 12  # what one word counts, with the units beside it
MAX_UNITS = 1 << 20
MAX_TIMES = 8  # more than STEPS
MAX_ENTRIES = (1 << 16) // MAX_TIMES  # PoCL takes the offset of an index space to be below 1 << 16

_WORK_GROUP = """\
#define get_group_id(d) ((d) == 0 ? work_group.x : (d) == 1 ? work_group.y : work_group.z)
#define get_num_groups(d) ((d) == 0 ? n_groups.x : (d) == 1 ? n_groups.y : n_groups.z)
#define get_local_id(d) 0
"""
_KERNEL_PARAMS = "const uint3 work_group, const uint3 n_groups, volatile __global uint* own, uint word, "


class CpuPersistentStep(PersistentStep):
    name, file = "cpu", FILE

    def supports_device(self, device: Device) -> bool:
        """Whether it is a processor whose kernels may use the addresses of buffers that are not their arguments."""
        return device.is_cpu

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
    """Launches bound into few, `parts`: one for every PART_BYTES that each core reads. Where one is enough, there are
    `whole_steps` as well, if what ends a step can be a part of it and the device does not run ahead.

    sync: the counters of cpu/persistent_step.cl.
    """

    def __init__(self, device: Device, step: ListedStep, *, groups: int | None = None):
        """groups: work-groups; None: one for each core that may be used at the time."""
        max_rows, ends = step.max_rows, _part_ends(device, step)
        takes_all = not device.runs_ahead and len(ends) == 1 and all(max(launch.local) == 1 for launch in step.then)
        then = step.then if takes_all else ()
        launches = (*step.launches, *then)
        kinds: dict[tuple[str, str, str], int] = {}
        firsts: list[Launch] = []
        self._launches = launches  # holds the buffers: the driver does not know that the kernel uses them
        weakref.finalize(self, device.close)  # so a launch that runs comes to its end before they go
        slots = ENTRY_HEAD + max(len(launch.args) for launch in launches)
        addresses = addresses_of(device, (arg for launch in launches for arg in launch.args if isinstance(arg, Buffer)))
        table = np.zeros((len(launches) + 1, slots), np.int64)
        sizes = np.array([[_size(launch, n) for launch in launches] for n in range(1, max_rows + 1)], np.uint32)
        spins = TAKE_SPINS, LEAVE_SPINS
        for i, launch in enumerate(launches):
            source = source_of(launch)
            key = (source.file, source.prelude, repr(sorted(source.constants.items())))
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
    """A number as the table has it: an int, or what the bits of a float32 are as one."""
    return int(arg.view(np.int32) if isinstance(arg, np.float32) else arg)


def _as_argument(arg: KernelArg, word: str) -> str:
    """The expression for what a `word` of the table holds."""
    if isinstance(arg, Buffer):
        return f"(__global void*){word}"
    return f"as_float((int){word})" if isinstance(arg, np.float32) else f"(int){word}"


def _part_ends(device: Device, step: ListedStep) -> list[int]:
    """Behind which launches a part ends."""
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
    """What a core reads in the time that the launch takes."""
    if launch.cost is None:
        return 0
    cost = launch.cost(n_rows, position)
    return cost.nbytes + (cost.flops / FLOPS_PER_BYTE if n_rows > 1 else 0)


def _spins(launch: Launch, n_rows: int, position: int) -> tuple[int, int]:
    """For how long who waits for the launch does so before it takes a unit over, and before it leaves.

    A unit that reads weights has pieces of one size. One that reads keys and values may be a piece as a whole.
    """
    nbytes = _bytes(launch, n_rows, position)
    of_position = (nbytes - _bytes(launch, n_rows, 0)) / max(1, math.prod(_size(launch, n_rows)))
    return TAKE_SPINS + int(2 * of_position / BYTES_PER_SPIN), LEAVE_SPINS + int(nbytes / BYTES_PER_SPIN)


def _functions(launches: Sequence[Launch]) -> str:
    """The kernels of these launches as functions, and RUN_ENTRY, which calls the one with a number."""
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
