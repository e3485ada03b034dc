"""A device that notes which kernels would be launched on it: nothing is allocated, compiled or run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakSet

import numpy as np

from llmcl.architectures.config import ModelConfig
from llmcl.architectures.families import FAMILIES
from llmcl.checkpoint.formats import FORMATS, row_bytes
from llmcl.checkpoint.tensors import Checkpoint, TensorInfo
from llmcl.errors import OutOfDeviceMemoryError
from llmcl.progress import Progress
from llmcl.runtime.device import Buffer, Device, Launch
from llmcl.runtime.device_cache import DeviceCache
from llmcl.runtime.platforms import DeviceEntry
from llmcl.runtime.program import KernelSource


class RecordedLaunch(Launch):
    """A launch that is bound and never compiled."""

    __slots__ = ()

    def __init__(self, device: Device, source: Any, *args: Any, **kw: Any):
        super().__init__(device, source, *args, **kw)
        assert isinstance(device, RecordingDevice) and isinstance(source, KernelSource)
        device.launched.append(source)

    def prepare(self) -> None:
        pass

    def bind(self, index: int, memory: Any) -> None:
        pass

    def enqueue(self, n_tokens: int = 1) -> Any:
        self.groups(n_tokens)


class RecordingDevice(Device):
    """A device known by its description alone.

    launched: every kernel bound since it was opened. Reading gives zeros.
    """

    launch_type = RecordedLaunch

    def __init__(self, entry: DeviceEntry):  # Device.__init__ opens a context
        self.entry = entry
        self.cache = DeviceCache(entry)
        self.kernel_options = {}
        self.kept = {}
        self.spares = WeakSet()
        self.lock = threading.RLock()
        self.allocated_bytes = 0
        self.launched: list[KernelSource] = []

    def alloc(self, nbytes: int, name: str, *, streamed: bool = False) -> Buffer:
        if nbytes > self.entry.max_alloc_bytes:
            raise OutOfDeviceMemoryError(f"{name} needs one buffer of {nbytes:,} bytes")
        return Buffer(self, None, nbytes, name)  # type: ignore[arg-type]

    def fill(self, buffer: Buffer, pattern: np.generic, offset_bytes: int = 0, nbytes: int | None = None) -> None:
        pass

    def copy_rows(self, buffer: Buffer, source: int, target: int, **sizes: int) -> None:
        pass

    def write(self, buffer: Buffer, array: np.ndarray, offset_bytes: int = 0) -> None:
        pass

    write_async = write

    def read(
        self, buffer: Buffer, dtype: np.typing.DTypeLike, shape: tuple[int, ...], offset_bytes: int = 0
    ) -> np.ndarray:
        return np.zeros(shape, dtype)

    def read_async(self, buffer: Buffer, array: np.ndarray, offset_bytes: int = 0) -> Callable[[], None]:
        return lambda: None

    def pinned(self, n: int) -> np.ndarray:
        return np.zeros(n, np.int32)

    def flush(self) -> None:
        pass

    finish = close = flush

    def compile_progress(
        self, launches: Iterable[Launch], progress: Progress | None, later: Iterable[Launch] = ()
    ) -> AbstractContextManager[None]:
        return nullcontext()

    def is_compiling(self, launches: Iterable[Launch]) -> bool:
        return False

    def take(self) -> list[KernelSource]:
        """What was bound since the last call."""
        launched, self.launched = self.launched, []
        return launched


class ShapeCheckpoint(Checkpoint):
    """A checkpoint with the shapes of a configuration, in which every number is the same.

    formats: of a matrix, by its name. from_gguf: the rotary pairs of q and k are neighbours, as GGUF has Llama's.
    """

    def __init__(self, config: ModelConfig, formats: Callable[[str], str], *, from_gguf: bool = False):
        self.config = config
        self.tensors = {}
        for name, shape in config.tensors().items():
            format = formats(name) if len(shape) == 2 else "F32"
            format = format if shape[-1] % FORMATS[format].block == 0 else "F32"  # taps of a convolution
            swapped = from_gguf and FAMILIES[config.architecture].gguf_interleaves_rope
            swapped = swapped and name.endswith((".q_proj.weight", ".k_proj.weight"))
            self.tensors[name] = TensorInfo(name, shape, format, row_bytes(name, format, shape[-1]), swapped)

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        return np.broadcast_to(np.uint8(1), (stop - start, self.tensors[name].row_bytes))

    def array(self, name: str) -> np.ndarray:
        return np.ones(self.tensors[name].shape, np.float32)
