"""`llmcl run MODEL [PROMPT]`: a chat, or the answer to one prompt."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from llmcl.cli import options as opt
from llmcl.cli.chat import CHAT_SAMPLING, chat
from llmcl.cli.generate import ImageFiles, generate, piped_text
from llmcl.cli.option_groups import LoadingToAnswer, Sampling, with_groups
from llmcl.errors import UsageError

EPILOG = opt.METRICS

ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", envvar="LLMCL_MODEL", rich_help_panel="Arguments", help=opt.MODEL_HELP)
]
PromptArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[PROMPT]...",
        rich_help_panel="Arguments",
        help="Answer this prompt and exit. Without one, answer a pipe or open a chat.",
    ),
]


@with_groups
def run(
    ctx: typer.Context,
    model: ModelArgument,
    prompt: PromptArgument = None,
    image: ImageFiles = None,
    system_prompt: opt.SystemPrompt = None,
    sampling: Sampling = CHAT_SAMPLING,
    loading: LoadingToAnswer = LoadingToAnswer(),
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
) -> None:
    """Chat with a model, or answer one prompt.

    llmcl chat and llmcl generate have more options.
    """
    text = "\n\n".join(part for part in (" ".join(prompt or ()), piped_text()) if part)
    if image and not text:
        raise UsageError("--image is for one prompt: give a PROMPT, or open a chat and type /image FILE")
    options = ctx.params | {"ctx": ctx, "model": model, "prompt": text}
    _call(generate if text else chat, options)


def _call(command: Callable[..., None], options: dict[str, Any]) -> None:
    """Calls a command with the options it accepts, and with defaults for the rest."""
    parameters = inspect.signature(command).parameters.values()
    command(**{parameter.name: options.get(parameter.name, parameter.default) for parameter in parameters})
