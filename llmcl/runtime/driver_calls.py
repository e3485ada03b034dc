"""Which threads are inside an OpenCL driver, and when none may enter any more.

A driver does not survive two things. In a child of `fork` its threads are missing, and what waits for them waits for
ever. And a daemon thread that Python stops inside a driver, as the process ends, takes the whole process down.
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

# A CPU's driver takes what the device needs from the host.
NO_MEMORY = cl.status_code.MEM_OBJECT_ALLOCATION_FAILURE, cl.status_code.OUT_OF_HOST_MEMORY
_inside: list[int] = []  # the thread of each call under way
open_devices: WeakSet[Any] = WeakSet()  # those of device.Device, which come to rest before the process ends
_called = False  # whether this process ever called a driver
_forked = False  # whether it was forked from a process that did
_last: int | None = None  # the only thread that may go on, as Python ends


class DriverCall:
    """A context within which this thread calls a driver. Raises DeviceError in a child of fork."""

    __slots__ = ()

    def __enter__(self) -> None:
        global _called
        check()
        _called = True
        _inside.append(threading.get_ident())  # before the look at `_last`, which is set before the look at `_inside`
        if _last is not None and threading.get_ident() != _last:
            _inside.remove(threading.get_ident())
            raise SystemExit  # ends the thread, silently: Python is about to do the same less gently

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        _inside.remove(threading.get_ident())


class named_errors(DriverCall):
    """A call of the driver. Turns OpenCL's status codes into errors that say what was being done."""

    __slots__ = ("_action",)

    def __init__(self, action: str):
        self._action = action

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        super().__exit__(kind, error, traceback)
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
    """Waits for the queue. Nobody needs the errors of a device that is gone."""
    try:
        with named_errors("waiting for the device"):
            queue.finish()
    except LlmclError:
        return


def check() -> None:
    """Raises DeviceError where `forked`."""
    if _forked:
        raise DeviceError(
            "this process was forked from one that had opened an OpenCL device, and a driver does not survive a fork; "
            "start it in another way (multiprocessing's start method spawn or forkserver), or open no device before "
            "the fork and load the model in the child"
        )


def forked() -> bool:
    """Whether this process was forked from one that had opened a device."""
    return _forked


def _after_fork() -> None:
    global _forked
    _forked |= _called
    _inside[:] = [thread for thread in _inside if thread == threading.get_ident()]  # the others are not here
    if _forked:  # to give buffers and queues back would call the driver, so they are kept for ever
        kept = [thing for thing in gc.get_objects() if _module(thing).partition(".")[0] in ("llmcl", "pyopencl")]
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
        _end_without_handlers()


def _end_without_handlers() -> None:
    """Lets this process end without the exit handlers of drivers, which wait for threads that a child lacks.

    on_exit runs first what was added last, and that ends the process. Only GNU's C library has it.
    """
    with suppress(AttributeError, OSError):
        library = ctypes.CDLL(None)
        library.on_exit(ctypes.cast(library._exit, ctypes.c_void_p), None)


def _module(thing: object) -> str:
    kind = type(thing)  # isinstance would ask a proxy for what it stands for
    return str(thing.__module__ if kind is FunctionType else kind.__module__)


def _at_exit() -> None:
    """Lets the calls that are under way end. No other thread can begin one."""
    global _last
    _last = threading.get_ident()
    while any(thread != _last for thread in list(_inside)):
        time.sleep(0.001)
    for device in list(open_devices):
        device.close()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
