#!/usr/bin/env python
"""Draws docs/images/ from docs/results/*.json, and writes the tables of docs/performance.md.

A result has a title, device, driver, date, command (how to measure it again), notes and panels. A panel has a name, a
unit, whether higher is better, the names of its rows, and for each series a value a row. Where a page says
`<!-- table: NAME -->`, the lines up to `<!-- end -->` are the table of docs/results/NAME.json; `speed` has the figures
of the README's chart. With --check nothing is written: the exit code is 1 if a table is not that of its result.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmcl.cli.command import run_script
from llmcl.errors import UsageError
from llmcl.tools import markdown

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROOT = Path(__file__).resolve().parent.parent
RESULTS, IMAGES = ROOT / "docs" / "results", ROOT / "docs" / "images"
NO_MEASUREMENT = "compilers.json"  # tests/check_compilers.py writes it, and the tables of its page
PAGES = (ROOT / "docs" / "performance.md",)
SPEED = "speed"  # the chart of the README and its table: llmcl beside the best peer of each test
SPEED_ROWS = (  # label, result, panel, row, peer
    ("H200, 1B bf16, decode", "h200_llama_cpp", 0, 0, "llama.cpp"),
    ("H200, 8B bf16, decode", "h200_llama_cpp", 0, 1, "llama.cpp"),
    ("H200, 8B Q4_0, decode", "h200_llama_cpp", 0, 3, "llama.cpp"),
    ("H200, 1B bf16, prefill", "h200_pytorch", 1, 1, "PyTorch compiled"),
    ("H200, 8B bf16, prefill", "h200_llama_cpp", 1, 1, "llama.cpp"),
    ("H200, 8B Q4_0, prefill", "h200_llama_cpp", 1, 2, "llama.cpp"),
    ("2-core Zen 4, 135M BF16, decode", "cpu_llama_cpp", 0, 3, "llama.cpp"),
    ("2-core Zen 4, 135M Q8_0, decode", "cpu_llama_cpp", 0, 2, "llama.cpp"),
    ("2-core Zen 4, 135M BF16, prefill", "cpu_llama_cpp", 2, 3, "llama.cpp"),
    ("2-core Zen 5, 135M Q4_0, decode", "cpu_zen5_peers", 0, 0, "llama.cpp"),
    ("2-core Zen 5, 135M Q4_0, prefill", "cpu_zen5_peers", 2, 0, "llama.cpp"),
)

INK, PAPER = "#24292f", "#ffffff"
OURS = "llmcl"
SHADES = {OURS: ("#0969da", "#80b9f2", "#033d8b"), "llama.cpp": ("#8c959f", "#c4cad1")}  # by the first word of a name
OTHER_COLORS = ("#1a7f64", "#d9a441", "#9a6fb0", "#cf222e", "#57606a")
GAP = 0.8  # between the bars of two rows, where a bar is 1
MOST_TIMES = 50  # as fast as a peer, or as slow: beyond it a figure of a result is from elsewhere
MARK = re.compile(r"<!-- table: (\w+) -->\n.*?<!-- end -->", re.DOTALL)


@dataclass(frozen=True)
class Panel:
    name: str
    unit: str
    higher_is_better: bool
    rows: list[str]
    series: dict[str, list[float]]

    def ratio(self, row: int, peer: str) -> float:
        """How many times as fast llmcl is as `peer`; a panel in times holds just that."""
        if self.unit == "times":
            return self.series[peer][row]
        ours, theirs = self.series[OURS][row], self.series[peer][row]
        return ours / theirs if self.higher_is_better else theirs / ours

    @property
    def first_peer(self) -> str | None:
        """Whom llmcl's speed is compared with; None where nobody's is."""
        if OURS not in self.series or self.unit == "%":
            return None
        return next((name for name in self.series if name != OURS), None)


@dataclass(frozen=True)
class Result:
    title: str
    device: str
    driver: str
    date: str
    command: str
    notes: str
    panels: list[Panel]


def read_results() -> dict[str, Result]:
    """Every result by its name. Raises UsageError for a file that is none, naming it."""
    results = {}
    for path in sorted(RESULTS.glob("*.json")):
        if path.name == NO_MEASUREMENT:
            continue
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            result = Result(**values | {"panels": [Panel(**panel) for panel in values["panels"]]})
        except (ValueError, TypeError, KeyError) as error:
            raise UsageError(
                f"{path} is no result ({error!r}); the head of scripts/plot_results.py says what is"
            ) from error
        for panel in result.panels:
            if any(len(values) != len(panel.rows) for values in panel.series.values()):
                raise UsageError(f"{path}: {panel.name!r} has {len(panel.rows)} rows, and a series of another length")
            check_ratios(path, panel)
        results[path.stem] = result
    return results


def check_ratios(path: Path, panel: Panel) -> None:
    """Raises UsageError where llmcl would be MOST_TIMES as fast as a peer, or as slow: a figure of another column."""
    if panel.first_peer is None:
        return
    for peer in panel.series.keys() - {OURS}:
        for i, row in enumerate(panel.rows):
            values = [panel.series[name][i] for name in (OURS, peer)]
            if min(values) <= 0 or not 1 / MOST_TIMES <= panel.ratio(i, peer) <= MOST_TIMES:
                raise UsageError(
                    f"{path}: {panel.name!r}, {row} has {values[0]:g} for {OURS} and {values[1]:g} for {peer} "
                    f"({panel.unit}); expected a ratio of at most {MOST_TIMES}: see which column each figure is from"
                )


# ---- tables -----------------------------------------------------------------------------------------------


def table(result: Result) -> str:
    """A line for each row of each panel, and how many times as fast llmcl is as the first of its peers."""
    names = list(dict.fromkeys(name for panel in result.panels for name in panel.series))
    compared = next((panel.first_peer for panel in result.panels if panel.first_peer), None)
    header = ["", *names, "unit", *([f"speed over {compared}'s"] if compared else [])]
    rows = []
    for panel in result.panels:
        for i, row in enumerate(panel.rows):
            values = [f"{panel.series[name][i]:g}" if name in panel.series else "" for name in names]
            ratio = [f"{panel.ratio(i, compared):.2f}x"] if compared else []
            rows.append([f"{panel.name}, {row}", *values, panel.unit, *ratio])
    origin = f"{result.device[0].upper()}{result.device[1:]}; {result.driver}; {result.date}. {result.notes}"
    lines = markdown.table("l" + "r" * len(names) + "l" + ("r" if compared else ""), header, rows)
    return "\n".join([*lines, "", origin, "", "```text", result.command, "```"])


def speed_table(results: dict[str, Result]) -> str:
    """Return the table behind the README's chart: a line for each of SPEED_ROWS."""
    rows = []
    for label, name, panel_number, row, peer in SPEED_ROWS:
        panel = results[name].panels[panel_number]
        times = panel.unit == "times"
        values = (
            ["", peer, ""]
            if times
            else [f"{panel.series[OURS][row]:g}", f"{panel.series[peer][row]:g} ({peer})", panel.unit]
        )
        rows.append([label, *values, f"**{panel.ratio(row, peer):.1f}x**"])
    return "\n".join(markdown.table("lrrlr", ["", OURS, "best peer", "", "faster by"], rows))


