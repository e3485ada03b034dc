"""Checking contestants against float64, timing them in turns, and writing the tables down."""

from __future__ import annotations

import csv
import dataclasses
import io
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from attention_bench.baselines import Contestant
from llmcl.errors import LlmclError
from llmcl.reference import round_bfloat16
from llmcl.runtime.device import Device
from llmcl.tools import json_text
from llmcl.tools.markdown import row as markdown_row

TURN_S = 0.05  # shorter turns measure how threads wake and caches fill
PAUSE_S = 0.02  # until idle threads of the contestant before (OpenMP's, the driver's) no longer spin on the processors
BOUND = 2e-4  # largest difference from float64 over the largest expected magnitude


class WrongResultError(LlmclError):
    """A contestant that does not compute attention; its time would mean nothing."""


@dataclass
class Table:
    """number, title, what to know about it, and the rows by column name."""

    number: int
    title: str
    note: str
    rows: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Call:
    """Milliseconds of a call by contestant, and what it must compute and read once."""

    name: str
    ms: dict[str, float]
    flops: float = 0.0
    nbytes: float = 0.0


@dataclass
class Bench:
    """The device, how thorough to be, the clock, and what was found."""

    device: Device
    quick: bool
    clock: Callable[[], float] = time.perf_counter
    tables: list[Table] = field(default_factory=list)
    targets: list[dict[str, Any]] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)  # of tables 6 and 7

    @property
    def rounds(self) -> int:
        return 3 if self.quick else 7

    def table(self, number: int, title: str, note: str) -> Table:
        print(f"table {number}: {title} ...", file=sys.stderr, flush=True)
        self.tables.append(Table(number, title, note))
        return self.tables[-1]

    def target(self, text: str, measured: float, met: bool, unit: str = "x") -> None:
        self.targets.append({"target": text, "measured": f"{measured:.2f}{unit}", "met": "yes" if met else "no"})


@dataclass(frozen=True)
class Timing:
    ms: float
    spread_percent: float

    def __str__(self) -> str:
        return f"{self.ms:.4g} +- {self.spread_percent:.0f}%"


def processor_seconds() -> float:
    """That all threads of this process have computed, without the system's part."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_utime


def measure(bench: Bench, contestants: Mapping[str, Contestant], seconds: float = 2.0) -> dict[str, Timing]:
    """Medians of rounds in which the contestants take turns, all of it in about `seconds`."""
    repeats, total = {}, 0.0
    for name, contestant in contestants.items():
        contestant.seconds(1)
        once = min(contestant.seconds(1) for _ in range(2))  # of the wall
        repeats[name] = max(1, min(400, round(TURN_S / once)))
        total += once * repeats[name]
    rounds = max(3, min(bench.rounds if bench.quick else 25, int(seconds / total)))
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, contestant in contestants.items():
            time.sleep(PAUSE_S)
            contestant.seconds(1)
            times[name].append(1e3 * contestant.seconds(repeats[name], bench.clock))
    result = {}
    for name, values in times.items():
        low, middle, high = statistics.quantiles(values, n=4)
        result[name] = Timing(middle, 50 * (high - low) / middle)
    return result


def check(what: str, contestant: Contestant, expected: np.ndarray, rows: Any = ..., bound: float = BOUND) -> float:
    """Runs it once; its error, if that is small enough."""
    contestant.run(1)
    contestant.finish()
    actual = floats_of(contestant.result()[rows]).astype(np.float64)
    error = float(np.abs(actual - expected).max() / np.abs(expected).max())
    if not error < bound:
        raise WrongResultError(f"{what} differs from float64 by {error:.1e} of the largest value; expected < {bound}")
    return error


def expected_rows(
    arrays: Sequence[np.ndarray], rows: np.ndarray, score_mod: Any = None, mask_mod: Any = None
) -> np.ndarray:
    """float64 [B, H, rows, D]: attention of some queries, arrays being q, k and v [B, H, L, D]."""
    q, k, v = arrays
    out = np.zeros((*q.shape[:2], len(rows), q.shape[3]))
    keys = np.arange(k.shape[2])[None, :]
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            kv_head = h * k.shape[1] // q.shape[1]
            scores = q[b, h, rows].astype(np.float64) @ k[b, kv_head].T.astype(np.float64) / np.sqrt(q.shape[3])
            if score_mod is not None:
                scores = score_mod(scores, b, h, rows[:, None], keys)
            if mask_mod is not None:
                scores = np.where(mask_mod(b, h, rows[:, None], keys), scores, -np.inf)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[b, h] = weights @ v[b, kv_head].astype(np.float64) / weights.sum(axis=1, keepdims=True)
    return out


def bfloat16_bits(x: np.ndarray) -> np.ndarray:
    """x rounded to bfloat16, as uint16."""
    return (round_bfloat16(x).view(np.uint32) >> 16).astype(np.uint16)


def floats_of(x: np.ndarray) -> np.ndarray:
    """What is bfloat16 if it is uint16, as float32."""
    return (x.astype(np.uint32) << 16).view(np.float32) if x.dtype == np.uint16 else x


def some_rows(length: int) -> np.ndarray:
    return np.unique(np.linspace(0, length - 1, 24).astype(int))


def random_arrays(*shapes: Sequence[int]) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def grid(rows: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table; the columns are those of all rows together, in order."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [columns, ["---"] * len(columns), *([str(row.get(column, "")) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    filled = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
    return "".join(markdown_row(cells) + "\n" for cells in filled)


def markdown(bench: Bench) -> str:
    text = f"Device: {bench.device.entry.label}\n\n"
    for table in bench.tables:
        text += f"### {table.number}. {table.title}\n\n{table.note}\n\n{grid(table.rows)}\n"
    return text + (f"### Targets\n\n{grid(bench.targets)}" if bench.targets else "")


def as_csv(bench: Bench) -> str:
    """One line a cell: table, row, column, value."""
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(("table", "row", "column", "value"))
    for name, rows in [*((str(t.number), t.rows) for t in bench.tables), ("targets", bench.targets)]:
        for i, row in enumerate(rows):
            writer.writerows((name, i, column, value) for column, value in row.items())
    return out.getvalue()


def as_json(bench: Bench) -> str:
    tables = [dataclasses.asdict(table) for table in bench.tables]
    return json_text.dumps({"device": bench.device.entry.label, "tables": tables, "targets": bench.targets}) + "\n"
