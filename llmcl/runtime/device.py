"""An opened OpenCL device: queue, buffers, programs, and counters for all transfers to and from the host."""

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

prepare_icd_loader()  # must run before the first import of pyopencl

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

# The setter that pyopencl's own kernel calls use for numbers. `set_arg` first tries buffer, sampler and queue, and
# takes 7 to 13 us instead of 0.4.
_set_number: Callable[[cl.Kernel, int, np.generic], None] = getattr(cl.Kernel, "_set_arg_buf", cl.Kernel.set_arg)


@dataclass(frozen=True)
class Cost:
    """Bytes that a launch must read and write, once each, and floating-point operations (2 per multiply-add)."""

    nbytes: float
    flops: float = 0.0


SLEEP_S = 0.0002  # polling interval of a wait without processor time; a small model's step takes 20 times as long
KERNEL_SPILL_MEM_SIZE_INTEL = 0x4109  # a query in cl_intel_required_subgroup_size

CostModel = Callable[[int, int], Cost]  # (tokens in the step, position) -> Cost, for the profiler


@dataclass(frozen=True)
class KernelMemory:
    """Memory per work-item (private, with spilled registers) and per work-group (local). None if unknown."""

    private_bytes: int | None  # spill included
    local_bytes: int | None
    spill_bytes: int | None  # registers spilled to memory


