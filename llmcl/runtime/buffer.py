"""A buffer on a device, by name; the device counts what its buffers take."""

from __future__ import annotations

from contextlib import AbstractContextManager, suppress
from typing import Any, Protocol

import pyopencl as cl

from llmcl.runtime.driver_calls import forked


class Spare(Protocol):
    """Keeps device memory for later that can be made anew."""

    def give_back(self) -> None: ...


class Counting(Protocol):
    """The part of a device that a buffer needs."""

    allocated_bytes: int

    @property
    def lock(self) -> AbstractContextManager[Any]: ...


class Buffer:
    """Device memory with a name. `release()` gives it back at once rather than at garbage collection."""

    __slots__ = ("_device", "_memory", "name", "nbytes")

    def __init__(self, device: Counting, memory: cl.Buffer, nbytes: int, name: str):
        self._device = device
        self._memory: cl.Buffer | None = memory
        self.nbytes = nbytes
        self.name = name

    @property
    def cl(self) -> cl.Buffer:
        if self._memory is None:
            raise RuntimeError(f"{self.name} is used after its memory was released")
        return self._memory

    def release(self) -> None:
        if self._memory is not None and not forked():
            with self._device.lock:
                self._memory.release()
                self._memory = None
                self._device.allocated_bytes -= self.nbytes

    def __del__(self) -> None:
        with suppress(AttributeError):  # interrupted in __init__, or the interpreter ends
            if self._memory is not None and not forked():
                with self._device.lock:
                    self._device.allocated_bytes -= self.nbytes
