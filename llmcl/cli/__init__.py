"""The command line `llmcl`: parse, call, print. One file per command.

Text goes to standard output, everything else to standard error. A command is imported when called, and imports the
engine, the hub client and rich only when needed, so `llmcl --help` answers at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from llmcl import __version__
from llmcl.cli import command
from llmcl.cli.command import TYPER_SETTINGS, LlmclCommand

# Each command with its line in `llmcl --help`, which replaces the docstring under `python -OO`. The function has the
# command's name, and EPILOG in its module ends the command's --help.
_COMMANDS = {
    "run": "Chat with a model, or answer one prompt.",
    "generate": "Stream a model's answer, or answer a file of requests.",
    "chat": "Talk with a model; /help lists what can be typed.",
    "embed": "Turn texts into vectors (embeddings).",
    "serve": "Serve a model to OpenAI's and Anthropic's clients.",
    "warm": "Compile a model's kernels, so that later starts need not.",
    "pull": "Download a model from the hub.",
    "list": "List the downloaded models.",
    "show": "Describe a model: family, format, size, files.",
    "rm": "Delete downloaded models.",
    "bench": "Measure prefill, decode and the time between tokens.",
    "perplexity": "Measure how well a model predicts a text.",
    "convert": "Write a model as GGUF or safetensors, quantised or not.",
    "models": "List the model families that run, and how much memory they need.",
    "devices": "List OpenCL devices, and say which is used and why.",
    "doctor": "Check every kernel on a device against NumPy.",
    "profile": "Show where the time goes, kernel by kernel.",
    "tune": "Find and keep the fastest sizes of attention and products.",
    "help": "Show this list, or the options of a command.",
    "version": "Print the version.",
}
# Commands defined in a module with another name.
_MODULES = dict.fromkeys(("pull", "list", "show", "rm"), "downloads") | dict.fromkeys(("help", "version"), "about")


class _Commands(Mapping[str, Any]):
    """The commands by name. Each is imported on first use: building its options takes longer than parsing them."""

    def __getitem__(self, name: str) -> Any:
        line = _COMMANDS[name]
        module = import_module(f"{__name__}.{_MODULES.get(name, name)}")
        function = getattr(module, name, None) or getattr(module, f"{name}_")  # `list_`: the plain name is a built-in
        app = typer.Typer(**TYPER_SETTINGS)
        text, epilog = inspect.getdoc(function) or line, getattr(module, "EPILOG", None)
        app.command(name, cls=LlmclCommand, short_help=line, help=text, epilog=epilog)(function)
        return typer.main.get_command(app)

    def __iter__(self) -> Iterator[str]:
        return iter(_COMMANDS)

    def __len__(self) -> int:
        return len(_COMMANDS)


class _Group(TyperGroup):
    def __init__(self, **settings: Any):
        super().__init__(**settings | {"commands": _Commands()})

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):  # no imports
            formatter.write_dl(list(_COMMANDS.items()))


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
    command.run(app, "llmcl")  # plain `run` is a command's module
