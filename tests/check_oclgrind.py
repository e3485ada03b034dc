"""Runs the kernel tests marked `oclgrind` in the Oclgrind simulator, which sees every access and every race.

`python tests/check_oclgrind.py [pytest arguments]`. Oclgrind reports on standard error and carries on, so
that stream is read here: any report fails the run. (Its own `--log FILE` is emptied by each new context, and
its `--check-api` objects to pyopencl asking for properties of later OpenCL versions: neither is used.)
Before the tests, kernels with known faults must be reported, or the run proves nothing.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

# Every report about a kernel has an indented line that names it; the others are those of its launch.
REPORT = re.compile(
    r"^\s+Kernel:\s|^Invalid (read|write)|data race at|divergence detected|FATAL|^Oclgrind - ", re.MULTILINE
)
FAULTS = {
    "write past a buffer": "x[get_global_id(0) + 4] = 1.0f;",
    "read past a buffer": "x[0] = x[get_global_id(0) + 16];",
    "race in local memory": """
        local float s[4]; const int i = get_local_id(0);
        s[i] = x[i]; x[get_global_id(0)] = s[(i + 1) % 4];""",
    "race in global memory": "x[0] += get_global_id(0);",
    "barrier that not all reach": "if (get_local_id(0) < 2) barrier(CLK_LOCAL_MEM_FENCE);",
}
CORRECT = "x[get_global_id(0)] += 1.0f;"


KERNELS = {**FAULTS, "a correct kernel": CORRECT}
NEXT = "now: "  # in front of the name of a kernel, in a line before what is reported of it


def run_kernels() -> None:
    """Each kernel over 16 floats in groups of 4; runs inside Oclgrind."""
    import numpy as np
    import pyopencl as cl

    context = cl.Context([cl.get_platforms()[0].get_devices()[0]])
    queue = cl.CommandQueue(context)
    for name, body in KERNELS.items():
        print(f"{NEXT}{name}", flush=True)
        program = cl.Program(context, f"kernel void trial(global float *x) {{ {body} }}").build()
        zeros = np.zeros(16, np.float32)
        buffer = cl.Buffer(context, cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR, hostbuf=zeros)
        kernel = cl.Kernel(program, "trial")
        kernel.set_args(buffer)
        cl.enqueue_nd_range_kernel(queue, kernel, (16,), (4,))
        queue.finish()


def under_oclgrind(arguments: list[str], *, show: bool) -> tuple[int, list[str]]:
    """Exit code and output lines of `python ARGUMENTS` under Oclgrind, standard error included in order."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    environment.pop("LLMCL_TEST_REQUIRE", None)  # only the simulator is visible there
    environment.pop("LLMCL_TEST_DEVICE", None)
    command = ["oclgrind", "--data-races", sys.executable, *arguments]
    lines = []
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if show:
                print(line, end="", flush=True)
    return process.returncode, lines


def main(arguments: list[str]) -> int | str:
    if shutil.which("oclgrind") is None:
        message = "oclgrind: not installed (Debian and Ubuntu: `apt-get install oclgrind`)"
        if "oclgrind" in os.environ.get("LLMCL_TEST_REQUIRE", "").split(","):
            return f"{message}, but LLMCL_TEST_REQUIRE names it"
        print(f"{message}: its checks are left out")
        return 0
    code, lines = under_oclgrind([__file__, "--kernels"], show=False)
    said = "".join(lines).partition(NEXT)[2].split(NEXT)
    for name, (found, _, report) in zip(KERNELS, (one.partition("\n") for one in said), strict=False):
        reported = bool(REPORT.search(report))
        if found != name or reported != (name in FAULTS):
            verdict = "was reported" if reported else "was not reported"
            return f"oclgrind: {name} {verdict}; its output was:\n{found}\n{report}"
    if code != 0 or len(said) != len(KERNELS):
        return f"oclgrind: the kernels with known faults did not all run; their output was:\n{''.join(lines)}"
    print(f"oclgrind: reports all of {len(FAULTS)} known faults; now the kernel tests", flush=True)
    # -s: pytest must not swallow the reports; -v: the line before a report names its test.
    folder = str(Path(__file__).with_name("kernels"))
    code, lines = under_oclgrind(["-m", "pytest", folder, "-m", "oclgrind", "-sv", *arguments], show=True)
    reports = [line for line in lines if REPORT.search(line)]
    if code == 5:
        return "oclgrind: no kernel test is marked `oclgrind`"
    if reports:
        return f"oclgrind: {len(reports)} reported lines above, the first: {reports[0].strip()}"
    return code


if __name__ == "__main__":
    if sys.argv[1:2] == ["--kernels"]:
        run_kernels()
    else:
        sys.exit(main(sys.argv[1:]))
