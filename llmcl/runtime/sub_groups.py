"""Selects the names for sub-groups in a device's kernels (kernels/common/sub_groups.cl).

The driver's extensions tell which form to try. A test in a child process checks that sub-groups do what kernels need:
neighbouring work-items share a sub-group, read each other's values, and a kernel gets the required size.

Run as a program by `ask` with a form, this module reports whether the form works on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from llmcl.runtime.platforms import DeviceEntry
from llmcl.runtime.probe import answer_parent, is_right

NONE, INTEL, AMD, QCOM, KHR = range(5)  # build constant SUB_GROUP
PROBE = "portable/sub_group_probe.cl"
SIZES = None, 16  # sub-group size: unspecified, or required
BITS = 7  # bits in a work-item's number in the probe

_EXTENSIONS = {
    INTEL: ("cl_intel_subgroups", "cl_intel_required_subgroup_size"),
    AMD: ("cl_khr_subgroups", "cl_amd_media_ops"),
    QCOM: ("cl_khr_subgroups", "cl_qcom_reqd_sub_group_size", "cl_qcom_subgroup_shuffle"),
    KHR: ("cl_khr_subgroups", "cl_khr_subgroup_shuffle"),
}


def listed(entry: DeviceEntry) -> int:
    """Returns the form whose extensions a GPU driver lists; NONE for a CPU, where vectors belong to one work-item."""
    if entry.kind == "cpu":
        return NONE
    there = {*entry.extensions}
    return next((form for form, needed in _EXTENSIONS.items() if there.issuperset(needed)), NONE)


@cache
def sub_group_form(entry: DeviceEntry) -> int:
    """Returns the form that works on the device; NONE if there is none, and kernels use local memory.

    A device known only by its description, without a driver, is trusted untested.
    """
    from llmcl.runtime.program import read_source

    form = listed(entry)
    if form == NONE or entry.device is None:
        return form
    return form if is_right("sub_groups", __name__, entry, str(form), source=read_source(PROBE)) else NONE


def _probe(entry: DeviceEntry, arguments: Sequence[str]) -> str | None:
    import numpy as np
    import pyopencl as cl

    from llmcl.runtime.program import BUILD_OPTIONS, read_source

    (form,) = arguments
    context = cl.Context([entry.device])
    queue = cl.CommandQueue(context)
    width = 1 << BITS
    numbers = np.random.default_rng(0).integers(0, 1 << 20, width).astype(np.uint32)
    expected = [numbers[np.arange(width) ^ 1 << bit] for bit in range(BITS)]
    expected.append(np.full(width, numbers.sum(), np.uint32))
    for size in SIZES:
        defines = {"SUB_GROUP": form, "LOCAL_SIZE": width, "BITS": BITS, **({"INTEL_LANES": size} if size else {})}
        program = cl.Program(context, read_source(PROBE))
        options = [*BUILD_OPTIONS, *(f"-D{name}={value}" for name, value in defines.items())]
        program.build(options, cache_dir=False)  # type: ignore[arg-type]
        out = np.zeros((BITS + 1, width), np.uint32)
        flags = cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR
        buffers = [cl.Buffer(context, flags, hostbuf=array) for array in (numbers, out)]
        program.sub_group_probe(queue, (width,), (width,), *buffers)
        cl.enqueue_copy(queue, out, buffers[1])
        if not np.array_equal(out, expected):
            return f"sub-groups of {size or 'any number of'} lanes compute wrong values"
    return None


if __name__ == "__main__":
    answer_parent(_probe)
