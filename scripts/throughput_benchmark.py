#!/usr/bin/env python
"""Measures several sequences under load: requests at random times (--rate), or steps that read a prompt (--chunk)."""

from __future__ import annotations

from typing import Annotated, Any

import arrivals
import chunks
from compare_engines import note

from llmcl.cli import options as opt
from llmcl.cli.command import run_script
from llmcl.cli.loading import load_model
from llmcl.cli.option_groups import LoadingOrRandom, with_groups
from llmcl.cli.text_files import check_writable
from llmcl.errors import UsageError
from llmcl.models.batch import MAX_SEQUENCES
from llmcl.tools import benchmark
from llmcl.tools.rows import FORMATS, write_rows

EPILOG = """\b
PP, TG, PL    tokens of a prompt, of an answer, and sequences at once
With --chunk each step has so many tokens of a prompt beside its -npl sequences: its time, and without a prompt.
With --rate requests come at random times (a Poisson process), with lengths around -npp and -ntg:
TTFT, queue   time to first token from when the request was due; its part until the engine began with it
TBT, p99/p50  time between the tokens of a stream; with --streams of these alone
of roofline   what all steps had to read, over their time, as a share of that streaming read"""


_seconds = opt.number(float, "a number above 0", lambda s: s > 0)


def _rates(text: Any) -> tuple[float, ...]:
    one = opt.number(float, "numbers above 0, separated by commas", lambda rate: rate > 0)
    return tuple(one(part) for part in str(text).split(","))


@with_groups
def throughput_benchmark(
    model: opt.OptionalModel = None,
    random: opt.RandomShape = None,
    n_prompt: Annotated[
        Any, opt.measurement("-npp", "--n-prompt", metavar="N,...", parser=opt.wholes(1), help="Tokens of a prompt.")
    ] = "512",
    n_gen: Annotated[
        Any, opt.measurement("-ntg", "--n-gen", metavar="N,...", parser=opt.wholes(1), help="Tokens of an answer.")
    ] = "64",
    n_parallel: Annotated[
        Any, opt.measurement("-npl", "--n-parallel", metavar="N,...", parser=opt.wholes(1), help="Sequences at once.")
    ] = "1,2,4,8,16,32",
    repetitions: opt.Repetitions = 3,
    rate: Annotated[
        Any,
        opt.measurement("--rate", metavar="R,...", parser=_rates, help="Requests a second that arrive at random."),
    ] = None,
    requests: Annotated[
        int, opt.measurement("--requests", metavar="N", parser=opt.whole(1), help="At most so many for each --rate.")
    ] = 64,
    seconds: Annotated[
        float, opt.measurement("--seconds", metavar="S", parser=_seconds, help="After which what is left is cancelled.")
    ] = 60.0,
    seed: Annotated[
        int, opt.measurement("--seed", metavar="N", parser=opt.whole(0), help="Of arrivals, lengths and prompts.")
    ] = 0,
    streams: Annotated[
        int,
        opt.measurement(
            "--streams", metavar="N", parser=opt.whole(0), help="Answers that run the whole time; TBT is of these."
        ),
    ] = 0,
    max_step_tokens: Annotated[
        int | None,
        opt.measurement(
            "--max-step-tokens", metavar="N", parser=opt.whole(1), help="Of the engine; left out: its own choice."
        ),
    ] = None,
    chunk: Annotated[
        Any,
        opt.measurement("--chunk", metavar="N,...", parser=opt.wholes(1), help="Tokens of a prompt in each step."),
    ] = None,
    loading: LoadingOrRandom = LoadingOrRandom(),
    format: Annotated[
        str, opt.choice(opt.OUTPUT_PANEL, "--format", FORMATS, env=False, help="How the rows are written.")
    ] = "md",
    output: opt.RowsFile = None,
    plot: Annotated[str | None, opt.plot("throughput over the time between tokens")] = None,
) -> None:
    """Several sequences under load: --rate or --chunk. `llmcl bench --batch` measures them without."""
    plan: arrivals.Plan | chunks.Plan
    if (rate is None) == (chunk is None):
        raise UsageError("--rate or --chunk: give one of them; without load, llmcl bench --batch measures")
    if rate is not None:
        options = {} if max_step_tokens is None else {"max_step_tokens": max_step_tokens}
        plan = arrivals.Plan(rate, n_prompt, n_gen, n_parallel, requests, seconds, seed, streams, options)
        if streams >= min(n_parallel):
            raise UsageError(
                f"--streams {streams} with {min(n_parallel)} sequences a step (-npl) leave no place for requests; "
                "raise -npl or lower --streams"
            )
    if chunk is not None:
        if plot is not None:
            raise UsageError("--chunk excludes --plot; give one of them")
        plan = chunks.Plan(chunk, n_prompt, n_parallel, repetitions)
        if max(n_parallel) >= MAX_SEQUENCES:
            raise UsageError(f"-npl {max(n_parallel)} with --chunk: at most {MAX_SEQUENCES - 1}, beside the prompt's")
    opt.check_model_or_random(model, random, loading.quantize)
    if max(n_parallel) > MAX_SEQUENCES:
        raise UsageError(f"-npl/--n-parallel {max(n_parallel)}: at most {MAX_SEQUENCES} sequences at once")
    if plot is not None:
        benchmark.check_plot(plot)
    check_writable("-o/--output", output)
    with load_model(model, loading, random=random, ctx_size=plan.context_tokens(), quiet=False) as llm:
        if isinstance(plan, arrivals.Plan):
            loads = arrivals.run(llm, plan, note)
            write_rows(loads, format, output, arrivals.markdown)
            if plot is not None:
                arrivals.plot(loads, plot)
        else:
            write_rows(chunks.run(llm, plan, note), format, output, chunks.markdown)


if __name__ == "__main__":
    run_script(throughput_benchmark, EPILOG)
