#!/usr/bin/env python
"""Measures first starts: each in a process of its own, with empty kernel caches, then again with what that one kept."""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
import time
from typing import Annotated, Any

from llmcl.cli import options as opt
from llmcl.cli.command import run_script
from llmcl.cli.option_groups import LoadingOrRandom, with_groups
from llmcl.runtime.compilers import JOBS

EPILOG = """\b
One line of JSON for each start, in seconds:
load          from the start of the process until the model is loaded
first_token   until the first token of a prompt (--n-prompt tokens)
eight, again  eight prompts at once, and the same prompts again
ready         with "engine": until an engine for eight requests is open, as llmcl serve opens it
programs      kernels that were compiled, at the end"""

N_AT_ONCE = 8
# Where drivers keep programs themselves: NVIDIA's, PoCL's, Intel's for GPUs, Mesa's.
DRIVER_CACHES = "CUDA_CACHE_PATH", "POCL_CACHE_DIR", "NEO_CACHE_DIR", "MESA_SHADER_CACHE_DIR"


@with_groups
def start_benchmark(
    model: opt.OptionalModel = None,
    random: opt.RandomShape = None,
    jobs: Annotated[
        Any,
        opt.measurement(
            "--jobs", metavar="N,...", parser=opt.wholes(1), help="Processes that compile at once, at most."
        ),
    ] = "1,16",
    n_prompt: Annotated[
        int, opt.measurement("-npp", "--n-prompt", metavar="N", parser=opt.whole(1), help="Tokens of each prompt.")
    ] = 200,
    loading: LoadingOrRandom = LoadingOrRandom(),
) -> None:
    """Measure how long a first start and later ones take, one line of JSON each."""
    opt.check_model_or_random(model, random, loading.quantize)
    for n in jobs:
        for through_engine in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                variables = {"LLMCL_CACHE_DIR": folder, JOBS: str(n)}
                variables |= {name: os.path.join(folder, name) for name in DRIVER_CACHES}
                for cache in ("empty", "kept"):
                    row = _in_process(variables, model, random, loading, n_prompt, through_engine)
                    how = "engine" if through_engine else "load"
                    print(json.dumps({"jobs": n, "start": how, "cache": cache, **row}), flush=True)


def _in_process(variables: dict[str, str], *arguments: Any) -> dict[str, Any]:
    os.environ |= variables
    spawn = multiprocessing.get_context("spawn")
    receiver, sender = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_start, args=(time.time(), sender, *arguments))
    process.start()
    sender.close()
    try:
        row: dict[str, Any] = receiver.recv()
    finally:
        process.join()
    return row


def _start(
    began: float,
    sender: Any,
    model: str | None,
    random: str | None,
    loading: LoadingOrRandom,
    n_prompt: int,
    through_engine: bool,
) -> None:
    """The process: loads, answers, and sends what that took."""
    from llmcl.cli.loading import load_model

    took: dict[str, Any] = {}

    def note(name: str, since: float) -> float:
        now = time.time()
        took[name] = round(now - since, 3)
        return now

    in_load = not through_engine  # an engine compiles kernels of its own, as in llmcl serve
    with load_model(model, loading, random=random, ctx_size=None, compile_kernels=in_load, quiet=True) as llm:
        note("load", began)
        prompts = [[(7 * i + k) % 1000 + 1 for k in range(n_prompt)] for i in range(N_AT_ONCE + 1)]
        if through_engine:
            with llm.engine(max_sequences=N_AT_ONCE) as engine:
                now = note("ready", began)
                for name in ("eight", "again"):
                    engine.generate(prompts[:-1], max_tokens=16, ignore_eos=True)
                    now = note(name, now)
        else:
            next(iter(llm.stream(prompts[-1], max_tokens=16, ignore_eos=True)))
            now = note("first_token", began)
            for name in ("eight", "again"):
                llm.generate(prompts[:-1], max_tokens=16, ignore_eos=True)
                now = note(name, now)
        sender.send({**took, "programs": llm.device.programs.compiled, "compiling": round(llm.device.compile_s, 3)})


if __name__ == "__main__":
    run_script(start_benchmark, EPILOG)
