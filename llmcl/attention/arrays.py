"""The arrays of attention: all of them the host's (NumPy), or all the device's (pyopencl.array)."""

from __future__ import annotations

import sys
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
    """Raises UsageError for arrays that kernels cannot read, or whose work another queue does."""
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
    if arrays["key"].dtype != arrays["value"].dtype:
        raise UsageError(
            f"key is {arrays['key'].dtype}, value {arrays['value'].dtype}; expected the same: value.astype(key.dtype)"
        )


def check_order(arrays: dict[str, Any]) -> None:
    """Raises UsageError for arrays that are not in C order, for kernels that read no others."""
    for name, array in arrays.items():
        if not array.flags.c_contiguous:
            raise UsageError(f"{name} has strides {array.strides}; expected C order: array.copy(order='C')")


def element_strides(array: Any) -> tuple[int, int, int] | None:
    """How many elements apart batches, heads and rows of [B, H, L, D] are; None where a row is not in one piece of
    memory, or where rows do not begin at multiples of 16 bytes."""
    *outer, inner = array.strides
    if inner != array.dtype.itemsize or any(stride < 0 or stride % 16 for stride in outer):
        return None
    batch, head, row = (stride // array.dtype.itemsize for stride in outer)
    return batch, head, row


def array_form(device: Device, shape: tuple[int, ...], dtype: str) -> Any:
    """An array on the device without its memory, for `new_device_array`."""
    from pyopencl.array import Array

    form = Array(device.queue, shape, np.dtype(dtype), allocator=device.allocator)
    form.base_data = None
    return form


def new_device_array(form: Any, allocator: Any) -> Any:
    """An uninitialised array like `form`. Its attributes copied: making an array takes longer than a small kernel."""
    array = object.__new__(type(form))
    array.__dict__.update(form.__dict__)
    array.events = []
    array.allocator = allocator
    array.base_data = allocator(form.nbytes)
    return array
