"""Several launches of a CPU device as one: work-groups go through them together and wait for each other in between.

Handing a kernel to the driver and starting it costs microseconds, and a decode step has some 180 of them. Here the
kernels become functions of one kernel, `cpu/one_launch.cl`, and the launches a table that it reads: which function, how
many work-groups, what arguments. Each work-group of a launch runs the same code as before, so the bits are the same.

Work-groups take units of work in turn and wait for those taken before, so none waits for one that does not run. But a
thread that waits for one which the system has put aside for another process does so in vain. Where the waits of a step
take two or three times as long as the step should, all leave, the result is NaN and `OneLaunch.gave_up` says so; the
caller then has `OneLaunch.apart` for a while: a launch for each entry of the table, whose driver lets waiting threads
sleep. They are the same kernel told to run one entry, so nothing is compiled or bound when they are needed.
"""

from __future__ import annotations

import math
import re
import weakref
from collections.abc import Iterable, Sequence
from functools import cached_property, partial

import numpy as np

from llmcl.kernels.implementation import Implementation
from llmcl.runtime.cores import usable_cores
from llmcl.runtime.device import Buffer, Device, KernelArg, Launch, Work
from llmcl.runtime.program import KernelSource, constant_text, read_source

FILE = "cpu/one_launch.cl"
SHARED = "common/common.cl"  # stands once before the functions: nothing in it depends on build constants
# The turns of its waiting loop that a work-group may take in a launch: some 0.6 ns each, two or three times what a step
# takes, which is about what it costs to give up. So a core that is taken away once does not end the launch.
BYTES_PER_TURN, SPARE_TURNS, MOST_TURNS = 8, 1 << 22, 2**32 - 1
SYNC_SLOTS, CLAIMED, GAVE_UP = 48, 16, 33  # of the buffer `sync`

_FUNCTION = re.compile(r"\binline [\w\s*]*?(\w+)\(")
_KERNEL = re.compile(r"^__kernel __attribute__\(\(reqd_work_group_size\([^)]*\)\)\)\s+void (\w+)\(", re.MULTILINE)
_STRUCT = re.compile(r"^\} (\w+);", re.MULTILINE)
_MACRO = re.compile(r"^#define (\w+)", re.MULTILINE)
_PLACE = """\
#define get_group_id(d) ((d) == 0 ? place.x : place.y)
#define get_num_groups(d) ((d) == 0 ? place.z : place.w)
#define get_local_id(d) 0
"""


class CpuOneLaunch(Implementation):
    """A step of decode in one launch, as `llmcl doctor` checks it."""

    name, file = "cpu", FILE

    def suits(self, device: Device) -> bool:
        """Whether it is a processor whose kernels may use the addresses of buffers that are not their arguments."""
        return device.is_cpu


def why_not(device: Device, launches: Sequence[Launch]) -> str | None:
    """What keeps these launches from being one on this device; None: nothing."""
    if not CpuOneLaunch().suits(device):
        return "the device is not a processor"
    if device.queue_properties:
        return "each kernel is timed"
    if f"{FILE} float32" in device.findings.wrong:
        return "llmcl doctor found it to be wrong"
    if any(max(launch.local) > 1 or len(launch.local) > 2 for launch in launches):
        return "a kernel has several work-items in a work-group"
    return None


