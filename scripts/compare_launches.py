#!/usr/bin/env python
"""Decode with a step in one launch against a launch for each kernel, in turn in one process; and a first token's time.

    python scripts/compare_launches.py -m MODEL [-m MODEL ...] [-d DEVICE] [--depths 0,4096]

One Markdown row a model and depth: tokens a second both ways (medians of the turns' median steps), their ratio with the
least and most of the turns, and the share of the streaming read that was measured in the run.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from llmcl.benchmark import decode_bytes
from llmcl.llm import LLM, load
from llmcl.model import Model
from llmcl.runtime.ceilings import read_bandwidth

TURNS, STEPS = 3, 48


def first_token_s(model: str, device: str | None) -> float:
    """Seconds from the start of `llmcl generate` to the first byte of its answer."""
    command = [sys.executable, "-m", "llmcl.cli", "generate", "-m", model, "-p", "Hi", "-n", "1", "-q"]
    start = time.perf_counter()
    with subprocess.Popen([*command, *(["--device", device] if device else [])], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        return time.perf_counter() - start


def turns(llm: LLM, depth: int) -> tuple[list[float], list[float]]:
    """Seconds of a step in one launch, and in separate launches, for each turn."""
    together = llm.model
    separate = Model(llm.device, llm.config, together.weights, together.cache, mods=together.mods, one_launch=False)
    times: dict[Model, list[float]] = {together: [], separate: []}
    for _ in range(TURNS):
        for model, found in times.items():
            llm.model = model
            found.append(median(llm.bench_decode(STEPS, depth)))
    llm.model = together
    return times[together], times[separate]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", action="append", required=True)
    parser.add_argument("-d", "--device")
    parser.add_argument("--depths", default="0,4096", type=lambda text: [int(part) for part in text.split(",")])
    args = parser.parse_args()
    print("| model | depth | one launch, t/s | separate, t/s | ratio | of bandwidth | first token |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for name in args.model:
        first = median(first_token_s(name, args.device) for _ in range(TURNS))
        with load(name, device=args.device, max_context=max(args.depths) + 2 * STEPS) as llm:
            bandwidth = read_bandwidth(llm.device)
            for depth in args.depths:
                one, separate = turns(llm, depth)
                ratios = sorted(b / a for a, b in zip(one, separate, strict=True))
                nbytes = decode_bytes(llm.weight_bytes_per_token, llm.kv_bytes_per_position, depth, STEPS)
                share = nbytes / median(one) / bandwidth
                print(
                    f"| {Path(name).name} | {depth} | {1 / median(one):.1f} | {1 / median(separate):.1f} "
                    f"| {median(ratios):.2f} ({ratios[0]:.2f} - {ratios[-1]:.2f}) | {share:.1%} | {first:.2f} s |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
