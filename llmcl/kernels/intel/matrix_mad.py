"""Tests whether a device has Intel's matrix units (XMX), as used by intel/matrix_mad.cl.

Run as a program by `ask`, the module reports whether a product of small whole numbers is right on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from llmcl.runtime.platforms import DeviceEntry
from llmcl.runtime.probe import answer_parent, is_right
from llmcl.runtime.program import BUILD_OPTIONS, read_source

NONE, XMX, EMULATED = range(3)  # values of the build constant MATRIX; only tests use EMULATED
PROBE = "intel/matrix_probe.cl"
NEEDED = (
    "cl_intel_subgroup_matrix_multiply_accumulate",
    "cl_intel_required_subgroup_size",
    "cl_intel_subgroups",
    "cl_intel_subgroups_short",
)


@cache
def matrix_form(entry: DeviceEntry) -> int:
    """Returns XMX if the driver lists the extensions and the products are right, otherwise NONE.

    A device known by its description only, without a driver, is trusted.
    """
    is_listed = entry.kind != "cpu" and {*entry.extensions}.issuperset(NEEDED)
    if not is_listed or entry.device is None:
        return XMX if is_listed else NONE
    return XMX if is_right("matrix_mad", __name__, entry, str(XMX), source=read_source(PROBE)) else NONE


def _probe(entry: DeviceEntry, arguments: Sequence[str]) -> str | None:
    import numpy as np
    import pyopencl as cl

    (form,) = arguments
    context = cl.Context([entry.device])
    queue = cl.CommandQueue(context)
    rng = np.random.default_rng(1)
    a, b = rng.integers(-8, 9, (8, 16)), rng.integers(-8, 9, (16, 8))
    for weight in ("bf16", "f16"):
        bits = [_bits(values, weight) for values in (a, b.reshape(8, 2, 8).swapaxes(1, 2))]
        out = np.zeros((8, 8), np.float32)
        program = cl.Program(context, read_source(PROBE))
        options = [*BUILD_OPTIONS, f"-DWEIGHT={weight}", f"-DMATRIX={form}"]
        program.build(options, cache_dir=False)  # type: ignore[arg-type]
        flags = cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR
        buffers = [cl.Buffer(context, flags, hostbuf=array) for array in (*bits, out)]
        program.matrix_probe(queue, (8,), (8,), *buffers)
        cl.enqueue_copy(queue, out, buffers[2])
        if not np.array_equal(out.T, a @ b):
            return f"the product of {weight} is wrong"
    return None


def _bits(values: Any, weight: str) -> Any:
    """Returns whole numbers as float16 or bfloat16 bits (uint16), which hold small whole numbers exactly."""
    import numpy as np

    if weight == "f16":
        return np.ascontiguousarray(values, np.float16).view(np.uint16)
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)


if __name__ == "__main__":
    answer_parent(_probe)