class OneLaunch:
    """Launches bound into one, `launch`. It leaves NaN in its result after a launch that gave up."""

    def __init__(
        self,
        device: Device,
        launches: Sequence[Launch],
        result: Buffer,
        *,
        groups: int | None = None,
    ):
        """result: float32, what the launches compute. groups: work-groups; None: one for each core that may be used."""
        kinds: dict[tuple[str, str, str], int] = {}
        firsts: list[Launch] = []
        self._device = device
        self._launches = tuple(launches)  # holds the buffers: the driver does not know that the kernel uses them
        weakref.finalize(self, device.close)  # so a launch that runs comes to its end before they go
        self._sync = device.zeros(4 * SYNC_SLOTS, "counters of one launch")
        slots = 3 + max(len(launch.args) for launch in launches)
        addresses = _addresses(device, (arg for launch in launches for arg in launch.args if isinstance(arg, Buffer)))
        table = np.zeros((len(launches), slots), np.int64)
        for row, launch in zip(table, launches, strict=True):
            source = _source(launch)
            key = (source.file, source.prelude, repr(sorted(source.constants.items())))
            if key not in kinds:
                kinds[key] = len(kinds)
                firsts.append(launch)
            values = [addresses[id(arg)] if isinstance(arg, Buffer) else int(arg) for arg in launch.args]
            row[: 3 + len(values)] = kinds[key], *(*launch.groups(1), 1)[:2], *values
        work = partial(_work, self._launches)  # no method, which would make a cycle with `launch`
        args: list[KernelArg] = [
            device.upload(table, "entries of one launch"),
            np.int32(len(launches)),
            self._sync,
            result,
            np.int32(result.nbytes // 4),
            np.uint32(min(SPARE_TURNS + int(work(1, 0).nbytes / BYTES_PER_TURN), MOST_TURNS)),
        ]
        self.launch = device.launch(
            FILE,
            "one_launch",
            {"ENTRY_SLOTS": slots},
            args,
            groups=(groups or min(device.compute_units, usable_cores()),),
            local=(1,),
            prelude=_functions(firsts),
            work=work,
        )

    @cached_property
    def apart(self) -> Sequence[Launch]:
        """The launches one by one: the kernel of `launch`, which an offset tells the entry that it is to run."""
        return [
            Launch(
                self._device, self.launch.kernel, (), (math.prod(launch.groups(1)),), (1,), launch.work, offset=(entry,)
            )
            for entry, launch in enumerate(self._launches, 1)
        ]

    def gave_up(self) -> bool:
        """Whether a launch gave up since this was last asked. Waits for the device."""
        found = bool(self._device.read(self._sync, np.uint32, (1,), 4 * GAVE_UP)[0])
        if found:  # the kernel left the other slots 0
            self._device.fill(self._sync, np.uint32(0), 4 * GAVE_UP, 4)
        return found


def _work(launches: Sequence[Launch], n: int, position: int) -> Work:
    works = [launch.work(n, position) for launch in launches if launch.work]
    return Work(sum(work.nbytes for work in works), sum(work.flops for work in works))


def _source(launch: Launch) -> KernelSource:
    assert isinstance(launch.source, KernelSource)
    return launch.source


def _functions(launches: Sequence[Launch]) -> str:
    """The kernels of these launches as functions, and RUN_ENTRY, which calls the one with a number."""
    cases = ""
    for number, launch in enumerate(launches):
        args = "".join(
            f", (__global void*)(at)[{i}]" if isinstance(arg, Buffer) else f", (int)(at)[{i}]"
            for i, arg in enumerate(launch.args)
        )
        cases += f" case {number}: {launch.name}_{number}(place{args}); break;"
    functions = "".join(as_function(_source(launch), f"_{number}") for number, launch in enumerate(launches))
    return f"{read_source(SHARED)}{functions}#define RUN_ENTRY(kernel, place, at) switch (kernel) {{{cases} }}\n"


def as_function(source: KernelSource, suffix: str) -> str:
    """A kernel of one work-item a group as a function that is told its place: name + suffix (int4 place, arguments).

    OpenCL C has no templates: the file's functions and structures get names of their own, and its macros end with it.
    So a program can have a kernel for several shapes and storage types. `common.cl` is to stand before it.
    """
    text = source.prelude + read_source(source.file, (SHARED,))
    names = {*_FUNCTION.findall(text), *_KERNEL.findall(text), *_STRUCT.findall(text)}
    text = _KERNEL.sub(r"inline void \1(const int4 place, ", text)
    text = re.sub(rf"\b({'|'.join(sorted(names))})\b", rf"\1{suffix}", text)
    constants = {name: constant_text(value) for name, value in sorted(source.constants.items())}
    macros = sorted({*_MACRO.findall(_PLACE + text), *constants})
    return (
        "".join(f"#define {name} {value}\n" for name, value in constants.items())
        + _PLACE
        + text
        + "".join(f"\n#undef {name}" for name in macros)
        + "\n"
    )


def _addresses(device: Device, buffers: Iterable[Buffer]) -> dict[int, int]:
    """Where these buffers lie in the device's memory, by the identity of each."""
    distinct = list({id(buffer): buffer for buffer in buffers}.values())
    table = device.alloc(8 * len(distinct), "addresses of buffers")
    launch = device.launch(
        "cpu/store_address.cl", "store_address", {}, [table, np.int32(0), table], groups=(1,), local=(1,)
    )
    for i, buffer in enumerate(distinct):
        launch.bind(1, np.int32(i))
        launch.bind(2, buffer.cl)
        launch.enqueue()
    found = device.read(table, np.int64, (len(distinct),))
    table.release()
    return dict(zip(map(id, distinct), found.tolist(), strict=True))
