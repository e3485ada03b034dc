"""`llmcl chat`: a conversation that keeps its KV cache between turns, or a conversation with a server."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from llmcl.cli import chat_commands as commands
from llmcl.cli import options as opt
from llmcl.cli.chat_input import History, history_file, prepare_typing, read_message, typing_kept_apart
from llmcl.cli.chat_session import Session
from llmcl.cli.command import fit_for_terminal
from llmcl.cli.loading import load_to_answer
from llmcl.cli.option_groups import LoadingToAnswer, Sampling, with_groups
from llmcl.engine.conversation import ON_FULL
from llmcl.errors import CheckpointError, OutOfDeviceMemoryError, UsageError

if TYPE_CHECKING:
    from llmcl.engine.llm import LLM

EPILOG = f"""{opt.METRICS}

Without sampling options the model's recommendations hold (generation_config.json, or general.sampling.* in GGUF),
then the defaults above. Without --seed each answer gets a new seed."""
CHAT_SAMPLING = Sampling(max_tokens=1024, temperature=0.7, top_p=0.95, top_k=40)
PANEL = "Server"

ServerUrl = Annotated[
    str | None,
    opt.option(
        PANEL,
        "--server",
        metavar="URL",
        env=False,
        help="Talk with a model behind `llmcl serve` or another server with OpenAI's API, such as "
        "http://127.0.0.1:8080, instead of -m. Options for loading have no effect then.",
    ),
]
ApiKey = Annotated[str | None, opt.option(PANEL, "--api-key", metavar="KEY", help="API key for the server.")]


OnFull = Annotated[
    str,
    opt.choice(
        opt.MODEL_PANEL,
        "--on-full",
        ON_FULL,
        help="What to do when the context is full: drop the oldest turns but the system prompt, or refuse the message.",
    ),
]
NoHistory = Annotated[
    bool, opt.option(opt.OUTPUT_PANEL, "--no-history", help="Don't remember the messages for later sessions.")
]


@with_groups
def chat(
    ctx: typer.Context,
    model: opt.OptionalModel = None,
    server: ServerUrl = None,
    api_key: ApiKey = None,
    system_prompt: opt.SystemPrompt = None,
    on_full: OnFull = "drop",
    sampling: Sampling = CHAT_SAMPLING,
    loading: LoadingToAnswer = LoadingToAnswer(),
    no_history: NoHistory = False,
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
) -> None:
    """Talk with a model; /help lists what can be typed. From a pipe, each line is one message."""
    if server is None and model is None:
        raise UsageError("no model: give -m/--model, or --server URL for one behind a server")
    request = sampling.values() | {"system_prompt": system_prompt}
    explicit = {
        name
        for name in vars(sampling)
        if (source := ctx.get_parameter_source(name)) is not None and source.name != "DEFAULT"
    }
    history = History(None if no_history else history_file())
    if server is not None:
        from llmcl.serve.client import ServerChat

        key = api_key.split()[0] if api_key and api_key.strip() else None
        remote = ServerChat(server, key, model=model, on_full=on_full)
        if not quiet:
            print(f"server: {remote.url} (/help lists the commands)", file=sys.stderr)
        converse(Session(remote, request, explicit, quiet=quiet, with_times=not quiet), history)
        return
    assert model is not None

    def load(name: str) -> LLM:
        return load_to_answer(name, loading, quiet=quiet)

    with typing_kept_apart():
        llm = load(model)
    session = Session(llm.chat(on_full=on_full), request, explicit, quiet=quiet)
    session.take(llm, load)
    try:
        if not quiet:
            print("/help lists the commands", file=sys.stderr)
        converse(session, history)
    finally:
        session.close()


def converse(session: Session, history: History) -> None:
    """Reads messages and commands and shows answers, until the input ends or /exit."""
    prepare_typing(commands.complete)
    while not session.over and (message := read_message()) is not None:
        history.add(message)
        try:
            with typing_kept_apart():
                _take(session, message)
        except KeyboardInterrupt:  # after an answer's last token
            session.note("")


def _take(session: Session, message: str) -> None:
    """Runs a command, or answers a message."""
    try:
        if (parsed := commands.parse(message)) is not None:
            command, argument = parsed
            command(session, argument)
            return
    except (UsageError, CheckpointError, OutOfDeviceMemoryError) as error:
        session.note(f"error: {fit_for_terminal(error)}")
        return
    if message.strip():
        session.answer(commands.to_send(message))
