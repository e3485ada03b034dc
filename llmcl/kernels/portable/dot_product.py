"""Finds out whether a GPU has a 4x8-bit dot product, and how kernels reach it (portable/dot4.cl).

A driver with cl_khr_integer_dot_product also reports whether the device accelerates it. AMD's compiler has its own
builtins on GPUs with the instruction. A trial in a child process tells whether a form is right.

Run as a program by `ask` with a form, this module reports whether the form is right on the device.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from functools import cache

from llmcl.runtime.platforms import DeviceEntry
from llmcl.runtime.probe import answer_parent, is_right
from llmcl.runtime.program import BUILD_OPTIONS, read_source

NONE, KHR, AMD, AMD_SINCE_RDNA3 = range(4)  # the build constant DOT
PROBE = "portable/dot4_probe.cl"

_EXTENSION = "cl_khr_integer_dot_product"
_ACCELERATION = 0x1075  # CL_DEVICE_INTEGER_DOT_PRODUCT_ACCELERATION_PROPERTIES_4x8BIT_PACKED_KHR
_GFX = re.compile(r"gfx(\d+)")


def listed(entry: DeviceEntry) -> int:
    """The form a GPU should have according to its description."""
    # Intel's CPU driver claims acceleration wrongly, also if it is listed as a GPU.
    if entry.kind == "cpu" or entry.fact("is_intel_cpu"):
        return NONE
    if _EXTENSION in entry.extensions:
        return KHR
    if (named := _GFX.match(entry.name)) and "cl_amd_media_ops" in entry.extensions:
        return AMD_SINCE_RDNA3 if int(named[1]) >= 1100 else AMD
    return NONE


@cache
def dot_form(entry: DeviceEntry) -> int:
    """Returns the dot product form that is right and fast on a device. NONE: activations stay float32.

    A device known only by description, without a driver, is trusted.
    """
    form = listed(entry)
    if form == NONE or entry.device is None:
        return form
    if form == KHR and not is_accelerated(entry):
        return NONE
    return form if is_right("dot4", __name__, entry, str(form), source=read_source(PROBE)) else NONE


def is_accelerated(entry: DeviceEntry) -> bool:
    """Whether the driver reports that the packed 4x8-bit signed dot product is accelerated."""
    import pyopencl as cl

    flags = (ctypes.c_uint * 6)()  # signed, unsigned, mixed; the same with saturating sums
    try:
        query = ctypes.CDLL(cl._cl.__file__).clGetDeviceInfo  # pyopencl does not know the property
    except (OSError, AttributeError):
        return False
    query.argtypes = [ctypes.c_void_p, ctypes.c_uint, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p]
    return query(entry.device.int_ptr, _ACCELERATION, ctypes.sizeof(flags), flags, None) == 0 and bool(flags[0])


def _probe(entry: DeviceEntry, arguments: Sequence[str]) -> str | None:
    import numpy as np
    import pyopencl as cl

    form = int(arguments[0])
    context = cl.Context([entry.device])
    queue = cl.CommandQueue(context)
    a, b = np.random.default_rng(form).integers(-128, 128, (2, 256, 4)).astype(np.int8)
    out = np.zeros(256, np.int32)
    program = cl.Program(context, read_source(PROBE))
    program.build([*BUILD_OPTIONS, f"-DDOT={form}"], cache_dir=False)  # type: ignore[arg-type]
    flags = cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR
    buffers = [cl.Buffer(context, flags, hostbuf=array) for array in (a, b, out)]
    program.dot4_probe(queue, out.shape, None, *buffers)
    cl.enqueue_copy(queue, out, buffers[2])
    expected = np.arange(256) + (a.astype(np.int32) * b).sum(axis=1)
    return None if np.array_equal(out, expected) else "the sums are wrong"


if __name__ == "__main__":
    answer_parent(_probe)
