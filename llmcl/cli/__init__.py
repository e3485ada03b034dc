"""The command line `llmcl`: parse, call, print. One file a command.

Text goes to standard output, everything else to standard error. The engine, the hub client and rich are
imported by the command that needs them, so that `llmcl --help` answers at once.
"""

from __future__ import annotations

from typing import Annotated

import typer

from llmcl import __version__
from llmcl.cli.chat import chat
from llmcl.cli.command import TYPER_SETTINGS, Command, run
from llmcl.cli.convert import convert
from llmcl.cli.devices import devices
from llmcl.cli.doctor import doctor
from llmcl.cli.generate import generate
from llmcl.cli.options import METRICS
from llmcl.cli.perplexity import SCORED, perplexity
from llmcl.cli.profile import EPILOG as PROFILE_EPILOG
from llmcl.cli.profile import profile
from llmcl.cli.tune import EPILOG as TUNE_EPILOG
from llmcl.cli.tune import tune

app = typer.Typer(
    **TYPER_SETTINGS,
    no_args_is_help=True,
    help="Run language models on OpenCL devices.",
    epilog="Exit codes: 0 done, 1 unexpected failure, 2 usage, 3 device, 4 device memory, 5 kernel build, "
    "6 checkpoint, 7 model not supported, 8 hub, 9 context length, 130 Ctrl-C, 141 closed pipe. "
    "LLMCL_DEBUG=1 shows tracebacks.",
)
app.command(cls=Command, epilog=METRICS)(generate)
app.command(cls=Command, epilog=METRICS)(chat)
app.command(cls=Command, epilog=SCORED, short_help="Measure how well a model predicts a text.")(perplexity)
app.command(cls=Command, short_help="Write a model as GGUF or safetensors, quantised or not.")(convert)
app.command(cls=Command, short_help="List OpenCL devices, and say which is used and why.")(devices)
app.command(cls=Command, short_help="Check every kernel on a device against NumPy.")(doctor)
app.command(cls=Command, epilog=PROFILE_EPILOG, short_help="Show where the time goes, kernel by kernel.")(profile)
app.command(cls=Command, epilog=TUNE_EPILOG, short_help="Find and keep the fastest tile sizes of attention.")(tune)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"llmcl {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point of the program `llmcl`."""
    run(app, "llmcl")
