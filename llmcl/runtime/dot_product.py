"""Whether a CPU device's kernels can reach the processor's dot products of narrow numbers, and how.

OpenCL has no portable way to them that is fast on CPUs, so kernels name LLVM's intrinsic or write the instruction. With
the wrong form a driver's compiler aborts the process, or the processor meets an instruction that it does not have:
every form is tried in a child process, and the answer is remembered for this driver and processor.

Run as a program with an index of `find_devices()`, its label, an instruction and a form, it exits 0 if that is right.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmcl.runtime.platforms import DeviceEntry
from llmcl.runtime.probe import probed_entry, remembered, succeeds
from llmcl.runtime.processor import processor

if TYPE_CHECKING:
    import numpy as np

NONE = 0  # no form works
PROBE = "cpu/dot_probe.cl"


def _bytes(rng: np.random.Generator) -> tuple[Any, Any, Any]:
    import numpy as np

    w = rng.integers(0, 256, (64, 16, 4), np.uint8)
    x = rng.integers(-127, 128, (64, 4), np.int8)
    return w, x, np.einsum("jrk,jk->r", w.astype(np.int32), x.astype(np.int32), dtype=np.int32)


def _bfloat16(rng: np.random.Generator) -> tuple[Any, Any, Any]:
    import numpy as np

    # Small whole numbers: their products and sums are exact.
    w, x = rng.integers(-99, 100, (64, 16, 2)), rng.integers(-99, 100, (64, 2))
    stored = [(values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16) for values in (w, x)]
    return *stored, np.einsum("jrk,jk->r", w, x).astype(np.float32)


@dataclass(frozen=True)
class DotProduct:
    """An instruction, which adds up `width` products in each lane.

    intel, pocl: values of the build constant DOT that stand for it, fastest first.
    case: (w, x, sums [16]) from random numbers, as kernels/cpu/dot_probe.cl takes and gives them.
    """

    name: str
    width: int
    intel: tuple[int, ...]
    pocl: tuple[int, ...]
    case: Callable[[np.random.Generator], tuple[Any, Any, Any]]


INT8 = DotProduct("vpdpbusd", 4, intel=(1,), pocl=(2, 3), case=_bytes)  # kernels/cpu/dot4.cl
BFLOAT16 = DotProduct("vdpbf16ps", 2, intel=(1,), pocl=(2,), case=_bfloat16)  # kernels/cpu/dot2.cl


def dot_product(entry: DeviceEntry, wanted: DotProduct) -> int:
    """The fastest form of a dot product that is right on a CPU device; NONE where there is none."""
    from llmcl.runtime.program import read_source

    if platform.machine().lower() not in ("x86_64", "amd64"):
        return NONE
    forms = wanted.intel if entry.is_intel_cpu else wanted.pocl if entry.is_pocl else ()
    if not forms:
        return NONE
    return remembered(
        "dot_product",
        entry,
        processor(),
        wanted.name,
        read_source(PROBE),
        answer=lambda: next((form for form in forms if succeeds(__name__, entry, wanted.name, str(form))), NONE),
    )


def _probe(entry: DeviceEntry, wanted: DotProduct, form: int) -> bool:
    """Compares the sums of 64 products in each of 16 lanes with NumPy's."""
    import numpy as np
    import pyopencl as cl

    from llmcl.runtime.program import read_source

    context = cl.Context([entry.device])
    queue = cl.CommandQueue(context)
    program = cl.Program(context, read_source(PROBE))
    program.build(["-cl-std=CL1.2", f"-DWIDTH={wanted.width}", f"-DDOT={form}"], cache_dir=False)  # type: ignore[arg-type]
    w, x, expected = wanted.case(np.random.default_rng(form))
    out = np.zeros_like(expected)
    flags = cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR
    buffers = [cl.Buffer(context, flags, hostbuf=array) for array in (w, x, out)]
    program.dot_probe(queue, (1,), (1,), *buffers)
    cl.enqueue_copy(queue, out, buffers[2])
    return bool(np.array_equal(out, expected))


def main(arguments: list[str]) -> int:
    entry = probed_entry(arguments)
    wanted = next(product for product in (INT8, BFLOAT16) if product.name == arguments[2])
    return 0 if entry and _probe(entry, wanted, int(arguments[3])) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
