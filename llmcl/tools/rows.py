"""Formats measured rows for every benchmark: a Markdown table, csv, json, jsonl."""

from __future__ import annotations

import csv
import dataclasses
import io
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from llmcl.tools import json_text
from llmcl.tools.markdown import row as markdown_row

FORMATS = ("md", "csv", "json", "jsonl")

Row = TypeVar("Row")


def format_rows(rows: Sequence[Row], format: str, markdown: Callable[[Sequence[Row]], str]) -> str:
    """Formats rows of one dataclass. format: a name in FORMATS; markdown: makes the table for md.

    In csv, a field with times by name, such as tbt_ms with p50 and p99, becomes a column per name (tbt_p50_ms,
    tbt_p99_ms), and its stall count the column stalls. csv omits lists of samples.
    """
    if format == "md":
        return markdown(rows)
    objects: list[dict[str, Any]] = [dataclasses.asdict(row) for row in rows]  # type: ignore[call-overload]
    if format == "csv":
        return _csv(objects)
    if format == "json":
        return json_text.dumps(objects, indent=2) + "\n"
    return "".join(json_text.dumps(item) + "\n" for item in objects)


def write_rows(rows: Sequence[Row], format: str, output: Path | None, markdown: Callable[[Sequence[Row]], str]) -> None:
    """Prints the rows in a format. With an output file, writes the file and prints a Markdown table to
    standard error."""
    text = format_rows(rows, format, markdown)
    if output is None:
        print(text, end="", flush=True)
    else:
        print(markdown(rows), end="", file=sys.stderr)  # first: a disk may be full
        output.write_text(text, encoding="utf-8")


def _csv(objects: Sequence[dict[str, Any]]) -> str:
    flat = [_flat(item) for item in objects]
    # A row without times has None in place of the whole field.
    whole = {name for item in objects for name, value in item.items() if isinstance(value, dict)}
    columns = [name for name in dict.fromkeys(name for item in flat for name in item) if name not in whole]
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()


def _flat(item: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in item.items():
        if isinstance(value, dict):
            what = name.removesuffix("_ms")
            flat |= {key if key == "stalls" else f"{what}_{key}_ms": time for key, time in value.items()}
        elif not isinstance(value, (list, tuple)):
            flat[name] = value
    return flat


def markdown_table(header: list[str], rows: list[list[str]], left: int) -> str:
    """Formats a table with padded columns; the first `left` columns are left-aligned."""
    widths = [max(len(line[i]) for line in [header, *rows]) for i in range(len(header))]

    def line(cells: list[str]) -> str:
        padded = [c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
        return markdown_row(padded) + "\n"

    rule = [f"{'-' * (w - 1)}:" if i >= left else "-" * w for i, w in enumerate(widths)]
    return "".join(map(line, [header, rule, *rows]))
