"""`llmcl profile`: shows the time per kernel in prefill and decode."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from llmcl.cli import options as opt
from llmcl.cli.option_groups import LoadingOrRandom, with_groups
from llmcl.errors import UsageError, counted

if TYPE_CHECKING:
    from rich.table import Table

    from llmcl.tools.profile import PhaseProfile, Profile

CSV_NAME, TRACE_NAME = "cl_profiling.csv", "cl_trace.json"

EPILOG = f"""\b
share       of the phase's kernel time
GB/s        weights, keys, values and activations that the kernel must move,
            over its time
GFLOP/s     its float32 operations over its time
of ceiling  the share of the nearer ceiling, both measured in this run: read
            bandwidth or float32 arithmetic peak (above 100%: operands came
            from a cache, or were multiplied in 8 or 16 bits)
idle        between one kernel's end and the next one's start on the device's
            clock; without profiling a CPU decodes with a persistent kernel,
            which has fewer such gaps
{CSV_NAME}  one row a launch, times in ns
{TRACE_NAME}     for ui.perfetto.dev or chrome://tracing"""

OutputDir = Annotated[
    Path,
    opt.option(
        opt.OUTPUT_PANEL,
        "-o",
        "--output-dir",
        metavar="FOLDER",
        help=f"Folder for {CSV_NAME} and {TRACE_NAME}. It is created if needed.",
    ),
]


@with_groups
def profile(
    model: opt.OptionalModel = None,
    random: opt.RandomShape = None,
    n_prompt: opt.PromptTokens = 512,
    n_gen: Annotated[
        int,
        opt.measurement("-n", "--n-gen", metavar="N", parser=opt.whole(0), help="Tokens to decode after the prompt."),
    ] = 64,
    loading: LoadingOrRandom = LoadingOrRandom(),
    combo: opt.Combo = None,
    output_dir: OutputDir = Path("."),
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
) -> None:
    """Show where the time of prefill and decode goes, kernel by kernel.

    The tables go to standard output; every launch goes to two files in the output folder.
    """
    opt.check_model_or_random(model, random, loading.quantize)
    check_output_dir(output_dir)
    from llmcl.cli.loading import load_model
    from llmcl.runtime.profiler import ProfilingDevice, write_csv, write_trace
    from llmcl.tools.profile import profile as run

    with load_model(
        model,
        loading,
        random=random,
        device=ProfilingDevice.open(loading.device),
        ctx_size=n_prompt + n_gen + 1,
        combo=combo,
        quiet=quiet,
    ) as llm:
        result = run(llm, n_prompt, n_gen)
        label = llm.device.entry.label
    files = output_dir / CSV_NAME, output_dir / TRACE_NAME
    try:
        write_csv(result.records, files[0])
        write_trace(result.records, files[1], label)
    except OSError as error:
        raise UsageError(
            f"-o/--output-dir {output_dir}: cannot be written ({error.strerror}); give another folder"
        ) from error
    show(result)
    if not quiet:
        print(f"{len(result.records)} launches in {files[0]}, a trace in {files[1]}", file=sys.stderr)


def check_output_dir(folder: Path) -> None:
    """Raises UsageError, before any measurement, if a folder cannot be created or written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UsageError(
            f"-o/--output-dir {folder}: cannot be written ({error.strerror}); give a folder of your own"
        ) from error


def show(result: Profile) -> None:
    from llmcl.cli.tables import console

    out = console()
    for phase in result.phases:
        out.print(_table(phase))
        out.print(_summary(phase), soft_wrap=True)
        out.print()
    if result.why_separate is not None:
        out.print(f"decode is not one kernel: {result.why_separate}", soft_wrap=True)
    out.print(
        f"ceilings: streaming read {result.bandwidth / 1e9:.1f} GB/s, "
        f"float32 multiply-adds {result.arithmetic_peak / 1e9:.0f} GFLOP/s",
        soft_wrap=True,
    )


def _table(phase: PhaseProfile) -> Table:
    from llmcl.cli.tables import new_table

    title = f"{phase.phase}, {counted(phase.n_tokens, 'token')}"
    table = new_table(title)
    table.add_column("kernel", no_wrap=True)
    for name in ("calls", "total ms", "mean us", "share", "GB/s", "GFLOP/s", "of ceiling"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in phase.rows:
        declared = row.gb_per_s > 0
        table.add_row(
            row.name,
            str(row.calls),
            f"{row.total_ms:.2f}",
            f"{row.mean_us:.1f}",
            f"{row.share:.1%}",
            f"{row.gb_per_s:.1f}" if declared else "",
            f"{row.gflop_per_s:.1f}" if row.gflop_per_s else "",
            f"{row.of_ceiling:.0%} {'read' if row.ceiling == 'bandwidth' else 'arith'}" if declared else "",
        )
    return table


def _summary(phase: PhaseProfile) -> str:
    span = max(phase.span_ms, 1e-9)
    lines = [
        f"{phase.launches} launches in {phase.span_ms:.2f} ms: kernels {phase.kernel_ms:.2f} ms "
        f"({phase.kernel_ms / span:.1%}), idle {phase.idle_ms:.2f} ms ({phase.idle_ms / span:.1%}),",
        f"of which between steps {phase.between_steps_ms:.2f} ms; between two launches of a step "
        f"{phase.median_gap_us:.1f} us (median)",
        f"from enqueueing a launch to its start {phase.queued_to_start_us:.0f} us (median)",
    ]
    return "\n".join(lines)
