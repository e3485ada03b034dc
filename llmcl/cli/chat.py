"""`llmcl chat`: a conversation that keeps its KV cache between turns."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from llmcl.cli import options as opt
from llmcl.cli.answer import Answer, show
from llmcl.cli.command import fit_for_terminal
from llmcl.cli.loading import load_to_answer, reading_bar
from llmcl.cli.option_groups import LoadingToAnswer, Sampling, with_groups
from llmcl.errors import ContextLengthError

if TYPE_CHECKING:
    from llmcl.engine.chat import Chat

HELP = """\
/help   this list
/reset  forget the conversation
/stats  the timing report of the last answer
/exit   leave (so do Ctrl-D, and Ctrl-C twice on an empty line)
A backslash at the end of a line continues the message on the next. Ctrl-C stops an answer."""
EPILOG = opt.METRICS


@with_groups
def chat(
    model: opt.Model,
    system_prompt: opt.SystemPrompt = None,
    sampling: Sampling = Sampling(max_tokens=1024),
    loading: LoadingToAnswer = LoadingToAnswer(),
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
) -> None:
    """Talk with a model; /help lists what can be typed. From a pipe, each line is one message."""
    request = sampling.arguments(quiet=quiet) | {"system_prompt": system_prompt}
    with load_to_answer(model, loading, quiet=quiet) as llm:
        if not quiet:
            print("/help lists the commands", file=sys.stderr)
        converse(llm.chat(), request, quiet=quiet)


def converse(conversation: Chat, request: dict[str, Any], *, quiet: bool) -> None:
    """Reads messages and shows answers until the input ends or /exit."""
    with suppress(ImportError):  # not on every system
        import readline  # noqa: F401  gives input() line editing and history
    last: Answer | None = None
    while (message := read_message()) is not None:
        command = message.strip()
        try:
            if command == "/exit":
                return
            if command == "/help":
                _note(HELP)
            elif command == "/reset":
                conversation.reset()
                last = None
                _note("the conversation starts anew")
            elif command == "/stats":
                _note(last.report() if last else "no answer yet")
            elif command.startswith("/") and command[1:].isalpha():
                _note(f"{fit_for_terminal(command)}: no such command; /help lists them")
            elif command:
                last = _answer(conversation, message, request, quiet) or last
        except KeyboardInterrupt:  # between an answer's last token and the next prompt
            _note("")


def _answer(conversation: Chat, message: str, request: dict[str, Any], quiet: bool) -> Answer | None:
    """Shows one answer; None when it was stopped before its first token or did not fit."""
    try:
        with reading_bar(quiet) as progress:
            answer = show(conversation.send(message, progress=progress, **request))
    except KeyboardInterrupt:
        _note("stopped")
        return None
    except ContextLengthError as error:
        _note(f"error: {fit_for_terminal(error)} (/reset starts anew)")
        return None
    print(flush=True)
    if answer.interrupted:
        _note("stopped")
    elif (reason := answer.why_cut(request["max_tokens"])) is not None:
        _note(f"{reason}, /reset starts anew" if answer.fills_context(request["max_tokens"]) else reason)
    return answer


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def read_message() -> str | None:
    """One message, continued lines joined; None at the end of input or after a second Ctrl-C on an empty line."""
    lines: list[str] = []
    asked = False  # whether to leave
    while True:
        try:
            line = _read_line("... " if lines else "> ")
        except EOFError:
            return "\n".join(lines) if lines else None
        except KeyboardInterrupt:
            _note("")
            nothing_typed = not lines and not _typed_so_far()
            if nothing_typed and (asked or not sys.stdin.isatty()):
                return None
            if nothing_typed:
                _note("Ctrl-C once more leaves, as /exit does")
            asked = nothing_typed
            lines = []  # as in a shell, Ctrl-C throws away what was typed
            continue
        if not line.endswith("\\"):
            return "\n".join([*lines, line])
        lines.append(line[:-1])


def _read_line(prompt: str) -> str:
    if not sys.stdin.isatty():
        return input()
    if not sys.stdout.isatty():  # input() would write its prompt into the redirected text
        print(prompt, end="", file=sys.stderr, flush=True)
        return input()
    return input(prompt)


def _typed_so_far() -> str:
    readline = sys.modules.get("readline")
    return readline.get_line_buffer() if readline is not None else ""
