"""Tracks which threads are inside an OpenCL driver, and stops threads from entering at exit.

Two situations break a driver. In a child of `fork` the driver's threads are missing, so any wait for them never ends.
And if Python kills a daemon thread inside a driver at exit, the whole process crashes.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import threading
import time
from contextlib import suppress
from types import FunctionType
from typing import Any
from weakref import WeakSet

import pyopencl as cl

from llmcl.errors import DeviceError, LlmclError, OutOfDeviceMemoryError
from llmcl.runtime.host_memory import scarcity

# A CPU driver allocates device memory from the host.
NO_MEMORY = cl.status_code.MEM_OBJECT_ALLOCATION_FAILURE, cl.status_code.OUT_OF_HOST_MEMORY
_inside: list[int] = []  # thread id of each current call
open_devices: WeakSet[Any] = WeakSet()  # device.Device objects, to be finished before the process ends
_called = False  # whether this process ever called a driver
_forked = False  # whether this process was forked from one that had called a driver
_last: int | None = None  # the only thread that may still call a driver at exit


class DriverCall:
    """A context in which this thread calls a driver. Raises DeviceError in a child of fork."""

    __slots__ = ()

    def __enter__(self) -> None:
        global _called
        check()
        _called = True
        _inside.append(threading.get_ident())  # before `_last` is read; _at_exit sets `_last` and then reads `_inside`
        if _last is not None and threading.get_ident() != _last:
            _inside.remove(threading.get_ident())
            raise SystemExit  # ends the thread silently, before Python kills it

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        _inside.remove(threading.get_ident())


class named_errors(DriverCall):
    """A driver call that turns OpenCL status codes into errors naming the action."""

    __slots__ = ("_action",)

    def __init__(self, action: str):
        self._action = action

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        super().__exit__(kind, error, traceback)
        if isinstance(error, cl.Error) and (why := scarcity()) is not None:
            raise OutOfDeviceMemoryError(f"the device failed while {self._action} ({error}); {why}") from error
        if isinstance(error, cl.Error) and error.code in NO_MEMORY:
            raise OutOfDeviceMemoryError(
                f"the device ran out of memory while {self._action} ({error}); "
                "use a smaller --ctx-size or a smaller --dtype, or free memory on the device"
            ) from error
        if isinstance(error, cl.Error):
            raise DeviceError(
                f"the device failed while {self._action}: {error}; it may have been reset or removed: check it with "
                "`llmcl devices`, or choose another with --device"
            ) from error


def finish_quietly(queue: cl.CommandQueue) -> None:
    """Waits for the queue. Ignores errors from a lost device."""
    try:
        with named_errors("waiting for the device"):
            queue.finish()
    except LlmclError:
        return


def check() -> None:
    """Raises DeviceError if `forked`."""
    if _forked:
        raise DeviceError(
            "this process was forked from one that had opened an OpenCL device, and a driver does not survive a fork; "
            "start it in another way (multiprocessing's start method spawn or forkserver), or open no device before "
            "the fork and load the model in the child"
        )


def forked() -> bool:
    """Returns whether this process was forked from one that had opened a device."""
    return _forked


def _after_fork() -> None:
    global _forked
    _forked |= _called
    _inside[:] = [thread for thread in _inside if thread == threading.get_ident()]  # other threads are missing here
    if _forked:  # freeing buffers and queues would call the driver, so they are kept for ever
        kept = [thing for thing in gc.get_objects() if _module(thing).partition(".")[0] in ("llmcl", "pyopencl")]
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
        _end_without_handlers()


def _end_without_handlers() -> None:
    """Makes this process exit without the drivers' exit handlers, which wait for threads that a child lacks.

    on_exit handlers run in reverse order, and this handler ends the process. Only GNU's C library has on_exit.
    """
    with suppress(AttributeError, OSError):
        library = ctypes.CDLL(None)
        library.on_exit(ctypes.cast(library._exit, ctypes.c_void_p), None)


def _module(thing: object) -> str:
    kind = type(thing)  # isinstance would query a proxy's target
    return str(thing.__module__ if kind is FunctionType else kind.__module__)


def _at_exit() -> None:
    """Waits for current calls to end. No other thread can begin a call."""
    global _last
    _last = threading.get_ident()
    while any(thread != _last for thread in list(_inside)):
        time.sleep(0.001)
    for device in list(open_devices):
        device.close()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
