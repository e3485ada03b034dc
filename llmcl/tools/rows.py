"""Measured rows in the formats that every benchmark writes: a Markdown table, csv, json, jsonl."""

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
    """rows: of one dataclass. format: one of FORMATS; markdown: makes the table of md.

    In csv a field of times by name, such as tbt_ms with p50 and p99, is a column for each (tbt_p50_ms, tbt_p99_ms), and
    the number of stalls among them is called stalls. Lists of samples are left out there.
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
    """Prints the rows in a format, or writes them to a file and shows people the table."""
    text = format_rows(rows, format, markdown)
    if output is None:
        print(text, end="", flush=True)
    else:
        print(markdown(rows), end="", file=sys.stderr)  # first: a disk may be full
        output.write_text(text, encoding="utf-8")


def _csv(objects: Sequence[dict[str, Any]]) -> str:
    flat = [_flat(item) for item in objects]
    # A row without times has None for all of them.
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
    """A table with padded columns, the first `left` of them aligned to the left."""
    widths = [max(len(line[i]) for line in [header, *rows]) for i in range(len(header))]

    def line(cells: list[str]) -> str:
        padded = [c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
        return markdown_row(padded) + "\n"

    rule = [f"{'-' * (w - 1)}:" if i >= left else "-" * w for i, w in enumerate(widths)]
    return "".join(map(line, [header, rule, *rows]))
