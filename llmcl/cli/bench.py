"""`llmcl bench`: measures prefill, decode and time between tokens in real generation, or several sequences at once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

from llmcl.cli import options as opt
from llmcl.cli.loading import load_model
from llmcl.cli.option_groups import LoadingOrRandom, with_groups
from llmcl.cli.text_files import check_writable
from llmcl.errors import UsageError
from llmcl.models.batch import MAX_SEQUENCES
from llmcl.tools import benchmark, throughput
from llmcl.tools.rows import FORMATS, write_rows

EPILOG = """\b
pp512          512 random tokens prefilled: no tokenisation, no sampling
tg128          128 single-token decodes from an empty context: no sampling
tg128 @ d4096  the same after 4096 tokens, whose prefill is not timed
gen256         real generation, sampling included, end-of-text ignored
t/s            mean and standard deviation of the repetitions, after a warm-up
size           bytes of weights that one decode step reads
GB/s           weights and KV cache read by a step, over its time
of bandwidth   GB/s over that of a streaming read measured in the same run
TBT            time between two tokens on the host
stalls         of these, the ones above twice the median"""


@with_groups
def bench(
    model: opt.OptionalModel = None,
    random: opt.RandomShape = None,
    n_prompt: opt.PromptLengths = "512",
    n_gen: opt.GenLengths = "128",
    n_depth: opt.Depths = "0",
    generate: Annotated[
        int,
        opt.measurement(
            "-g",
            "--generate",
            metavar="N",
            parser=opt.number(int, "0 (none) or a whole number, 2 or more", lambda n: n == 0 or n >= 2),
            help="Tokens of real generation, for the distribution of TBT; 0: none.",
        ),
    ] = 256,
    temp: opt.Temperature = 0.8,
    batch: Annotated[
        Any,
        opt.measurement(
            "-b",
            "--batch",
            metavar="N,...",
            parser=opt.wholes(1),
            help="Measure N sequences at once instead, each with a prompt of -p and an answer of -n tokens.",
        ),
    ] = None,
    repetitions: opt.Repetitions = 5,
    ctx_size: Annotated[
        int | None,
        opt.measurement(
            "-c",
            "--ctx-size",
            metavar="TOKENS",
            parser=opt.whole(1, "tokens"),
            help="Context size.  [default: what the longest test needs]",
        ),
    ] = None,
    loading: LoadingOrRandom = LoadingOrRandom(),
    format: Annotated[
        str, opt.choice(opt.OUTPUT_PANEL, "--format", FORMATS, env=False, help="How the rows are written.")
    ] = "md",
    output: opt.RowsFile = None,
    plot: Annotated[str | None, opt.plot("TBT over position and its histogram")] = None,
) -> None:
    """Measure prefill, decode and the time between tokens.

    The rows are those of llama-bench. The last one is real generation, with the times between its tokens.
    """
    if batch is not None:
        several = throughput.ThroughputPlan(n_prompt, n_gen, batch, repetitions)
        measure_batch(several, model, random, loading, format=format, output=output, plot=plot)
        return
    plan = benchmark.BenchmarkPlan(
        n_prompt=tuple(n for n in n_prompt if n),
        n_gen=tuple(n for n in n_gen if n),
        depths=n_depth,
        generate_tokens=generate,
        temperature=temp,
        repetitions=repetitions,
    )
    check_request(plan, model, random, loading.quantize, ctx_size, plot, output)
    context = ctx_size or plan.context_tokens()
    with load_model(model, loading, random=random, ctx_size=context, quiet=False) as llm:
        result = benchmark.run(llm, plan, note=_note)
    write_rows(result.rows, format, output, benchmark.markdown)
    if plot is not None:
        benchmark.plot_tbt(result, plot)


def measure_batch(
    plan: throughput.ThroughputPlan,
    model: str | None,
    random: str | None,
    loading: LoadingOrRandom,
    *,
    format: str,
    output: Path | None,
    plot: str | None,
) -> None:
    """Measures several sequences side by side, like llama-batched-bench."""
    opt.check_model_or_random(model, random, loading.quantize)
    if not all([*plan.n_prompt, *plan.n_gen]):
        raise UsageError("--batch measures a prompt and an answer: set -p and -n above 0")
    if max(plan.n_parallel) > MAX_SEQUENCES:
        raise UsageError(f"--batch {max(plan.n_parallel)}: at most {MAX_SEQUENCES} sequences at once")
    if plot is not None:
        benchmark.check_plot(plot)
    check_writable("-o/--output", output)
    with load_model(model, loading, random=random, ctx_size=plan.context_tokens(), quiet=False) as llm:
        rows = throughput.run(llm, plan, _note)
    write_rows(rows, format, output, throughput.markdown)
    if plot is not None:
        throughput.plot(rows, plot)


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def check_request(
    plan: benchmark.BenchmarkPlan,
    model: str | None,
    random: str | None,
    quantize: str | None,
    ctx_size: int | None,
    plot: str | None,
    output: Path | None,
) -> None:
    """Raises for requests certain to fail, before a model is loaded."""
    opt.check_model_or_random(model, random, quantize)
    if not (plan.n_prompt or plan.n_gen or plan.generate_tokens):
        raise UsageError("-p 0, -n 0 and -g 0 leave nothing to measure: set one of them above 0")
    if ctx_size is not None:
        benchmark.check_context(plan, ctx_size, "-c/--ctx-size")
    if plot is not None:
        if not plan.generate_tokens:
            raise UsageError("--plot draws real generation, which -g 0 leaves out: set -g/--generate above 0")
        benchmark.check_plot(plot)
    check_writable("-o/--output", output)
