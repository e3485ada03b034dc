"""Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def row(cells: Iterable[str]) -> str:
    """Formats a table line."""
    return f"| {' | '.join(cells)} |"


def table(align: str, header: Sequence[str], rows: Iterable[Iterable[str]] = ()) -> list[str]:
    """Returns the lines of a table. align: "l" or "r" per column."""
    rule = "|".join({"l": "---", "r": "---:"}[side] for side in align)
    return [row(header), f"|{rule}|", *map(row, rows)]
