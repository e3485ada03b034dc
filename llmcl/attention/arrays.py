"""Checks and converts attention's arrays: either all on the host (NumPy) or all on the device (pyopencl.array)."""

from __future__ import annotations

from typing import Any

import numpy as np

from llmcl.attention.tracing.symbols import is_device_array
from llmcl.errors import UsageError
from llmcl.reference.storage import round_bfloat16
from llmcl.runtime.device import Device

PAGE_TABLE, SINKS = "page_table", "sinks"
FIXED = {PAGE_TABLE: "int32", SINKS: "float32"}  # device dtypes
# NumPy dtype that holds each device dtype. NumPy has no bfloat16: an array holds the bits as uint16 or uses a package's
# bfloat16 dtype (ml_dtypes).
HELD: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),
}


def dtype_of(array: Any) -> str | None:
    """Returns float32, float16 or bfloat16; float32 for any further float type; None for other types."""
    name = array.dtype.name
    if name in ("bfloat16", "uint16"):
        return "bfloat16"
    if array.dtype.kind != "f":
        return None
    return "float16" if name == "float16" else "float32"


def as_held(array: np.ndarray, dtype: str) -> np.ndarray:
    """Converts a host array to the device's format. dtype: float32, or `dtype_of(array)`."""
    if dtype == "bfloat16":
        return array.view(HELD[dtype])
    if dtype_of(array) == "bfloat16":
        return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.asarray(array, dtype)


def as_result(array: np.ndarray, dtype: str) -> np.ndarray:
    """Converts a result (float32, or the format in HELD) to `dtype`."""
    if dtype == "bfloat16" and array.dtype == np.float32:
        return (round_bfloat16(array).view(np.uint32) >> 16).astype(np.uint16)
    return array.astype(HELD[dtype], copy=False)


def on_device(arrays: dict[str, Any]) -> bool:
    """Whether the arrays are on the device. Raises UsageError for a mixture or for a value that isn't an array."""
    places = {name: is_device_array(array) for name, array in arrays.items()}
    for name, array in arrays.items():
        if not places[name] and not isinstance(array, np.ndarray):
            raise UsageError(
                f"{name} is {type(array).__name__}; expected a NumPy array or a pyopencl.array.Array (a torch tensor "
                "on the CPU: tensor.numpy())"
            )
    if len(set(places.values())) > 1:
        sides = ", ".join(f"{name} on the {'device' if place else 'host'}" for name, place in places.items())
        raise UsageError(
            f"{sides}; expected all on one side: move the others with pyopencl.array.to_device(device.queue, array)"
        )
    return next(iter(places.values()))


def check_device_arrays(device: Device, arrays: dict[str, Any]) -> None:
    """Raises UsageError for arrays that kernels cannot read, or arrays bound to another queue."""
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
        if name in FIXED:
            if array.dtype.name != FIXED[name]:
                expected = FIXED[name]
                raise UsageError(f"{name} is {array.dtype}; expected {expected}: array.astype(numpy.{expected})")
        elif array.dtype.name not in (*HELD, "uint16"):
            raise UsageError(
                f"{name} is {array.dtype}; expected float32, float16 or bfloat16 (as uint16): "
                "array.astype(numpy.float32)"
            )
    if arrays["key"].dtype != arrays["value"].dtype:
        raise UsageError(
            f"key is {arrays['key'].dtype}, value {arrays['value'].dtype}; expected the same: value.astype(key.dtype)"
        )


def check_order(arrays: dict[str, Any]) -> None:
    """Raises UsageError for arrays not in C order. Used for kernels without stride support."""
    for name, array in arrays.items():
        if not array.flags.c_contiguous:
            raise UsageError(f"{name} has strides {array.strides}; expected C order: array.copy(order='C')")


def element_strides(array: Any) -> tuple[int, int, int] | None:
    """Returns the strides, in elements, of batches, heads and rows in [B, H, L, D]. Returns None if a row isn't
    contiguous or rows don't start at multiples of 16 bytes."""
    *outer, inner = array.strides
    if inner != array.dtype.itemsize or any(stride < 0 or stride % 16 for stride in outer):
        return None
    batch, head, row = (stride // array.dtype.itemsize for stride in outer)
    return batch, head, row


def array_form(device: Device, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """Returns a device array without memory, as a template for `new_device_array`."""
    from pyopencl.array import Array

    form = Array(device.queue, shape, dtype, allocator=device.allocator)
    form.base_data = None
    return form


def new_device_array(form: Any, allocator: Any) -> Any:
    """Returns an uninitialised array like `form`. Copies its attributes: pyopencl's constructor takes longer than a
    small kernel."""
    array = object.__new__(type(form))
    array.__dict__ = {**form.__dict__, "events": [], "allocator": allocator, "base_data": allocator(form.nbytes)}
    return array
