"""Instruction sets that are hidden from a driver: what it compiles then, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys

import instructions
import pytest
from programs import ROOT

from llmcl.runtime.platforms import find_devices

FLAGS = "processor\t: 0\nflags\t\t: fpu {}\n"

# a * a - b: with a fused multiply-add it is what rounding a * a left, else 0.
SUBTRACT = "kernel void subtract(global float* x) { x[2] = x[0] * x[0] - x[1]; }"
PROGRAM = f"""
import instructions
instructions.hide()
import numpy as np
from llmcl.kernels.cpu.dot_product import INT8, dot_product
from llmcl.runtime.platforms import find_devices
import pyopencl as cl

entry = next(entry for entry in find_devices() if entry.fact("is_intel_cpu"))
context = cl.Context([entry.device])
queue = cl.CommandQueue(context)
a = np.float32(1 + 2.0**-12)
numbers = np.array([a, a * a, 1], np.float32)
buffer = cl.Buffer(context, cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR, hostbuf=numbers)
cl.Program(context, {SUBTRACT!r}).build(cache_dir=False).subtract(queue, (1,), (1,), buffer)
cl.enqueue_copy(queue, numbers, buffer)
print(numbers[2] != 0, INT8.forms.get(dot_product(entry, INT8)))
"""


def run(wanted: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join((str(ROOT / "tests"), str(ROOT)))
    environment = {**os.environ, instructions.VARIABLE: wanted, "PYTHONPATH": paths}
    environment.pop(instructions.TARGET, None)
    return subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("flags", "sets"),
    [
        ("", []),
        ("sse4_2 fma", ["sse4.2"]),
        ("sse4_2 avx2 fma f16c avx512f", ["sse4.2", "avx2"]),
        ("sse4_2 avx2 fma f16c avx512f avx512bw avx512vl avx512_vnni", ["sse4.2", "avx2", "avx512", "vnni"]),
        ("sse4_2 avx2 fma f16c avx512f avx512bw avx512vl avx512_vnni avx512_bf16 amx_int8", [*instructions.SETS]),
    ],
)
def test_the_sets_of_a_processor(flags: str, sets: list[str]) -> None:
    assert instructions.sets_of(FLAGS.format(flags)) == sets


@pytest.mark.parametrize("name", instructions.SETS)
def test_what_a_driver_compiles_for(name: str) -> None:
    if name not in instructions.own_sets():
        pytest.skip(f"the processor lacks {name}")
    if not any(entry.fact("is_intel_cpu") for entry in find_devices()):
        pytest.skip("Intel's CPU driver is not installed")
    done = run(name)
    at = [*instructions.SETS].index
    flags = ["avx512_vnni"] if at(name) >= at("vnni") else ["avx2", "avx_vnni"] if at(name) >= at("avx2") else ["None"]
    has_fma, flag = done.stdout.split()
    assert has_fma == str(at(name) >= at("avx2")) and flag in flags, done.stderr


@pytest.mark.parametrize(
    ("wanted", "words"),
    [("avx9", "expected one of sse4.2, avx2, avx512, vnni, bf16"), ("bf16", "this processor lacks")],
)
def test_a_set_that_is_not_there_is_refused(wanted: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(instructions.VARIABLE, wanted)
    monkeypatch.setattr(instructions, "own_sets", lambda: ["sse4.2", "avx2"])
    with pytest.raises(ValueError, match=words):
        instructions.hide()


@pytest.mark.parametrize(
    ("wanted", "words"), [("", "instructions: vnni"), ("avx2", "instructions: avx2; hidden: avx512, vnni")]
)
def test_a_run_says_its_set(wanted: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(instructions.VARIABLE, wanted)
    monkeypatch.setattr(instructions, "own_sets", lambda: ["sse4.2", "avx2", "avx512", "vnni"])
    assert instructions.in_words() == words
    assert instructions.offers("avx512_vnni") == (wanted == "")
