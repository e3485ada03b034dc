"""One opened OpenCL device: queue, buffers, programs, and the count of everything that crosses to the host."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any
from weakref import WeakSet

import numpy as np

from llmcl.errors import OutOfDeviceMemoryError
from llmcl.progress import Progress
from llmcl.runtime.icd import prepare_icd_loader
from llmcl.runtime.platforms import DeviceEntry
from llmcl.runtime.selection import select_device

prepare_icd_loader()  # before the first import of pyopencl anywhere

import pyopencl as cl  # noqa: E402
from pyopencl.tools import ImmediateAllocator, MemoryPool  # noqa: E402

from llmcl.runtime.buffer import Buffer as Buffer  # noqa: E402  device.Buffer, as most rooms know it
from llmcl.runtime.buffer import Spare  # noqa: E402
from llmcl.runtime.cores import cores_now  # noqa: E402
from llmcl.runtime.device_cache import DeviceCache  # noqa: E402
from llmcl.runtime.driver_calls import DriverCall, finish_quietly, named_errors, open_devices  # noqa: E402
from llmcl.runtime.huge_pages import HugePages  # noqa: E402
from llmcl.runtime.program import KernelSource, ProgramCache  # noqa: E402
from llmcl.runtime.sub_groups import sub_group_form  # noqa: E402
from llmcl.runtime.traffic import Traffic  # noqa: E402

KernelArg = Buffer | np.generic
Groups = tuple[int, ...] | Callable[[int], tuple[int, ...]]

# What pyopencl's own calls of kernels use for numbers. `set_arg` tries first whether one is a buffer, a sampler or a
# queue, which takes 7 to 13 us in place of 0.4.
_set_number: Callable[[cl.Kernel, int, np.generic], None] = getattr(cl.Kernel, "_set_arg_buf", cl.Kernel.set_arg)


@dataclass(frozen=True)
class Cost:
    """The bytes that a launch must read and write, once, and its floating-point operations (2 a multiply-add)."""

    nbytes: float
    flops: float = 0.0


SLEEP_S = 0.0002  # of a wait that may not take a processor's time: a step of a small model takes 20 times as long
KERNEL_SPILL_MEM_SIZE_INTEL = 0x4109  # a query of cl_intel_required_subgroup_size

CostModel = Callable[[int, int], Cost]  # of the number of tokens in the step and its position; for the profiler


@dataclass(frozen=True)
class KernelMemory:
    """What a work-item takes (private, and of that what its registers could not hold: spill) and a work-group (local).

    None where the driver does not say.
    """

    private_bytes: int | None
    local_bytes: int | None
    spill_bytes: int | None


class Launch:
    """A kernel with its arguments set once, ready to be enqueued again and again.

    `groups` is the number of work-groups in each dimension, or a function from the number of tokens in
    the step to it; nothing else about a launch changes from step to step. `cost` is what the profiler
    compares with the device's ceilings. The kernel object is made when it is first asked for. The `offset` of the index
    space may tell a kernel what to do.
    """

    __slots__ = (
        "_device",
        "_groups",
        "_kernel",
        "_offset",
        "_shares",
        "_size",
        "_used",
        "args",
        "cost",
        "first_position",
        "local",
        "name",
        "source",
    )

    def __init__(
        self,
        device: Device,
        source: KernelSource | cl.Kernel,
        args: Sequence[KernelArg],
        groups: Groups,
        local: tuple[int, ...],
        cost: CostModel | None = None,
        offset: tuple[int, ...] | None = None,
    ):
        self._device = device
        self._offset = offset
        self._kernel: cl.Kernel | None = None
        self._shares = False
        self._used: Sequence[Buffer] = ()
        self.first_position = 0
        self.source = source
        self.name = source.name if isinstance(source, KernelSource) else source.function_name
        self.args = tuple(args)  # clSetKernelArg does not keep buffers alive
        self._groups = groups
        self.local = local
        self.cost = cost
        # The global size, computed once where it does not depend on the number of tokens.
        self._size = None if callable(groups) else tuple(g * w for g, w in zip(groups, local, strict=True))

    @property
    def kernel(self) -> cl.Kernel:
        """The kernel with its arguments set. Raises KernelBuildError where it does not compile."""
        if self._kernel is None:
            source = self.source
            self._kernel = self._device.kernel(source, self._shares) if isinstance(source, KernelSource) else source
            if not self._shares:  # a shared one may hold arguments of another thread that it has not enqueued yet
                self._set_args(self._kernel)
        return self._kernel

    def prepare(self) -> None:
        """Compiles the kernel and makes its object now, so that the first enqueue does not. Raises KernelBuildError."""
        assert self.kernel is not None

    def needed_from(self, position: int) -> Launch:
        """Notes that the kernel has nothing to do in a decode step before this position of the cache."""
        self.first_position = position
        return self

    def using(self, buffers: Sequence[Buffer]) -> Launch:
        """Keeps these alive as its arguments are: the kernel has their addresses."""
        self._used = buffers
        return self

    def share_seldom_used(self) -> None:
        """Shares the kernel object of a launch of prefill where that pays: on a CPU, which sets arguments quickly."""
        if self._device.is_cpu:
            self.share_kernel()

    def share_kernel(self) -> Launch:
        """From now on this launch uses the kernel object that others share, too. For launches that are enqueued seldom.

        It saves the memory and time of an object; setting the arguments at each enqueue takes microseconds.
        """
        self._shares = True
        return self

    def _set_args(self, kernel: cl.Kernel) -> None:
        with named_errors(f"setting the arguments of {self.name}"):
            for index, arg in enumerate(self.args):
                if isinstance(arg, Buffer):
                    kernel.set_arg(index, arg.cl)
                else:
                    _set_number(kernel, index, arg)

    def groups(self, n_tokens: int) -> tuple[int, ...]:
        return self._groups(n_tokens) if callable(self._groups) else self._groups

    def global_size(self, n_tokens: int) -> tuple[int, ...]:
        return self._size or tuple(g * w for g, w in zip(self.groups(n_tokens), self.local, strict=True))

    def memory(self) -> KernelMemory:
        """What the driver says about the compiled kernel."""

        def query(info: int) -> int | None:
            try:
                value = self.kernel.get_work_group_info(info, self._device.entry.device)
            except (cl.Error, TypeError, ValueError):
                return None
            return value if isinstance(value, int) else None

        info = cl.kernel_work_group_info
        return KernelMemory(
            query(info.PRIVATE_MEM_SIZE), query(info.LOCAL_MEM_SIZE), query(KERNEL_SPILL_MEM_SIZE_INTEL)
        )

    def bind(self, index: int, memory: Any) -> None:
        """Sets an argument again, to the user's memory (cl.Buffer, or of a pool). It must live until the enqueue."""
        self.kernel.set_arg(index, memory)

    def enqueue(self, n_tokens: int = 1) -> cl.Event | None:
        """None: the step has no work-groups for it."""
        kernel, size = self._kernel or self.kernel, self._size or self.global_size(n_tokens)
        if 0 in size:
            return None
        self._device.traffic.kernel_launches += 1
        if not self._shares:
            return cl.enqueue_nd_range_kernel(self._device.queue, kernel, size, self.local, self._offset)
        with self._device.lock:
            self._set_args(kernel)
            return cl.enqueue_nd_range_kernel(self._device.queue, kernel, size, self.local, self._offset)


