"""A model and the process it is in: what is left when it is closed, when Python ends, and in a child of fork."""

from __future__ import annotations

import gc
import json
import os
import sys
import weakref
from pathlib import Path

import pytest
from programs import TINY_SHAPE, run_python

import llmcl
from llmcl.runtime.device import Device
from llmcl.runtime.platforms import DeviceEntry

GENERATE_IN_A_THREAD = """
import os, sys, threading, time, llmcl
llm = llmcl.load_random(sys.argv[1], device=int(sys.argv[2]))
started = threading.Event()
def run():
    while True:
        for piece in llm.stream([5] * 100, max_tokens=150, ignore_eos=True, wait=True):
            started.set()
threading.Thread(target=run, daemon=True).start()
started.wait()
"""
FORK = """
class Proxy:  # of a web framework, outside of a request: whoever looks at its class is told so
    __class__ = property(lambda self: 1 / 0)
proxy = Proxy()
def child(work):
    pid = os.fork()
    if pid:
        limit = time.monotonic() + 20
        while not (done := os.waitpid(pid, os.WNOHANG))[0]:
            if time.monotonic() > limit:
                os.kill(pid, 9)
            time.sleep(0.01)
        print("ended with", done[1], flush=True)
        return
    try:
        work()
        print("worked", flush=True)
    except Exception as error:
        print(type(error).__name__, error, flush=True)
    sys.exit(0)
def in_with():
    with llm:
        llm.reset(wait=True)
for work in lambda: llm.generate([5]), lambda: llmcl.load_random(sys.argv[1], device=int(sys.argv[2])), in_with:
    child(work)
print("parent goes on", len(llm.generate([5], max_tokens=3, ignore_eos=True, wait=True).token_ids), flush=True)
"""


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("shape") / "config.json"
    path.write_text(json.dumps(TINY_SHAPE))
    return str(path)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="POSIX only")
def test_in_mid_answer_python_forks_and_ends(cl_entry: DeviceEntry, shape: str) -> None:
    """A child is refused and ends; so does the process itself, whose daemon thread goes on generating."""
    done = run_python("-W", "ignore::DeprecationWarning", "-c", GENERATE_IN_A_THREAD + FORK, shape, str(cl_entry.index))
    said = [line for line in done.stderr.splitlines() if not line.startswith("MESA: warning")]
    assert (done.returncode, said) == (0, []), (done.returncode, done.stdout, done.stderr)
    assert done.stdout.count("DeviceError this process was forked from one") == 3, done.stdout
    assert done.stdout.count("ended with 0") == 3 and "parent goes on 3" in done.stdout, done.stdout


@pytest.mark.slow
def test_a_closed_model_leaves_nothing_behind(default_device: Device, shape: str) -> None:
    """Neither the device, even without a collector, nor memory: each round left 20 MiB and more."""

    def round() -> list[weakref.ref[object]]:
        llm = llmcl.load_random(shape, device=default_device.entry.index, kv_page_tokens=64)
        llm.generate([5], max_tokens=3)
        stream = llm.stream([5])
        next(stream)
        llm.close()
        return [weakref.ref(part) for part in (llm, llm.device, llm.leases)]

    gc.disable()
    try:
        assert [part() for part in round()] == [None] * 3
        before = resident_bytes()
        for _ in range(10):
            round()
        assert resident_bytes() - before < 40 << 20
    finally:
        gc.enable()


def resident_bytes() -> int:
    if not sys.platform.startswith("linux"):
        pytest.skip("reads Linux's /proc")
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
