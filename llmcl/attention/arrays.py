"""The arrays of attention: all of them the host's (NumPy), or all the device's (pyopencl.array)."""

from __future__ import annotations

import sys
from copy import copy
from typing import Any

import numpy as np

from llmcl.errors import UsageError
from llmcl.runtime.device import Device

DTYPES = (np.dtype(np.float32), np.dtype(np.float16))  # that arrays on the device may have


def is_device_array(value: object) -> bool:
    module = sys.modules.get("pyopencl.array")  # without it there are none of its arrays
    return module is not None and isinstance(value, module.Array)


def on_device(arrays: dict[str, Any]) -> bool:
    """Whether the arrays are the device's. Raises UsageError for a mixture, and for what is no array at all."""
    places = {name: is_device_array(array) for name, array in arrays.items()}
    for name, array in arrays.items():
        if not places[name] and not isinstance(array, np.ndarray):
            raise UsageError(
                f"{name} is {type(array).__name__}; expected a NumPy array or a pyopencl.array.Array (a torch tensor "
                "on the CPU: tensor.numpy())"
            )
    if len(set(places.values())) > 1:
        found = ", ".join(f"{name} on the {'device' if place else 'host'}" for name, place in places.items())
        raise UsageError(
            f"{found}; expected all on one side: move the others with pyopencl.array.to_device(device.queue, array)"
        )
    return next(iter(places.values()))


def check_device_arrays(device: Device, arrays: dict[str, Any]) -> None:
    """Raises UsageError for arrays that kernels cannot read as they are, or whose work another queue does."""
    for name, array in arrays.items():
        if array.context != device.context:
            raise UsageError(
                f"{name} belongs to another OpenCL context than {device.name}; open the device with "
                "llmcl.Device.open(), make arrays on its queue (pyopencl.array.to_device(device.queue, array)) and "
                "pass device=device"
            )
        if array.queue != device.queue:
            raise UsageError(
                f"{name} is bound to {'no queue' if array.queue is None else 'another queue'}; expected device.queue, "
                "so that work is done in order: finish what writes it, then array.with_queue(device.queue)"
            )
        if array.dtype not in DTYPES:
            raise UsageError(
                f"{name} is {array.dtype}; expected {' or '.join(map(str, DTYPES))}: array.astype(numpy.float32)"
            )
        if not array.flags.c_contiguous:
            raise UsageError(f"{name} has strides {array.strides}; expected C order: array.copy(order='C')")
    if arrays["key"].dtype != arrays["value"].dtype:
        raise UsageError(
            f"key is {arrays['key'].dtype}, value {arrays['value'].dtype}; expected the same: value.astype(key.dtype)"
        )


def array_form(device: Device, shape: tuple[int, ...]) -> Any:
    """A float32 array on the device without its memory, for `new_device_array`."""
    from pyopencl.array import Array

    form = Array(device.queue, shape, np.float32, allocator=device.allocator)
    form.base_data = None
    return form


def new_device_array(form: Any, allocator: Any) -> Any:
    """An uninitialised array like `form`, a copy: pyopencl checks a new one for longer than a small kernel runs."""
    array = copy(form)
    array.events = []
    array.allocator = allocator
    array.base_data = allocator(form.nbytes)
    return array
