"""`llmcl help` and `llmcl version`."""

from __future__ import annotations

from typing import Annotated

import typer


def help(
    ctx: typer.Context,
    command: Annotated[str | None, typer.Argument(metavar="[COMMAND]", rich_help_panel="Arguments", help="")] = None,
) -> None:
    """Show the list of commands, or the options of one."""
    parent = ctx.parent
    assert parent is not None
    if command is None:
        print(parent.get_help())
        return
    name, chosen, _ = parent.command.resolve_command(parent, [command])  # type: ignore[attr-defined]
    print(chosen.make_context(name, [], parent=parent, resilient_parsing=True).get_help())


def version() -> None:
    """Print the version."""
    from llmcl import __version__

    print(f"llmcl {__version__}")
