"""Tables on standard output."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # which ends every command alike (command.py), and not with rich's exit code


LEAST_COLUMNS = 40  # in fewer a table has no room for its words; COLUMNS=0 would leave it blank


def console() -> Console:
    """A console that prints tables, as wide as the terminal."""
    made = _Console(highlight=False)
    made.width = max(made.width, LEAST_COLUMNS)
    return made


def new_table(title: str | None = None) -> Table:
    """An empty table with one line, under its head."""
    return Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0)
    )
