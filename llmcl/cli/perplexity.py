"""`llmcl perplexity`: measures how well a model predicts a text, and the distance from a reference."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from llmcl.cli import options as opt
from llmcl.cli.generate import read_prompt
from llmcl.cli.loading import draws_progress, load_model
from llmcl.cli.option_groups import Loading, with_groups
from llmcl.errors import UsageError, counted
from llmcl.tools import json_text

if TYPE_CHECKING:
    from llmcl.engine.llm import LLM
    from llmcl.tools.perplexity import Perplexity
    from llmcl.tools.perplexity import Progress as ProgressCallback

TEXT_PANEL, REFERENCE_PANEL = "Text", "Reference"
DEFAULT_WINDOW = 512

EPILOG = """\b
Tokens are scored as llama-perplexity does. The text is cut into windows of -c
tokens without overlap, and the rest is dropped. In each window the tokens
from index c/2 + 1 on are scored. Every window begins with BOS if the
tokenizer begins texts with it. Special tokens in the text count as such."""

TextFile = Annotated[
    str | None,
    opt.option(
        TEXT_PANEL, "-f", "--file", metavar="FILE", env=False, help="The text (UTF-8).  [default: standard input]"
    ),
]
Window = Annotated[
    int,
    opt.option(
        TEXT_PANEL,
        "-c",
        "--ctx-size",
        metavar="TOKENS",
        parser=opt.whole(4, "tokens"),
        env=False,
        help="Tokens in a window.",
    ),
]
Chunks = Annotated[
    int | None,
    opt.option(
        TEXT_PANEL,
        "--chunks",
        metavar="N",
        parser=opt.whole(1),
        env=False,
        help="Measure only the first N windows.  [default: all]",
    ),
]
Reference = Annotated[
    str | None,
    opt.option(
        REFERENCE_PANEL,
        "--reference",
        metavar="NAME|PATH",
        env=False,
        help="Compare with this model, as stored: mean KL divergence, share of equal likeliest tokens.",
    ),
]
ReferenceDtype = Annotated[
    str | None,
    opt.choice(
        REFERENCE_PANEL,
        "--reference-dtype",
        opt.WEIGHT_DTYPES,
        env=False,
        help="The reference's --dtype. Without --reference: compare with the same model held so.",
    ),
]


@with_groups
def perplexity(
    model: opt.Model,
    file: TextFile = None,
    ctx_size: Window = DEFAULT_WINDOW,
    chunks: Chunks = None,
    reference: Reference = None,
    reference_dtype: ReferenceDtype = None,
    lora: opt.Lora = None,
    loading: Loading = Loading(),
    format: opt.Format = "text",
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
) -> None:
    """Measure the perplexity of a text, and with --reference how far the model is from another."""
    if file is None and (sys.stdin is None or sys.stdin.isatty()):
        raise UsageError("no text: give -f/--file FILE, or pipe the text into standard input")
    text = read_prompt(None if file is not None else "-", file)
    with ExitStack() as stack:

        def loaded(name: str, how: Loading, lora: list[str] | None = None) -> LLM:
            return stack.enter_context(load_model(name, how, ctx_size=ctx_size, lora=lora, quiet=quiet))

        llm = loaded(model, loading, lora)
        other = None
        if reference is not None or reference_dtype is not None:
            other = loaded(reference or model, replace(loading, dtype=reference_dtype or "auto", quantize=None))
        from llmcl.tools.perplexity import perplexity as measure

        with scoring_bar(quiet) as progress:
            result = measure(llm, text, window=ctx_size, max_windows=chunks, reference=other, progress=progress)
        if format == "json":
            values = result.to_dict() | {"model": llm.model_name, "dtype": llm.dtype, "device": llm.place}
            if other is not None:
                values |= {"reference": other.model_name, "reference_dtype": other.dtype}
            print(json_text.dumps(values), flush=True)
        else:
            print(report(result), flush=True)


def report(result: Perplexity) -> str:
    """Formats the result as text lines."""
    lines = [
        f"perplexity  {result.perplexity:.4f} +- {result.standard_error:.4f}",
        f"scored      {counted(result.n_scored, 'token')}, {counted(result.n_windows, 'window')} of {result.window}",
        f"speed       {result.tokens_per_s:.1f} tokens/s",
    ]
    if result.divergence is not None:
        far = result.divergence
        lines += [
            f"reference   perplexity {far.perplexity:.4f}, ratio {result.perplexity / far.perplexity:.5f}",
            f"KL          mean {far.mean_kl:.3g}, max {far.max_kl:.3g} nats a token",
            f"same top 1  {far.same_top_1:.2%}",
        ]
    return "\n".join(lines)


@contextmanager
def scoring_bar(quiet: bool) -> Iterator[ProgressCallback | None]:
    """Yields a progress function drawing on standard error; None if standard error is not a terminal."""
    if not draws_progress(quiet):
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("scoring", total=None)

        def progress(done: int, total: int, so_far: float) -> None:
            bar.update(task, description=f"perplexity {so_far:.3f}", completed=done, total=total)

        yield progress