class Launch:
    """A kernel with arguments set once, ready to be enqueued repeatedly.

    groups: work-groups per dimension, or a function from the step's token count. Nothing else changes between steps.
    cost: compared with the device's ceilings by the profiler. offset: index space offset, which may select what the
    kernel does. The kernel object is created on first use.
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
        # The global size, computed once unless it depends on the token count.
        self._size = None if callable(groups) else tuple(g * w for g, w in zip(groups, local, strict=True))

    @property
    def kernel(self) -> cl.Kernel:
        """The kernel with arguments set. Raises KernelBuildError if compilation fails."""
        if self._kernel is None:
            source = self.source
            self._kernel = self._device.kernel(source, self._shares) if isinstance(source, KernelSource) else source
            if not self._shares:  # a shared object may hold another thread's arguments, not yet enqueued
                self._set_args(self._kernel)
        return self._kernel

    def prepare(self) -> None:
        """Compiles the kernel and creates its object now instead of at the first enqueue. Raises KernelBuildError."""
        assert self.kernel is not None

    def needed_from(self, position: int) -> Launch:
        """Records that decode steps before this cache position do not need the kernel."""
        self.first_position = position
        return self

    def using(self, buffers: Sequence[Buffer]) -> Launch:
        """Keeps buffers alive whose addresses the kernel holds."""
        self._used = buffers
        return self

    def share_seldom_used(self) -> None:
        """Shares a prefill launch's kernel object where it pays: on a CPU, where setting arguments is fast."""
        if self._device.is_cpu:
            self.share_kernel()

    def share_kernel(self) -> Launch:
        """Uses the kernel object shared with other launches from now on. For rarely enqueued launches: saves an
        object's memory and creation time, but sets the arguments at each enqueue, which takes microseconds.
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
        """Returns the driver's memory figures for the compiled kernel."""

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
        """Sets an argument again, to the user's memory (cl.Buffer or pool memory), valid until the enqueue."""
        self.kernel.set_arg(index, memory)

    def enqueue(self, n_tokens: int = 1) -> cl.Event | None:
        """Enqueues the kernel. Returns None if the step has no work-groups for it."""
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
    """An opened device: an in-order queue, and on a GPU a second queue for reads.

    Every transfer goes through `write` and `read` and is counted. Several models may share the device, each in a
    separate thread; `lock` is held briefly where threads meet.
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
            # A GPU copies tokens to the host while the next step runs. A CPU copies with its compute threads.
            self._reads = self.queue if entry.kind == "cpu" else cl.CommandQueue(self.context, entry.device)
        open_devices.add(self)
        self.programs = ProgramCache(self.context, entry.device)
        self.cache = DeviceCache(entry)
        self.kernel_options: dict[str, int] = {}  # attention constants chosen by a user; override tuned constants
        self.traffic = Traffic()
        self.allocated_bytes = 0
        self.peak_bytes = 0
        # Holds the queue, not the device: the garbage collector cannot see a cycle through a NumPy array.
        before_freeing = partial(finish_quietly, self.queue)
        self._huge_pages = HugePages(before_freeing) if entry.kind == "cpu" and not entry.is_software else None
        self.kept: dict[str, Any] = {}  # state that an operation keeps between calls, by name
        self.spares: WeakSet[Spare] = WeakSet()

    @classmethod
    def open(cls, request: Device | DeviceEntry | str | int | None = None) -> Device:
        """Opens an entry from `find_devices()`, or the device that `request` selects (see `select_device`). Returns an
        open device unchanged.
        """
        if isinstance(request, Device):
            return request
        return cls(request if isinstance(request, DeviceEntry) else select_device(request))

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def is_cpu(self) -> bool:
        """Whether a work-item is a thread with private vectors.

        False for software renderers (llvmpipe): like GPUs, they run neighbouring work-items in the lanes of a vector.
        They also end a work-item's loops after 65535 iterations in total (Mesa's LP_MAX_TGSI_LOOP_ITERATIONS), so a
        work-item must not do the work of many.
        """
        return self.entry.kind == "cpu" and not self.entry.is_software

    @property
    def runs_ahead(self) -> bool:
        """Whether the host can learn that a step has ended while the next step runs.

        In Intel's CPU driver the waiting thread also computes, so a token would only arrive after the next step. PoCL's
        waiting thread sleeps.
        """
        return not self.is_cpu or bool(self.entry.fact("is_pocl"))

    @property
    def compute_units(self) -> int:
        return self.entry.compute_units

    @property
    def sub_group(self) -> int:
        """Which names for sub-groups kernels use (kernels/common/sub_groups.cl); 0: none, kernels use local memory."""
        return sub_group_form(self.entry)

    @cached_property
    def allocator(self) -> MemoryPool:
        """Memory pool for pyopencl arrays (`allocator=device.allocator`): reuses the memory of freed arrays."""
        return MemoryPool(ImmediateAllocator(self.queue))

    @property
    def compile_s(self) -> float:
        """Seconds spent compiling kernels. Programs loaded from disk do not count."""
        return self.programs.compile_s

    def compile_progress(
        self, launches: Iterable[Launch], progress: Progress | None, later: Iterable[Launch] = ()
    ) -> AbstractContextManager[None]:
        """Compiles what these launches need now and what `later` launches need; see `ProgramCache.compiling`."""
        self.programs.taken_bytes = self.allocated_bytes
        return self.programs.compiling(self.entry, _sources(launches), progress, _sources(later))

    def is_compiling(self, launches: Iterable[Launch]) -> bool:
        """Returns whether child processes are still compiling programs for these launches."""
        return self.programs.compiles_later and bool(self.programs.missing(_sources(launches)))

    # ---- memory -------------------------------------------------------------------------------------

    @property
    def memory_bytes(self) -> int:
        """Total memory for buffers, existing buffers included."""
        entry = self.entry
        return min(entry.global_mem_bytes, entry.host_available_bytes or entry.global_mem_bytes)

    def give_back_spares(self) -> bool:
        """Releases memory held only for later use (`spares`). Returns whether any memory was freed."""
        before = self.allocated_bytes
        for spare in list(self.spares):
            spare.give_back()
        return self.allocated_bytes < before

    def alloc(self, nbytes: int, name: str, *, streamed: bool = False) -> Buffer:
        """Allocates uninitialised device memory. Releases spares to make room. streamed: read from end to end in every
        step.

        Raises OutOfDeviceMemoryError, naming the buffer and both sizes, if the device refuses.
        """
        if nbytes > self.entry.max_alloc_bytes:
            raise OutOfDeviceMemoryError(
                f"{name} needs one buffer of {nbytes:,} bytes, but {self.name} allows at most "
                f"{self.entry.max_alloc_bytes:,} bytes in a single allocation; use a smaller --ctx-size, --dtype or "
                "--kv-dtype"
            )
        # GPU drivers allocate memory on first use, so a refusal may come too late.
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
        """Allocates device memory filled with zero bytes (`nbytes` a multiple of 4)."""
        buffer = self.alloc(nbytes, name)
        self.fill(buffer, np.uint32(0))
        return buffer

    def fill(
        self, buffer: Buffer, pattern: np.generic | np.ndarray, offset_bytes: int = 0, nbytes: int | None = None
    ) -> None:
        """Fills the buffer, or nbytes from offset_bytes on, with `pattern` (4 to 128 bytes, 2^n). Does not wait."""
        with named_errors(f"filling {buffer.name}"):
            size = buffer.nbytes - offset_bytes if nbytes is None else nbytes
            cl.enqueue_fill_buffer(self.queue, buffer.cl, np.atleast_1d(pattern), offset_bytes, size)

    def copy_rows(
        self, buffer: Buffer, source: int, target: int, *, row_bytes: int, n_rows: int, pitch_bytes: int
    ) -> None:
        """Copies rows of row_bytes within a buffer, pitch_bytes apart, from byte `source` to byte `target`."""
        what: dict[str, Any] = {"byte_count": row_bytes, "src_offset": source, "dst_offset": target}
        if n_rows > 1:  # PoCL 3.0 wrongly reports an overlap for adjacent one-row rectangles
            pitches = (pitch_bytes, pitch_bytes * n_rows)
            what = {"src_origin": (source, 0, 0), "dst_origin": (target, 0, 0), "region": (row_bytes, n_rows, 1)}
            what |= {"src_pitches": pitches, "dst_pitches": pitches}
        with named_errors(f"copying within {buffer.name}"):
            cl.enqueue_copy(self.queue, buffer.cl, buffer.cl, **what)

    def copy(self, source: Buffer, target: Buffer, nbytes: int | None = None, *, at: int = 0, into: int = 0) -> None:
        """Copies `source`, or nbytes from byte `at` on, to byte `into` of `target`. Does not wait."""
        size = source.nbytes - at if nbytes is None else nbytes
        with named_errors(f"copying {source.name} to {target.name}"):
            cl.enqueue_copy(self.queue, target.cl, source.cl, byte_count=size, src_offset=at, dst_offset=into)

    def upload(self, array: np.ndarray, name: str) -> Buffer:
        """Allocates a buffer with the bytes of `array` (C order)."""
        buffer = self.alloc(array.nbytes, name)
        self.write(buffer, array)
        return buffer

    def write(self, buffer: Buffer, array: np.ndarray, offset_bytes: int = 0) -> None:
        """Copies `array` to the device. Returns once the host may change the array."""
        array = np.ascontiguousarray(array)
        with named_errors(f"writing {array.nbytes:,} bytes to {buffer.name}"):
            cl.enqueue_copy(self.queue, buffer.cl, array, dst_offset=offset_bytes, is_blocking=True)
        self.traffic.host_to_device_bytes += array.nbytes

    def write_async(self, buffer: Buffer, array: np.ndarray, offset_bytes: int = 0) -> object:
        """Enqueues a copy of `array` to the device, without waiting. The caller must keep the returned object, and must
        not change the array, until the next enqueued work is done. Never blocks for a `pinned` array.
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
        """Allocates a host array int32 [n] that the device accesses directly. Copies from other memory may block."""
        with named_errors(f"allocating {4 * n} bytes of pinned host memory"):
            memory = cl.Buffer(self.context, cl.mem_flags.READ_WRITE | cl.mem_flags.ALLOC_HOST_PTR, 4 * n)
            array: np.ndarray
            both: Any = cl.map_flags.READ | cl.map_flags.WRITE  # a number
            array, _ = cl.enqueue_map_buffer(self.queue, memory, both, 0, (n,), np.dtype(np.int32))
        return array  # the array keeps the mapping alive, and the mapping keeps the memory

    def read_async(self, buffer: Buffer, array: np.ndarray, offset_bytes: int = 0) -> Callable[[], None]:
        """Enqueues a copy of the buffer as left by the work enqueued so far. Returns a function that waits for the
        copy.

        On a GPU, work enqueued later may run before the copy, so later work must not write to the buffer.
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
        """Returns a launch of kernel `name` in `kernels/<file>`, built with `constants`, with `args` (Buffer or NumPy
        scalar).

        prelude: OpenCL C put before the file, such as functions it calls. cost: bytes and operations per launch, for
        the profiler.
        """
        if self.sub_group:
            constants = {**constants, "SUB_GROUP": self.sub_group}
        return self.launch_type(self, KernelSource(file, name, constants, prelude), args, groups, local, cost)

    def kernel(self, source: KernelSource, shared: bool) -> cl.Kernel:
        """Returns the compiled kernel: a private object, whose arguments nobody else sets, or the shared object."""
        with DriverCall():
            return self.programs.kernel(source, shared=shared)

    def flush(self) -> None:
        """Submits everything enqueued to the device, without waiting."""
        with named_errors("submitting work"):
            self.queue.flush()

    def marker(self) -> Callable[[], None]:
        """Submits everything enqueued. Returns a function that waits for this work but not for later work."""
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
                # A quota leaves fewer cores than the driver has threads. A thread waiting inside Intel's driver polls
                # for work constantly, and its time counts against the quota.
                while event.command_execution_status > cl.command_execution_status.COMPLETE:
                    time.sleep(SLEEP_S)
            event.wait()

    def close(self) -> None:
        """Ends child compilers and waits for the queue. Ignores errors from a lost device."""
        self.programs.close()
        finish_quietly(self.queue)


def _sources(launches: Iterable[Launch]) -> Iterator[KernelSource]:
    return (launch.source for launch in launches if isinstance(launch.source, KernelSource))