def with_tables(text: str, results: dict[str, Result]) -> str:
    """A page with the tables that it marks renewed. Raises UsageError for a mark without a result."""

    def renewed(match: re.Match[str]) -> str:
        name = match[1]
        if name != SPEED and name not in results:
            raise UsageError(f"a page asks for the table {name}; there are {', '.join([SPEED, *results])}")
        body = speed_table(results) if name == SPEED else table(results[name])
        return f"<!-- table: {name} -->\n{body}\n<!-- end -->"

    return MARK.sub(renewed, text)


# ---- charts -----------------------------------------------------------------------------------------------


def colors(names: list[str]) -> dict[str, str]:
    """Return a color for each series of a chart: shades of blue for llmcl, of grey for llama.cpp, no color twice."""
    left = {prefix: list(shades) for prefix, shades in SHADES.items()}
    others = list(OTHER_COLORS)
    return {name: (left.get(name.split()[0]) or others).pop(0) for name in names}


def draw(result: Result, path: Path) -> None:
    """Draw the panels side by side, with horizontal bars that are equally thick in all of them."""
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    slots = max(len(panel.rows) * (len(panel.series) + GAP) for panel in result.panels)
    width, height = max(7.0, 4.4 * len(result.panels)), 1.7 + 0.22 * slots
    figure, axes = plt.subplots(1, len(result.panels), figsize=(width, height), squeeze=False)
    names = list(dict.fromkeys(name for panel in result.panels for name in panel.series))
    shades = colors(names)
    for axis, panel in zip(axes[0], result.panels, strict=True):
        bars(axis, panel, slots, shades)
    figure.suptitle(result.title, x=0.07 / width, y=1 - 0.08 / height, ha="left", va="top", fontweight="bold")
    if len(names) > 1:
        handles = [Patch(color=shades[name]) for name in names]
        at = (0, 1 - 0.3 / height)  # in a line of its own below the title
        figure.legend(handles, names, loc="upper left", bbox_to_anchor=at, ncols=len(names), frameon=False, fontsize=8)
    origin = f"{result.device}; {result.driver}; {result.date}"
    figure.text(0.07 / width, 0.07 / height, origin, fontsize=7, color="#6e7781")
    figure.tight_layout(rect=(0, 0.2 / height, 1, 1 - (0.45 if len(names) > 1 else 0.22) / height))
    _save(figure, path)


