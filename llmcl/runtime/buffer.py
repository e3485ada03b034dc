"""A named buffer on a device. The device counts the memory in all buffers."""

from __future__ import annotations

from contextlib import AbstractContextManager, suppress
from typing import Any, Protocol

import pyopencl as cl

from llmcl.runtime.driver_calls import forked


class Spare(Protocol):
    """Holds device memory that can be released and rebuilt later."""

    def give_back(self) -> None: ...


class Counting(Protocol):
    """The part of a device that a buffer needs."""

    allocated_bytes: int

    @property
    def lock(self) -> AbstractContextManager[Any]: ...


class Buffer:
    """Named device memory. `release()` frees it at once instead of at garbage collection."""

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
        with suppress(AttributeError):  # interrupted in __init__, or at interpreter exit
            if self._memory is not None and not forked():
                with self._device.lock:
                    self._device.allocated_bytes -= self.nbytes
