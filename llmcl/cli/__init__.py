"""The command line `llmcl`: parse, call, print. One file a command.

Text goes to standard output, everything else to standard error. A command is imported when it is called, and imports
the engine, the hub client and rich when it needs them, so that `llmcl --help` answers at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from llmcl import __version__
from llmcl.cli.command import TYPER_SETTINGS, Command, fit_for_terminal, run

# Each command and its line in `llmcl --help`, which stands for its docstring under `python -OO`. The function and its
# module have the command's name, and the module's EPILOG ends its --help.
_COMMANDS = {
    "generate": "Stream a model's answer, or answer a file of requests.",
    "chat": "Talk with a model; /help lists what can be typed.",
    "serve": "Serve a model to OpenAI's and Anthropic's clients.",
    "warm": "Compile a model's kernels, so that later starts need not.",
    "perplexity": "Measure how well a model predicts a text.",
    "convert": "Write a model as GGUF or safetensors, quantised or not.",
    "models": "List the model families that run, formats and limits.",
    "devices": "List OpenCL devices, and say which is used and why.",
    "doctor": "Check every kernel on a device against NumPy.",
    "profile": "Show where the time goes, kernel by kernel.",
    "tune": "Find and keep the fastest sizes of attention and products.",
}


class _Commands(Mapping[str, Any]):
    """The commands by name, each made when it is asked for: its options take longer to build than to parse."""

    def __getitem__(self, name: str) -> Any:
        module = import_module(f"{__name__}.{name}")
        function, line, epilog = getattr(module, name), _COMMANDS[name], getattr(module, "EPILOG", None)
        app = typer.Typer(**TYPER_SETTINGS)
        app.command(cls=Command, short_help=line, help=inspect.getdoc(function) or line, epilog=epilog)(function)
        return typer.main.get_command(app)

    def __iter__(self) -> Iterator[str]:
        return iter(_COMMANDS)

    def __len__(self) -> int:
        return len(_COMMANDS)


class _Group(TyperGroup):
    def __init__(self, **settings: Any):
        super().__init__(**settings | {"commands": _Commands()})

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            if isinstance(getattr(error, "message", None), str):  # typer's own: it repeats what was typed
                error.message = fit_for_terminal(error.message)  # type: ignore[attr-defined]
            raise


app = typer.Typer(
    **TYPER_SETTINGS,
    cls=_Group,
    no_args_is_help=True,
    help="Run language models on OpenCL devices.",
    epilog="Exit codes: 0 done, 1 unexpected failure, 2 usage, 3 device, 4 device memory, 5 kernel build, "
    "6 checkpoint, 7 model not supported, 8 hub, 9 context length, 10 server, 130 Ctrl-C, 141 closed pipe. "
    "LLMCL_DEBUG=1 shows tracebacks.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"llmcl {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point of the program `llmcl`."""
    run(app, "llmcl")
