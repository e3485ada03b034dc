"""Whether a CPU device's kernels can reach the processor's 8-bit dot product (vpdpbusd), and how.

OpenCL has no portable way to it that is fast on CPUs, so kernels name LLVM's intrinsic or write the instruction. With
the wrong form a driver's compiler aborts the process, or the processor meets an instruction that it does not have:
every form is tried in a child process, and the answer is remembered for this driver and processor.

Run as a program with an index of `find_devices()` and a form, it exits 0 if the form computes correctly there.
"""

from __future__ import annotations

import platform
import sys
from pathlib import Path

from llmcl.runtime.platforms import DeviceEntry
from llmcl.runtime.probe import probed_entry, remembered, succeeds

NONE, INTRINSIC_512, INLINE_512, INLINE_256 = range(4)  # the build constant DOT of kernels/cpu/quant_tile.cl


def dot_product(entry: DeviceEntry) -> int:
    """The fastest form of the 8-bit dot product that is right on a CPU device; NONE where there is none."""
    from llmcl.runtime.program import read_source

    if platform.machine().lower() not in ("x86_64", "amd64"):
        return NONE
    forms = (INTRINSIC_512,) if entry.is_intel_cpu else (INLINE_512, INLINE_256) if entry.is_pocl else ()
    if not forms:
        return NONE
    return remembered(
        "dot_product",
        entry,
        _processor(),
        read_source("cpu/dot_probe.cl"),
        answer=lambda: next((form for form in forms if succeeds(__name__, entry, str(form))), NONE),
    )


def _processor() -> str:
    """What distinguishes this processor from another behind the same driver's device name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(next((line for line in lines if line.startswith(key)), "") for key in ("model name", "flags"))


def _probe(entry: DeviceEntry, form: int) -> bool:
    """Compares 64 sums of 4 products in each of 16 lanes with NumPy's."""
    import numpy as np
    import pyopencl as cl

    from llmcl.runtime.program import read_source

    context = cl.Context([entry.device])
    queue = cl.CommandQueue(context)
    program = cl.Program(context, read_source("cpu/dot_probe.cl"))
    program.build(["-cl-std=CL1.2", f"-DDOT={form}"], cache_dir=False)  # type: ignore[arg-type]
    rng = np.random.default_rng(form)
    w = rng.integers(0, 256, (64, 16, 4), np.uint8)
    x = rng.integers(-127, 128, (64, 4), np.int8)
    out = np.zeros(16, np.int32)
    flags = cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR
    buffers = [cl.Buffer(context, flags, hostbuf=array) for array in (w, x, out)]
    program.dot_probe(queue, (1,), (1,), *buffers)
    cl.enqueue_copy(queue, out, buffers[2])
    expected = np.einsum("jrk,jk->r", w.astype(np.int32), x.astype(np.int32))
    return bool(np.array_equal(out, expected))


def main(arguments: list[str]) -> int:
    entry = probed_entry(arguments)
    return 0 if entry and _probe(entry, int(arguments[2])) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
