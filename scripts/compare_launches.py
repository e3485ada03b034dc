#!/usr/bin/env python
"""Decode with a persistent kernel against a launch for each kernel, in turn in one process; and the first token."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from statistics import median
from typing import Annotated

from llmcl.cli import options as opt
from llmcl.cli.command import run_script
from llmcl.engine.llm import LLM
from llmcl.engine.loading import load
from llmcl.models.model import Model
from llmcl.runtime import child_process
from llmcl.runtime.roofline import read_bandwidth
from llmcl.tools.benchmark import decode_bytes
from llmcl.tools.markdown import row, table

ROUNDS, STEPS = 3, 48
EPILOG = """\b
t/s           tokens a second: the median of the rounds' median steps
ratio         the time of separate launches over the persistent kernel's: median of the rounds (least - most)
of bandwidth  bytes that a step with it reads, over its time, over a streaming read measured in the same run
first token   from the start of `llmcl generate` to the first byte of its answer"""


def first_token_s(model: str, device: str | None) -> float:
    """Seconds from the start of `llmcl generate` to the first byte of its answer."""
    command = child_process.command("llmcl", "generate", "-m", model, "-p", "Hi", "-n", "1", "-q")
    start = time.perf_counter()
    with subprocess.Popen([*command, *(["--device", device] if device else [])], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        return time.perf_counter() - start


def rounds(llm: LLM, depth: int) -> tuple[list[float], list[float]]:
    """Seconds of a step with the persistent kernel, and with separate launches, for each round."""
    persistent = llm.model
    separate = Model(
        llm.device, llm.config, persistent.weights, persistent.cache, mods=persistent.mods, persistent=False
    )
    times: dict[Model, list[float]] = {persistent: [], separate: []}
    for _ in range(ROUNDS):
        for model, found in times.items():
            llm.model = model
            found.append(median(llm.bench_decode(STEPS, depth)))
    llm.model = persistent
    return times[persistent], times[separate]


def compare_launches(
    models: Annotated[
        list[str], opt.measurement("-m", "--model", metavar="NAME|PATH", help="As for llmcl generate; may be repeated.")
    ],
    depths: opt.Depths = "0,4096",
    device: opt.Device = None,
) -> None:
    """Decode with a persistent kernel against a launch for each kernel, a row for each model and depth."""
    columns = ["model", "depth", "persistent, t/s", "separate, t/s", "ratio", "of bandwidth", "first token"]
    print(*table("lrrrrrr", columns), sep="\n")
    for name in models:
        with load(name, device=device, max_context=max(depths) + 2 * STEPS) as llm:
            first = median(first_token_s(name, device) for _ in range(ROUNDS))
            bandwidth = read_bandwidth(llm.device)
            for depth in depths:
                one, separate = rounds(llm, depth)
                ratios = sorted(b / a for a, b in zip(one, separate, strict=True))
                nbytes = decode_bytes(llm.weight_bytes_per_token, llm.kv_bytes_per_position, depth, STEPS)
                share = nbytes / median(one) / bandwidth
                rates = [f"{1 / median(seconds):.1f}" for seconds in (one, separate)]
                ratio = f"{median(ratios):.2f} ({ratios[0]:.2f} - {ratios[-1]:.2f})"
                cells = [Path(name).name, str(depth), *rates, ratio, f"{share:.1%}", f"{first:.2f} s"]
                print(row(cells), flush=True)


if __name__ == "__main__":
    run_script(compare_launches, EPILOG)
