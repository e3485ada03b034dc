"""Whether a CPU device's kernels can reach the processor's 8-bit dot product (vpdpbusd), and how.

OpenCL has no portable way to it that is fast on CPUs, so kernels name LLVM's intrinsic or write the instruction. With
the wrong form a driver's compiler aborts the process, or the processor meets an instruction that it does not have:
every form is tried in a child process, and the answer is remembered for this driver and processor.

Run as a program with an index of `find_devices()` and a form, it exits 0 if the form computes correctly there.
"""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from pathlib import Path

from llmcl.paths import cache_dir
from llmcl.runtime.platforms import DeviceEntry, find_devices

NONE, INTRINSIC_512, INLINE_512, INLINE_256 = range(4)  # the build constant DOT of kernels/cpu/quant_tile.cl
_PROBE_TIMEOUT_S = 60.0


def dot_product(entry: DeviceEntry) -> int:
    """The fastest form of the 8-bit dot product that is right on a CPU device; NONE where there is none."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return NONE
    forms = (INTRINSIC_512,) if entry.is_intel_cpu else (INLINE_512, INLINE_256) if entry.is_pocl else ()
    if not forms:
        return NONE
    remembered = _answer_file(entry)
    try:
        return int(remembered.read_text(encoding="ascii"))
    except (OSError, ValueError):
        pass
    answer = next((form for form in forms if _works(entry, form)), NONE)
    try:
        remembered.parent.mkdir(parents=True, exist_ok=True)
        remembered.write_text(str(answer), encoding="ascii")
    except OSError:
        pass  # a read-only home: probed again next time
    return answer


def _answer_file(entry: DeviceEntry) -> Path:
    from llmcl.runtime.program import read_source

    source = read_source("cpu/dot_probe.cl")
    identity = "\0".join(
        (entry.platform_name, entry.platform_version, entry.name, entry.driver_version, _processor(), source)
    )
    return cache_dir() / "dot_product" / hashlib.sha256(identity.encode()).hexdigest()[:32]


def _processor() -> str:
    """What distinguishes this processor from another behind the same driver's device name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(next((line for line in lines if line.startswith(key)), "") for key in ("model name", "flags"))


def _works(entry: DeviceEntry, form: int) -> bool:
    package_root = str(Path(__file__).parents[2])
    paths = [package_root, *filter(None, [os.environ.get("PYTHONPATH")])]
    try:
        result = subprocess.run(
            [sys.executable, "-m", "llmcl.runtime.dot_product", str(entry.index), entry.label, str(form)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_PROBE_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return result.returncode == 0


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


def main(index: str, label: str, form: str) -> int:
    entries = [entry for entry in find_devices() if entry.index == int(index) and entry.label == label]
    return 0 if entries and _probe(entries[0], int(form)) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:4]))
