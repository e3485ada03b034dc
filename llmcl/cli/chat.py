"""`llmcl chat`: a conversation that keeps its KV cache between turns, or one with a server."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

from llmcl.cli import options as opt
from llmcl.cli.answer import Answer, show
from llmcl.cli.command import fit_for_terminal
from llmcl.cli.loading import load_to_answer, reading_bar
from llmcl.cli.option_groups import LoadingToAnswer, Sampling, with_groups
from llmcl.cli.text_files import stream_line, without_last_newline
from llmcl.errors import ContextLengthError, ServerError, UsageError

if TYPE_CHECKING:
    from llmcl.engine.chat import Chat
    from llmcl.serve.client import ServerChat

HELP = """\
/help   this list
/reset  forget the conversation
/stats  the timing report of the last answer
/exit   leave (so do Ctrl-D, and Ctrl-C twice on an empty line)
A backslash at the end of a line continues the message on the next. Ctrl-C stops an answer."""
EPILOG = opt.METRICS
PANEL = "Server"

ServerUrl = Annotated[
    str | None,
    opt.option(
        PANEL,
        "--server",
        metavar="URL",
        env=False,
        help="Talk with a model behind `llmcl serve`, or another server with OpenAI's API, such as "
        "http://127.0.0.1:8080, in place of -m. Loading options have no effect then.",
    ),
]
ApiKey = Annotated[str | None, opt.option(PANEL, "--api-key", metavar="KEY", help="What the server wants to be sent.")]


@with_groups
def chat(
    model: opt.OptionalModel = None,
    server: ServerUrl = None,
    api_key: ApiKey = None,
    system_prompt: opt.SystemPrompt = None,
    sampling: Sampling = Sampling(max_tokens=1024),
    loading: LoadingToAnswer = LoadingToAnswer(),
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
) -> None:
    """Talk with a model; /help lists what can be typed. From a pipe, each line is one message."""
    if server is None and model is None:
        raise UsageError("no model: give -m/--model, or --server URL for one behind a server")
    request = sampling.arguments(quiet=quiet) | {"system_prompt": system_prompt}
    if server is not None:
        from llmcl.serve.client import ServerChat

        remote = ServerChat(server, api_key.split()[0] if api_key and api_key.strip() else None)
        if not quiet:
            print(f"server: {remote.url} (/help lists the commands)", file=sys.stderr)
        converse(remote, request, quiet=quiet, with_times=not quiet)
        return
    assert model is not None
    with load_to_answer(model, loading, quiet=quiet) as llm:
        if not quiet:
            print("/help lists the commands", file=sys.stderr)
        converse(llm.chat(), request, quiet=quiet)


def converse(
    conversation: Chat | ServerChat, request: dict[str, Any], *, quiet: bool, with_times: bool = False
) -> None:
    """Reads messages and shows answers until the input ends or /exit. with_times: a line of them after each answer."""
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
                answer = _answer(conversation, message, request, quiet)
                if answer is not None and with_times:
                    _note(answer.summary())
                last = answer or last
        except KeyboardInterrupt:  # between an answer's last token and the next prompt
            _note("")


def _answer(conversation: Chat | ServerChat, message: str, request: dict[str, Any], quiet: bool) -> Answer | None:
    """Shows one answer; None when it was stopped before its first token or did not fit."""
    try:
        with reading_bar(quiet) as progress:
            answer = show(conversation.send(message, progress=progress, **request))
    except KeyboardInterrupt:
        _note("stopped")
        return None
    except (ContextLengthError, ServerError) as error:
        hint = " (/reset starts anew)" if isinstance(error, ContextLengthError) else ""
        _note(f"error: {fit_for_terminal(error)}{hint}")
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
    if sys.stdin is None:  # as if it were empty: the command was started without one (`<&-`)
        raise EOFError
    if not sys.stdin.isatty():
        line = stream_line(sys.stdin.buffer, "a line of standard input")
        if not line:
            raise EOFError
        return without_last_newline(line)
    if not sys.stdout.isatty():  # input() would write its prompt into the redirected text
        print(prompt, end="", file=sys.stderr, flush=True)
        return input()
    return input(prompt)


def _typed_so_far() -> str:
    readline = sys.modules.get("readline")
    return readline.get_line_buffer() if readline is not None else ""
