"""What the host holds while a model is loaded: tensors go to the device one at a time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmcl.checkpoint import open_checkpoint

# A CPU device's buffers are the process's own memory and are left out; pages of mapped files are not anonymous.
PROGRAM = """
import re
import llmcl.engine.loading as engine

def anonymous_bytes():
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024

peak = 0
def progress(what, done, total):
    global peak
    peak = max(peak, anonymous_bytes())

llm = engine.load("smollm2", progress=progress)
llm.generate("Hi", max_tokens=2)
print(max(peak, anonymous_bytes()) - llm.model.weights.decode_bytes())
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc, which only Linux has")
def test_loading_holds_little_more_than_a_tensor() -> None:
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    largest_tensor = 49152 * 576 * 20 // 32  # the embedding in Q4_1
    assert int(result.stdout) < largest_tensor + 300e6


GENERATE = """
import re, sys
from llmcl.cli import main
sys.argv = ["llmcl", "generate", "-m", "smollm2", "-p", "Hi", "-n", "2", "-q"]
try:
    main()
finally:
    print(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
"""

# The same libraries and driver, with the smallest program in place of a model: what these take is the machine's.
WITHOUT_A_MODEL = """
import os, re
import numpy as np
import pyopencl as cl
import llmcl.cli
import llmcl.engine.loading
from llmcl.runtime.device import Device

device = Device.open(os.environ.get("LLMCL_DEVICE"))
program = cl.Program(device.context, "kernel void one(global int *out) { out[get_global_id(0)] = 1; }").build()
buffer = cl.Buffer(device.context, cl.mem_flags.READ_WRITE, 4096)
queue = cl.CommandQueue(device.context)
program.one(queue, (1024,), None, buffer)
queue.finish()
print(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc, which only Linux has")
def test_a_generation_takes_little_more_memory_than_its_file(tmp_path: Path) -> None:
    """The largest resident size of the process, beyond what the driver takes for any program."""
    # Mesa's software renderer, which the tests ask for, brings a compiler of 90 MB into every process.
    environment = {name: value for name, value in os.environ.items() if name != "RUSTICL_ENABLE"}
    # A cache of its own: tests beside this one may renew the shared one, and compiling takes 180 MB.
    environment["LLMCL_CACHE_DIR"] = str(tmp_path)

    def peak(program: str) -> int:
        result = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment
        )
        return int(result.stdout.split()[-1]) * 1024

    compiling = peak(GENERATE)
    peak(WITHOUT_A_MODEL)
    bases = [peak(WITHOUT_A_MODEL) for _ in range(3)]
    with open_checkpoint("smollm2") as checkpoint:
        file_bytes = checkpoint.path.stat().st_size
    most = min(bases) + 1.3 * file_bytes + 150e6
    peaks = [peak(GENERATE)]
    while min(peaks) >= most and len(peaks) < 3:
        peaks.append(peak(GENERATE))
    found = f"peaks {peaks}, without a model {bases}, with compilation {compiling}, file {file_bytes} bytes"
    assert min(peaks) < most, found