class Device:
    """An opened device: an in-order queue, and on a GPU a second one for reads.

    Every transfer goes through `write` and `read` and is counted. Several models may be on it, each used by a thread of
    its own; `lock` is held for moments, where they meet.
    """

    launch_type: type[Launch] = Launch
    queue_properties: int = 0

    def __init__(self, entry: DeviceEntry):
        self.entry = entry
        self.lock = threading.RLock()
        with named_errors(f"opening {entry.name}"):
            self.context = cl.Context([entry.device])
            properties = self.queue_properties
            self.queue = cl.CommandQueue(self.context, entry.device, properties)  # type: ignore[arg-type]
            # A GPU hands tokens over beside the next step's kernels; a CPU copies with the threads that compute.
            self._reads = self.queue if entry.kind == "cpu" else cl.CommandQueue(self.context, entry.device)
        open_devices.add(self)
        self.programs = ProgramCache(self.context, entry.device)
        self.cache = DeviceCache(entry)
        self.kernel_options: dict[str, int] = {}  # constants of attention that a user chose, before any tuned ones
        self.traffic = Traffic()
        self.allocated_bytes = 0
        self.peak_bytes = 0
        # It holds the queue and not the device: the collector sees no cycle that leads through a NumPy array.
        before_freeing = partial(finish_quietly, self.queue)
        self._huge_pages = HugePages(before_freeing) if entry.kind == "cpu" and not entry.is_software else None
        self.kept: dict[str, Any] = {}  # what an operation keeps from call to call, under its name
        self.spares: WeakSet[Spare] = WeakSet()

    @classmethod
    def open(cls, request: Device | DeviceEntry | str | int | None = None) -> Device:
        """Opens an entry of `find_devices()`, or the device that `request` selects (see `select_device`).

        A device that is open already is returned as it is.
        """
        if isinstance(request, Device):
            return request
        return cls(request if isinstance(request, DeviceEntry) else select_device(request))

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def is_cpu(self) -> bool:
        """Whether a work-item is a thread with vectors of its own.

        Software renderers (llvmpipe) do not count: they run neighbouring work-items in the lanes of a vector, as GPUs
        do. They also end the loops of a work-item after 65535 iterations in all (Mesa's LP_MAX_TGSI_LOOP_ITERATIONS),
        so it must not do the work of many.
        """
        return self.entry.kind == "cpu" and not self.entry.is_software

    @property
    def runs_ahead(self) -> bool:
        """Whether the host can learn that a step has ended while the next one runs.

        In Intel's CPU driver the thread that waits for a token also computes, so the token would only come after the
        next step. In PoCL it sleeps.
        """
        return not self.is_cpu or self.entry.is_pocl

    @property
    def compute_units(self) -> int:
        return self.entry.compute_units

    @property
    def sub_group(self) -> int:
        """Which names for sub-groups kernels use (kernels/common/sub_groups.cl); 0: none, they meet in local memory."""
        return sub_group_form(self.entry)

    @cached_property
    def allocator(self) -> MemoryPool:
        """For arrays of pyopencl (`allocator=device.allocator`): memory that an array gave back serves the next one."""
        return MemoryPool(ImmediateAllocator(self.queue))

    @property
    def compile_s(self) -> float:
        """Seconds spent compiling kernels, apart from those that the cache on disk had."""
        return self.programs.compile_s

    def compile_progress(
        self, launches: Iterable[Launch], progress: Progress | None, later: Iterable[Launch] = ()
    ) -> AbstractContextManager[None]:
        """See `ProgramCache.compiling`: what these launches need, and what others need later."""
        self.programs.taken_bytes = self.allocated_bytes
        return self.programs.compiling(self.entry, _sources(launches), progress, _sources(later))

    def is_compiling(self, launches: Iterable[Launch]) -> bool:
        """Whether other processes are compiling programs that these launches lack."""
        return self.programs.compiles_later and bool(self.programs.missing(_sources(launches)))

    # ---- memory -------------------------------------------------------------------------------------

    @property
    def memory_bytes(self) -> int:
        """All memory that there is for buffers, those that exist included."""
        entry = self.entry
        return min(entry.global_mem_bytes, entry.host_available_bytes or entry.global_mem_bytes)

    def give_back_spares(self) -> bool:
        """Gives back what is only kept for later (`spares`). Returns whether that freed any memory."""
        before = self.allocated_bytes
        for spare in list(self.spares):
            spare.give_back()
        return self.allocated_bytes < before

    def alloc(self, nbytes: int, name: str, *, streamed: bool = False) -> Buffer:
        """Uninitialised device memory; what is only kept for later makes room. streamed: it is read from end to end in
        every step.

        Raises OutOfDeviceMemoryError when the device refuses, naming the buffer and both sizes.
        """
        if nbytes > self.entry.max_alloc_bytes:
            raise OutOfDeviceMemoryError(
                f"{name} needs one buffer of {nbytes:,} bytes, but {self.name} allows at most "
                f"{self.entry.max_alloc_bytes:,} bytes in a single allocation; use a smaller --ctx-size, --dtype or "
                "--kv-dtype"
            )
        # Drivers of GPUs take memory when it is first used, so their refusal may come too late.
        if self.allocated_bytes + nbytes > self.memory_bytes:
            self.give_back_spares()
        try:
            return self._alloc(nbytes, name, streamed)
        except OutOfDeviceMemoryError:
            if not self.give_back_spares():
                raise
            return self._alloc(nbytes, name, streamed)

    def _alloc(self, nbytes: int, name: str, streamed: bool) -> Buffer:
        with named_errors(f"allocating {nbytes:,} bytes for {name}"), self.lock:
            pages = self._huge_pages.take(max(nbytes, 4)) if streamed and self._huge_pages else None
            if pages is None:
                memory = cl.Buffer(self.context, cl.mem_flags.READ_WRITE, max(nbytes, 4))
            else:
                memory = cl.Buffer(self.context, cl.mem_flags.READ_WRITE | cl.mem_flags.USE_HOST_PTR, hostbuf=pages)
            self.allocated_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
        return Buffer(self, memory, nbytes, name)

    def zeros(self, nbytes: int, name: str) -> Buffer:
        """Device memory filled with zero bytes (`nbytes` a multiple of 4)."""
        buffer = self.alloc(nbytes, name)
        self.fill(buffer, np.uint32(0))
        return buffer

    def fill(
        self, buffer: Buffer, pattern: np.generic | np.ndarray, offset_bytes: int = 0, nbytes: int | None = None
    ) -> None:
        """Repeats a `pattern` (4 to 128 bytes, a power of two) over the buffer, or nbytes of it from offset_bytes on,
        without waiting.
        """
        with named_errors(f"filling {buffer.name}"):
            size = buffer.nbytes - offset_bytes if nbytes is None else nbytes
            cl.enqueue_fill_buffer(self.queue, buffer.cl, np.atleast_1d(pattern), offset_bytes, size)

    def copy_rows(
        self, buffer: Buffer, source: int, target: int, *, row_bytes: int, n_rows: int, pitch_bytes: int
    ) -> None:
        """Copies within a buffer, on the device: n_rows rows of row_bytes, pitch_bytes from one to the next, from byte
        `source` to byte `target`."""
        what: dict[str, Any] = {"byte_count": row_bytes, "src_offset": source, "dst_offset": target}
        if n_rows > 1:  # PoCL 3.0 takes rectangles of one row, one beside the other, for overlapping ones
            pitches = (pitch_bytes, pitch_bytes * n_rows)
            what = {"src_origin": (source, 0, 0), "dst_origin": (target, 0, 0), "region": (row_bytes, n_rows, 1)}
            what |= {"src_pitches": pitches, "dst_pitches": pitches}
        with named_errors(f"copying within {buffer.name}"):
            cl.enqueue_copy(self.queue, buffer.cl, buffer.cl, **what)

    def upload(self, array: np.ndarray, name: str) -> Buffer:
        """A new buffer with the bytes of `array` (C order)."""
        buffer = self.alloc(array.nbytes, name)
        self.write(buffer, array)
        return buffer

    def write(self, buffer: Buffer, array: np.ndarray, offset_bytes: int = 0) -> None:
        """Copies `array` to the device; returns when the host may change it again."""
        array = np.ascontiguousarray(array)
        with named_errors(f"writing {array.nbytes:,} bytes to {buffer.name}"):
            cl.enqueue_copy(self.queue, buffer.cl, array, dst_offset=offset_bytes, is_blocking=True)
        self.traffic.host_to_device_bytes += array.nbytes

    def write_async(self, buffer: Buffer, array: np.ndarray, offset_bytes: int = 0) -> object:
        """Enqueues a copy of `array` to the device, without waiting. Until what is enqueued next is done, the caller
        keeps what this returns, and leaves the array as it is. From a `pinned` array it is sure not to block.
        """
        with named_errors(f"writing {array.nbytes:,} bytes to {buffer.name}"):
            event = cl.enqueue_copy(self.queue, buffer.cl, array, dst_offset=offset_bytes, is_blocking=False)
        self.traffic.host_to_device_bytes += array.nbytes
        return event

    def read(
        self, buffer: Buffer, dtype: np.typing.DTypeLike, shape: tuple[int, ...], offset_bytes: int = 0
    ) -> np.ndarray:
        """Copies from the device and waits for everything enqueued before."""
        array = np.empty(shape, dtype)
        self.read_async(buffer, array, offset_bytes)()
        return array

    def pinned(self, n: int) -> np.ndarray:
        """A host array int32 [n] that the device reads and writes by itself: copies of other memory may block."""
        with named_errors(f"allocating {4 * n} bytes of pinned host memory"):
            memory = cl.Buffer(self.context, cl.mem_flags.READ_WRITE | cl.mem_flags.ALLOC_HOST_PTR, 4 * n)
            array: np.ndarray
            both: Any = cl.map_flags.READ | cl.map_flags.WRITE  # a number
            array, _ = cl.enqueue_map_buffer(self.queue, memory, both, 0, (n,), np.dtype(np.int32))
        return array  # the mapping, and with it the memory, lives as long as the array

    def read_async(self, buffer: Buffer, array: np.ndarray, offset_bytes: int = 0) -> Callable[[], None]:
        """Enqueues a copy of the buffer, as the work enqueued so far leaves it. Returns a function that waits for it.

        On a GPU, work that is enqueued later may run before the copy, so it must not write to the buffer.
        """
        with named_errors(f"reading {array.nbytes:,} bytes from {buffer.name}"):
            after = []
            if self._reads is not self.queue:
                after = [cl.enqueue_marker(self.queue)]
                self.queue.flush()
            event = cl.enqueue_copy(
                self._reads, array, buffer.cl, src_offset=offset_bytes, is_blocking=False, wait_for=after
            )
            self._reads.flush()
        self.traffic.device_to_host_bytes += array.nbytes
        return partial(self._wait, event)

    # ---- kernels ------------------------------------------------------------------------------------

    def launch(
        self,
        file: str,
        name: str,
        constants: dict[str, object],
        args: Sequence[KernelArg],
        *,
        groups: Groups,
        local: tuple[int, ...],
        prelude: str = "",
        cost: CostModel | None = None,
    ) -> Launch:
        """Kernel `name` of `kernels/<file>`, built with `constants`, with `args` (Buffer or NumPy scalar).

        prelude: OpenCL C in front of the file, such as functions that it calls. cost: what a launch moves and
        computes, for the profiler.
        """
        if self.sub_group:
            constants = {**constants, "SUB_GROUP": self.sub_group}
        return self.launch_type(self, KernelSource(file, name, constants, prelude), args, groups, local, cost)

    def kernel(self, source: KernelSource, shared: bool) -> cl.Kernel:
        """The compiled kernel: an object of its own, whose arguments nobody else sets, or the shared one."""
        with DriverCall():
            return self.programs.kernel(source, shared=shared)

    def flush(self) -> None:
        """Hands everything enqueued to the device without waiting for it."""
        with named_errors("submitting work"):
            self.queue.flush()

    def marker(self) -> Callable[[], None]:
        """Hands over everything enqueued. Returns a function that waits until it is done, but for nothing later."""
        with named_errors("submitting work"):
            event = cl.enqueue_marker(self.queue)
            self.queue.flush()
        return partial(self._wait, event)

    def finish(self) -> None:
        """Waits until the device has done everything enqueued."""
        with named_errors("waiting for the device"):
            self.queue.finish()

    def _wait(self, event: cl.Event) -> None:
        with named_errors("waiting for the device"):
            if not self.runs_ahead and cores_now() < self.compute_units:
                # A quota leaves fewer cores than the driver has threads. A thread that waits inside Intel's driver
                # looks for work all the time, and its time comes out of the quota.
                while event.command_execution_status > cl.command_execution_status.COMPLETE:
                    time.sleep(SLEEP_S)
            event.wait()

    def close(self) -> None:
        """Waits for the queue. Nobody needs the errors of a device that is gone. Ends what compiles beside."""
        self.programs.close()
        finish_quietly(self.queue)


def _sources(launches: Iterable[Launch]) -> Iterator[KernelSource]:
    return (launch.source for launch in launches if isinstance(launch.source, KernelSource))
