"""Shared code for all commands: the layout of --help, and an exit code for every early end."""

from __future__ import annotations

import errno
import gc
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand

from llmcl.errors import NO_MORE_FILES, LlmclError

INTERRUPTED_EXIT_CODE = 130  # 128 + SIGINT, like shells
CLOSED_PIPE_EXIT_CODE = 141  # 128 + SIGPIPE
CANNOT_WRITE = errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS

_TyperError: type[Exception] = typer.BadParameter.__mro__[2]  # click's ClickException, which typer does not export

TYPER_SETTINGS: dict[str, Any] = {
    "add_completion": False,
    "rich_markup_mode": None,  # plain text: fast to import, and no frame breaks a message
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}


class LlmclCommand(TyperCommand):
    """A command whose --help groups options under headings."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                if parameter.param_type_name == "argument" and parameter.metavar:
                    record = parameter.metavar, record[1]  # drops the Python type's name
                groups.setdefault(getattr(parameter, "rich_help_panel", None) or "Other", []).append(record)
        for heading, records in groups.items():
            with formatter.section(heading):
                formatter.write_dl(records)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        arguments = [p.metavar or "" for p in self.get_params(ctx) if p.param_type_name == "argument"]
        return [self.options_metavar or "", *arguments]

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            if sys.stdout is not None:
                sys.stdout.flush()  # raises for a closed pipe here and not at interpreter exit
            return result
        except LlmclError as error:
            _show_traceback_if_wanted()
            print(f"error: {fit_for_terminal(error)}", file=sys.stderr)
            raise typer.Exit(error.exit_code) from error
        except KeyboardInterrupt as interrupt:
            raise typer.Exit(INTERRUPTED_EXIT_CODE) from interrupt
        except BrokenPipeError as error:
            _silence_stdout()
            raise typer.Exit(CLOSED_PIPE_EXIT_CODE) from error


class _ToStderr(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to the current standard error: a progress bar replaces it and stays below the messages."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        return ("warning: " if record.levelno >= logging.WARNING else "") + fit_for_terminal(super().format(record))


def run_script(command: Callable[..., None], epilog: str | None = None) -> None:
    """Runs a single-command script; never returns."""
    app = typer.Typer(**TYPER_SETTINGS)
    app.command(cls=LlmclCommand, epilog=epilog)(command)
    run(app)


def run(app: typer.Typer, name: str | None = None) -> None:
    """Runs the program; never returns. Shows a traceback only with LLMCL_DEBUG=1."""
    for closed in ("stdout", "stderr"):
        if getattr(sys, closed) is None:  # closed by the caller; print() would use the other stream
            setattr(sys, closed, open(os.devnull, "w"))  # noqa: SIM115  for as long as the process lives
    warnings.formatwarning = lambda message, *_: f"warning: {fit_for_terminal(message)}\n"
    logging.getLogger("llmcl").handlers = [_ToStderr()]
    gc.set_threshold(50_000, 20, 100)  # loading makes little garbage, and collecting took 40 ms at start
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a narrow encoding must not end an answer
    try:
        sys.exit(app(prog_name=name, standalone_mode=False) or 0)
    except _TyperError as error:
        sys.exit(_show_usage_error(error))
    except Exception as error:
        _show_traceback_if_wanted()
        if isinstance(error, OSError) and error.errno in CANNOT_WRITE:
            print(f"error: {error.filename or 'the output'} cannot be written ({error.strerror})", file=sys.stderr)
            _silence_stdout()
            sys.exit(1)
        if (limit := _limit_met(error)) is not None:
            print(f"error: the system refuses this process another {limit}", file=sys.stderr)
            sys.exit(1)
        print(
            f"error: unexpected {type(error).__name__}: {fit_for_terminal(error)}\n"
            "This is a defect of llmcl; LLMCL_DEBUG=1 shows where it happened.",
            file=sys.stderr,
        )
        sys.exit(1)


def _show_usage_error(error: Any) -> int:
    """Prints the problem and where to get help, in two lines. Returns the exit code."""
    context, text = getattr(error, "ctx", None), error.format_message()
    if type(error).__name__ == "NoArgsIsHelpError":
        print(text, file=sys.stderr)
    else:
        print(f"error: {fit_for_terminal(' '.join(text.split()))}", file=sys.stderr)
        if context is not None:
            print(f"See {context.command_path} --help.", file=sys.stderr)
    return int(error.exit_code)


def _limit_met(error: Exception) -> str | None:
    """Names the exhausted system resource and the remedy; None for unrelated errors."""
    if isinstance(error, RuntimeError) and "start new thread" in str(error):
        return "thread; raise the limit of its processes (`ulimit -u`, or that of its container)"
    if isinstance(error, OSError) and error.errno in NO_MORE_FILES:
        return "open file; raise the limit of its files (`ulimit -n`)"
    # including NumPy's and C++ drivers'
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return (
            "byte of memory; raise its limit (`ulimit -v` and `ulimit -d`, or that of its container), or take a "
            "smaller model or --ctx-size"
        )
    return None


def fit_for_terminal(message: object) -> str:
    """Escapes control characters in a message: a file name may contain terminal control sequences."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in str(message))


def _show_traceback_if_wanted() -> None:
    if os.environ.get("LLMCL_DEBUG") == "1":
        traceback.print_exc()


def _silence_stdout() -> None:
    """Silences standard output for a closed pipe or full disk, so that flushing at exit does not complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
