"""`llmcl convert`: writes a model in another format, quantised or not."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from llmcl.cli import options as opt
from llmcl.cli.loading import progress_bar
from llmcl.errors import UsageError, one_line

RESULT_PANEL = "Result"

Source = Annotated[str, typer.Argument(metavar="SRC", rich_help_panel="Arguments", help=opt.MODEL_HELP)]
Target = Annotated[
    str,
    typer.Argument(metavar="DST.gguf|DST_FOLDER", rich_help_panel="Arguments", help="The file or folder to write."),
]
Quantize = Annotated[
    str | None,
    opt.choice(
        RESULT_PANEL,
        "--quantize",
        opt.QUANTIZE_FORMATS,
        env=False,
        help="Quantise the matrices (GGUF only). Embedding and output head get q8_0.",
    ),
]
Dtype = Annotated[
    str,
    opt.choice(
        RESULT_PANEL,
        "--dtype",
        opt.WEIGHT_DTYPES,
        env=False,
        help="Format of the matrices without --quantize; auto keeps the source's.",
    ),
]
Imatrix = Annotated[
    str | None,
    opt.option(
        RESULT_PANEL,
        "--imatrix",
        env=False,
        metavar="FILE",
        help="Importance matrix from llama-imatrix, for --quantize q4_0 and q4_k.",
    ),
]
Force = Annotated[bool, opt.option(RESULT_PANEL, "--force", env=False, help="Overwrite an existing file or folder.")]


def convert(
    source: Source,
    target: Target,
    quantize: Quantize = None,
    dtype: Dtype = "auto",
    imatrix: Imatrix = None,
    force: Force = False,
    offline: opt.Offline = False,
    quiet: opt.Quiet = False,
) -> None:
    """Write a model as a GGUF file or as a folder of safetensors, which loads quickly.

    The result gets its name when it is complete.
    """
    from llmcl.convert import convert as write

    if target == "-":
        raise UsageError("no conversion is written to standard output; give the name of a file or a folder (./- for -)")
    with ended_by_sigterm(), progress_bar(quiet) as progress:
        path = write(
            source,
            target,
            quantize=quantize,
            dtype=dtype,
            imatrix=imatrix,
            force=force,
            offline=offline,
            progress=progress,
        )
    if not quiet:
        print(f"{one_line(path)}: {_size(path) / 1e6:,.1f} MB", file=sys.stderr)


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Makes SIGTERM unwind the stack, to remove partial output."""

    def end(number: int, frame: object) -> NoReturn:
        sys.exit(128 + number)  # like shells

    previous = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _size(path: Path) -> int:
    files = [path] if path.is_file() else [file for file in path.iterdir() if file.is_file()]
    return sum(file.stat().st_size for file in files)