def bars(axis: Axes, panel: Panel, slots: float, shades: dict[str, str]) -> None:
    """Draw the bars of a panel. The axis has room for `slots` bars, whether the panel fills it or not."""
    a_row = len(panel.series) + GAP
    for n, (name, values) in enumerate(panel.series.items()):
        at = [i * a_row + n for i in range(len(panel.rows))]
        drawn = axis.barh(at, values, 0.92, color=shades[name])
        axis.bar_label(drawn, labels=[f"{value:g}" for value in values], padding=2, fontsize=8)
    axis.set_yticks([i * a_row + (len(panel.series) - 1) / 2 for i in range(len(panel.rows))], panel.rows)
    axis.set_ylim(slots - GAP / 2 - 0.5, -GAP / 2 - 0.5)
    better = "higher" if panel.higher_is_better else "lower"
    axis.set_title(f"{panel.name}, {panel.unit} ({better} is better)", fontsize=9, loc="left")
    axis.margins(x=0.16)
    axis.locator_params(axis="x", nbins=5)
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines["left"].set_bounds(-GAP / 2 - 0.5, len(panel.rows) * a_row - GAP / 2 - 0.5)


def draw_speed(results: dict[str, Result], path: Path) -> None:
    """How many times as fast as the best peer: a bar for each of SPEED_ROWS."""
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 0.6 + 0.32 * len(SPEED_ROWS)))
    for i, (label, name, panel_number, row, peer) in enumerate(SPEED_ROWS):
        ratio = results[name].panels[panel_number].ratio(row, peer)
        color = SHADES[OURS][0] if label.startswith(SPEED_ROWS[0][0][:4]) else OTHER_COLORS[0]
        drawn = axis.barh(i, ratio, 0.7, color=color)
        axis.bar_label(drawn, labels=[f"{ratio:.1f}x  {peer}"], padding=3, fontsize=8)
    axis.set_yticks(range(len(SPEED_ROWS)), [label for label, *_ in SPEED_ROWS])
    axis.invert_yaxis()
    axis.axvline(1, color=INK, linewidth=1)
    axis.margins(x=0.25, y=0.01)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_xlabel("speed of llmcl over that of the fastest other engine measured there (the line: equally fast)")
    figure.tight_layout()
    _save(figure, path)


def _save(figure: object, path: Path) -> None:
    import matplotlib.pyplot as plt

    # Without a date and with fixed names an unchanged chart is an unchanged file.
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=130)  # type: ignore[attr-defined]
    plt.close("all")


def plot_results(
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; say which tables are not their result's.")
    ] = False,
    format: Annotated[str, typer.Option("--format", metavar="svg|png", help="Of the charts.")] = "svg",
    output: Annotated[
        Path,
        typer.Option(
            "-o",
            "--output-dir",
            metavar="FOLDER",
            help="Where the charts are written; left out: docs/images.",
            show_default=False,
        ),
    ] = IMAGES,
) -> None:
    """Draw the charts of docs/results/*.json (needs the extra `plot`), and renew the tables of the pages."""
    results = read_results()
    stale = [
        page for page in PAGES if with_tables(page.read_text(encoding="utf-8"), results) != page.read_text("utf-8")
    ]
    if check:
        for page in stale:
            print(f"{page.relative_to(ROOT)}: a table is not that of its result; run scripts/plot_results.py")
        raise typer.Exit(1 if stale else 0)
    for page in stale:
        page.write_text(with_tables(page.read_text(encoding="utf-8"), results), encoding="utf-8")
    try:
        import matplotlib
    except ImportError as error:
        raise UsageError('matplotlib is missing, which draws the charts; pip install ".[plot]"') from error
    matplotlib.use("Agg")
    matplotlib.rc("svg", hashsalt="llmcl", fonttype="none")
    matplotlib.rc("font", family="sans-serif", size=9)
    matplotlib.rc("figure", facecolor=PAPER)
    matplotlib.rc("axes", edgecolor="#8c959f")
    matplotlib.rc("text", color=INK)
    output.mkdir(parents=True, exist_ok=True)
    for name, result in results.items():
        draw(result, output / f"{name}.{format}")
    draw_speed(results, output / f"{SPEED}.{format}")
    print(f"{len(results) + 1} charts in {output}", file=sys.stderr)


if __name__ == "__main__":
    run_script(plot_results)
