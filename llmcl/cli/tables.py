"""Tables on standard output."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # gives every command the same exit code (command.py), not rich's


LEAST_COLUMNS = 40  # a narrower table has no room for words; COLUMNS=0 would leave it blank


def console() -> Console:
    """Returns a console for tables, as wide as the terminal."""
    table_console = _Console(highlight=False)
    table_console.width = max(table_console.width, LEAST_COLUMNS)
    return table_console


def new_table(title: str | None = None) -> Table:
    """Returns an empty table with a line under its head."""
    return Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0)
    )
