#!/usr/bin/env python
"""Measures prefill and decode of several sequences at once on an OpenCL device, with rows as of llama-batched-bench."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from llmcl.cli import options as opt
from llmcl.cli.command import run_script
from llmcl.cli.loading import load_model
from llmcl.cli.option_groups import LoadingOrRandom, with_groups
from llmcl.cli.text_files import check_writable
from llmcl.errors import UsageError
from llmcl.models.batch import MAX_SEQUENCES
from llmcl.tools import benchmark, throughput
from llmcl.tools.rows import FORMATS, write_rows

EPILOG = """\b
PP, TG, PL    tokens of a prompt, of an answer, and sequences at once
T_PP, S_PP    seconds to read all prompts, tokens a second
T_TG, S_TG    seconds of the decode steps, tokens a second of all sequences together
ms/step       time of a decode step: the time between two tokens of a stream
of bandwidth  weights once and the keys and values of all sequences, over the time of a step,
              as a share of a streaming read measured in the same run"""


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
    loading: LoadingOrRandom = LoadingOrRandom(),
    format: Annotated[
        str, opt.choice(opt.OUTPUT_PANEL, "--format", FORMATS, env=False, help="How the rows are written.")
    ] = "md",
    output: opt.RowsFile = None,
    plot: Annotated[
        str | None,
        typer.Option(
            "--plot",
            metavar="FILE.png",
            help="Draw throughput over the time between tokens (needs the extra `plot`).",
            rich_help_panel="Output",
        ),
    ] = None,
) -> None:
    """Throughput of several sequences at once: the weights are read once a step for all of them."""
    plan = throughput.Plan(n_prompt, n_gen, n_parallel, repetitions)
    opt.check_model_or_random(model, random, loading.quantize)
    if max(n_parallel) > MAX_SEQUENCES:
        raise UsageError(f"-npl/--n-parallel {max(n_parallel)}: at most {MAX_SEQUENCES} sequences at once")
    if plot is not None:
        benchmark.check_plot(plot)
    check_writable("-o/--output", output)
    with load_model(model, loading, random=random, ctx_size=plan.context_tokens(), quiet=False) as llm:
        rows = throughput.run(llm, plan, note=lambda text: print(text, file=sys.stderr, flush=True))
    write_rows(rows, format, output, throughput.markdown)
    if plot is not None:
        throughput.plot(rows, plot)


if __name__ == "__main__":
    run_script(throughput_benchmark, EPILOG)
