"""Finds out whether and how a CPU device's kernels can use the processor's narrow dot products.

OpenCL has no portable, fast way on CPUs, so kernels call LLVM's intrinsic or write the instruction. With the wrong form
a driver's compiler refuses the kernel or aborts the process, or the processor hits an illegal instruction. Forms are
therefore tried in child processes; the answer is stored per driver and processor.

Run as a program by `ask` with an instruction and a form, this module reports whether the form is right on the device.
"""

from __future__ import annotations

import math
import platform
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from llmcl.runtime.device import Device
from llmcl.runtime.platforms import DeviceEntry
from llmcl.runtime.probe import LASTS_S, YES, answer_parent, ask, remembered
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

    # Small integers keep products and sums exact.
    w, x = rng.integers(-99, 100, (64, 16, 2)), rng.integers(-99, 100, (64, 2))
    stored = [(values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16) for values in (w, x)]
    return *stored, np.einsum("jrk,jk->r", w, x).astype(np.float32)


@dataclass(frozen=True, eq=False)
class DotProduct:
    """An instruction that sums `width` products in each lane."""

    name: str
    width: int
    forms: dict[int, str]  # values for build constant DOT, fastest first: their CPU feature flags in Linux's spelling
    case: Callable[[np.random.Generator], tuple[Any, Any, Any]]  # random (w, x, sums [16]) for cpu/dot_probe.cl


INTRINSIC, AVX_VNNI, AVX2 = 1, 4, 5  # 1 and 5 are LLVM's intrinsics, other forms inline assembly
_INT8_FORMS = dict.fromkeys((INTRINSIC, 2, 3), "avx512_vnni") | {AVX_VNNI: "avx_vnni", AVX2: "avx2"}
INT8 = DotProduct("int8", 4, _INT8_FORMS, case=_bytes)  # kernels/cpu/dot4.cl
_BFLOAT16_FORMS = dict.fromkeys((INTRINSIC, 2), "avx512_bf16")
BFLOAT16 = DotProduct("bfloat16", 2, _BFLOAT16_FORMS, case=_bfloat16)  # kernels/cpu/dot2.cl


def dot_product(entry: DeviceEntry, wanted: DotProduct) -> int:
    """Returns the fastest right form for a dot product on a CPU device, or NONE."""
    from llmcl.runtime.program import read_source

    forms = [form for form, flag in wanted.forms.items() if _may_have(flag)]
    if platform.machine().lower() not in ("x86_64", "amd64") or not forms:
        return NONE
    if entry.fact("is_pocl"):  # aborts at an intrinsic unknown to its LLVM for the processor: assembly is tried first
        forms.sort(key=lambda form: (form == AVX2, form == INTRINSIC))

    def answer() -> tuple[str, float]:
        lasts_s = math.inf
        for form in forms:
            verdict = ask(__name__, entry, wanted.name, str(form)).verdict
            if verdict == YES:
                return str(form), lasts_s
            lasts_s = min(lasts_s, LASTS_S[verdict])
        return str(NONE), lasts_s

    fastest = remembered("dot_product", entry, wanted.name, read_source(PROBE), answer=answer)
    return next((form for form in forms if str(form) == fastest), NONE)


def dot_form(device: Device) -> int:
    """Returns the form of the 8-bit dot product, or NONE."""
    return _form(device.entry, INT8)


def bf16_dot_form(device: Device) -> int:
    """Returns the form of the bfloat16 dot product, or NONE."""
    return _form(device.entry, BFLOAT16)


@cache
def _form(entry: DeviceEntry, wanted: DotProduct) -> int:
    return dot_product(entry, wanted) if entry.kind == "cpu" and not entry.is_software else NONE


def _may_have(flag: str) -> bool:
    """Whether the processor has the feature. True if the system lists no features."""
    listed = re.search(r"^flags\s*:(.*)$", processor(), re.MULTILINE)
    return listed is None or flag in listed[1].split()


def _probe(entry: DeviceEntry, arguments: Sequence[str]) -> str | None:
    """Compares sums of 64 products in each of 16 lanes with NumPy's."""
    import numpy as np
    import pyopencl as cl

    from llmcl.runtime.program import read_source

    name, form = arguments
    wanted = next(product for product in (INT8, BFLOAT16) if product.name == name)
    context = cl.Context([entry.device])
    queue = cl.CommandQueue(context)
    program = cl.Program(context, read_source(PROBE))
    program.build(["-cl-std=CL1.2", f"-DWIDTH={wanted.width}", f"-DDOT={form}"], cache_dir=False)  # type: ignore[arg-type]
    w, x, expected = wanted.case(np.random.default_rng(int(form)))
    out = np.zeros_like(expected)
    flags = cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR
    buffers = [cl.Buffer(context, flags, hostbuf=array) for array in (w, x, out)]
    program.dot_probe(queue, (1,), (1,), *buffers)
    cl.enqueue_copy(queue, out, buffers[2])
    return None if np.array_equal(out, expected) else "the sums are wrong"


if __name__ == "__main__":
    answer_parent(_probe)
