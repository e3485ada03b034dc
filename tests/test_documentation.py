"""The pages say what is true: their commands and Python blocks run, and what they name exists.

Every `sh` and `python` block of README.md and docs/guide/ runs on the demo model, but for those behind a line
`<!-- not run: reason -->`, which `test_what_is_not_run_has_a_reason` lists (`pytest -s` shows it).
"""

from __future__ import annotations

import html
import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from llmcl.runtime.platforms import find_devices

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
README = ROOT / "README.md"
GUIDE = [README, *sorted((DOCS / "guide").glob("*.md"))]
NOTES = sorted((ROOT / "notes").glob("*.md"))  # of their day: what they name may be gone
PAGES = [README, ROOT / "CONTRIBUTING.md", *(page for page in sorted(DOCS.rglob("*.md")) if page not in NOTES)]
LANGUAGES = {"sh", "python", "js", "json", "toml", "yaml", "text", "mermaid"}
MAX_NOT_RUN = 20  # more would say that little is tested
QUICK = {"README", "errors"}
TIMEOUT_S = 300  # of a page, kernels compiled anew beside other processes

_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
_NOT_RUN = re.compile(r"<!-- not run: ([^>]+?) -->\n$")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_CODE = re.compile(r"`([^`\n]+)`")
_PATH = re.compile(r"[\w.-]+(?:/[\w.-]+)*(?:/|\.(?:py|cl|md|json|svg|toml|yml))")
_DRAWN = re.compile(r"[a-z_]+/[a-z_/]+\.py")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    text: str
    not_run: str | None  # the reason

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for match in _FENCE.finditer(text):
        before = text[: match.start()]
        reason = _NOT_RUN.search(before)
        yield Block(page, before.count("\n") + 1, match[2], match[3], reason[1] if reason else None)


def run_blocks(language: str) -> list[Block]:
    return [block for page in GUIDE for block in blocks(page) if block.language == language and not block.not_run]


def pages_with(language: str) -> list[Path]:
    return list(dict.fromkeys(block.page for block in run_blocks(language)))


def page_case(page: Path) -> Any:
    """The case of a page whose blocks are run; that of a page whose blocks take seconds is left to the full run."""
    return pytest.param(page, id=page.stem, marks=() if page.stem in QUICK else pytest.mark.slow)


def without_blocks(page: Path) -> str:
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """What a link may name after `#`, as GitHub makes it of headings."""
    headings = _HEADING.findall(without_blocks(page))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.fixture(scope="module")
def cpu() -> str:
    """The name of a CPU device, as the blocks are written for."""
    entry = next((entry for entry in find_devices() if entry.usable and entry.kind == "cpu"), None)
    if entry is None:
        pytest.skip("no CPU device found")
    return str(entry.index)


# ---- what runs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [page_case(page) for page in pages_with("sh")])
def test_commands_run(page: Path, cpu: str, tmp_path: Path) -> None:
    """All commands of a page, one after the other in one shell and an empty folder."""
    commands = [block for block in run_blocks("sh") if block.page == page]
    programs = tmp_path / "bin"
    programs.mkdir()
    llmcl = programs / "llmcl"
    llmcl.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m llmcl "$@"\n')
    llmcl.chmod(0o755)
    variables = {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "LLMCL_DEVICE": cpu}
    folder = tmp_path / "empty"
    folder.mkdir()
    run = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", "".join(block.text for block in commands)],
        capture_output=True,
        text=True,
        encoding="utf-8",
        cwd=folder,
        env={**os.environ, **variables},
        timeout=TIMEOUT_S,
    )
    assert run.returncode == 0, f"{commands[0].name}: exit code {run.returncode}\n{run.stderr}"
    assert run.stdout or any(folder.iterdir())


@pytest.mark.parametrize("page", [page_case(page) for page in pages_with("python")])
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All Python blocks of a page, one after the other with the same names, on the preferred device."""
    code = [block for block in run_blocks("python") if block.page == page]
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": page.stem}
    with redirect_stdout(StringIO()) as printed:
        for block in code:
            source = "\n" * block.line + block.text  # so that a traceback has the page's lines
            exec(compile(source, str(page), "exec", dont_inherit=True), names)  # not with the imports of this file
    assert printed.getvalue()


def test_what_is_not_run_has_a_reason() -> None:
    left_out = [block for page in GUIDE for block in blocks(page) if block.not_run]
    print(f"\n{len(left_out)} blocks are not run:")
    for block in left_out:
        print(f"  {block.name}: {block.not_run}")
    assert len(left_out) <= MAX_NOT_RUN


def test_every_block_says_its_language() -> None:
    for page in GUIDE:
        assert not re.search(r"^    \S", without_blocks(page), re.MULTILINE), f"{page}: a block without a fence"
        for block in blocks(page):
            assert block.language in LANGUAGES, f"{block.name}: {block.language!r}"


# ---- what is named ------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [*PAGES, *NOTES], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in _LINK.findall(without_blocks(page)):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link}"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{page.name}: {link}; there are {sorted(anchors(target))}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_exist(page: Path) -> None:
    for path in _CODE.findall(without_blocks(page)):
        # A path has a folder of the repository; the others are files of a user or of the page's example.
        if _PATH.fullmatch(path) and path.split("/")[0] in {"llmcl", "tests", "scripts", "docs"}:
            assert (ROOT / path).exists(), f"{page.name}: {path}"


def test_drawings_name_files_that_exist() -> None:
    drawn = [path for page in PAGES for b in blocks(page) if b.language == "mermaid" for path in _DRAWN.findall(b.text)]
    assert drawn and all((ROOT / "llmcl" / path).exists() for path in drawn), drawn


def test_pages_that_code_names_exist() -> None:
    sources = [ROOT / "Makefile", ROOT / "pyproject.toml"]
    for folder in ("llmcl", "scripts", "tests"):
        sources += [path for path in (ROOT / folder).rglob("*") if path.suffix in {".py", ".cl"}]
    for source in sources:
        for name in re.findall(r"(?<![\w/])docs/[\w/]+\.md", source.read_text(encoding="utf-8")):
            assert (ROOT / name).exists(), f"{source.relative_to(ROOT)} names {name}"


def test_the_architecture_names_every_folder() -> None:
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "llmcl").rglob("*.py")} - {Path("llmcl")}
    assert [f"{folder}/" for folder in sorted(folders) if f"`{folder.as_posix()}/`" not in text] == []


def test_the_readme_is_short() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120
    assert "docs/index.md" in _LINK.findall(text)


def test_the_index_names_every_page() -> None:
    index = DOCS / "index.md"
    linked = set(_LINK.findall(index.read_text(encoding="utf-8")))
    for page in [*(DOCS / "guide").glob("*.md"), *(DOCS / "design").glob("*.md"), *DOCS.glob("*.md")]:
        assert page == index or page.relative_to(DOCS).as_posix() in linked, f"{page.name} is not in docs/index.md"


def test_the_readme_counts_the_lines_of_families() -> None:
    """The README links family declarations and says how long they are."""
    text = README.read_text(encoding="utf-8")
    claims = re.findall(r"\((llmcl/architectures/families/\w+\.py)\)[\w ]*?(\d+)", text.replace("\n", " "))
    assert len(claims) == 2
    for path, lines in claims:
        assert len((ROOT / path).read_text(encoding="utf-8").splitlines()) == int(lines), path


def test_terms_are_defined_once() -> None:
    terms = re.findall(r"^\| \*\*(.+?)\*\* \|", (DOCS / "glossary.md").read_text(encoding="utf-8"), re.MULTILINE)
    words = [word for term in terms for word in term.split(", ")]
    assert len(words) == len(set(words)) > 20


# ---- results ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plots() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts" / "plot_results.py"))


def test_every_result_says_where_it_is_from_and_is_shown(plots: dict[str, Any]) -> None:
    text = (DOCS / "performance.md").read_text(encoding="utf-8")
    results = plots["read_results"]()
    for name, result in results.items():
        assert all((result.device, result.driver, result.command, result.notes)), name
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", result.date), name
        assert f"<!-- table: {name} -->" in text and f"(images/{name}.svg)" in text, name
    charts = {path.stem for path in (DOCS / "images").glob("*.svg")}
    assert charts == {*results, "speed", "streaming"}


def test_tables_are_those_of_the_results(plots: dict[str, Any]) -> None:
    results = plots["read_results"]()
    for page in plots["PAGES"]:
        text = page.read_text(encoding="utf-8")
        assert plots["with_tables"](text, results) == text, f"{page.name}: run scripts/plot_results.py"


def test_charts_are_those_of_the_results(plots: dict[str, Any]) -> None:
    """Each chart has the title and every figure of its result, as text."""
    for name, result in plots["read_results"]().items():
        chart = (DOCS / "images" / f"{name}.svg").read_text(encoding="utf-8")
        for panel in result.panels:
            for value in (value for values in panel.series.values() for value in values):
                assert f">{value:g}<" in chart, f"{name}: {value:g} is not in the chart; run scripts/plot_results.py"


def test_no_chart_has_two_series_of_one_color(plots: dict[str, Any]) -> None:
    for name, result in plots["read_results"]().items():
        series = list(dict.fromkeys(series for panel in result.panels for series in panel.series))
        shades = plots["colors"](series)
        assert list(shades) == series and len(set(shades.values())) == len(series), f"{name}: {shades}"
        chart = (DOCS / "images" / f"{name}.svg").read_text(encoding="utf-8")
        for color in shades.values():
            assert f"fill: {color}" in chart, f"{name}: run scripts/plot_results.py"


def test_no_legend_lies_over_a_title(plots: dict[str, Any]) -> None:
    """The texts of a legend are in lines below the title and above the panels' names."""
    for name, result in plots["read_results"]().items():
        chart = (DOCS / "images" / f"{name}.svg").read_text(encoding="utf-8")
        texts = re.findall(r'<text[^>]* y="([\d.]+)"[^>]*>([^<]*)</text>', chart)
        heights = {html.unescape(text): float(y) for y, text in texts}
        for series in {series for panel in result.panels for series in panel.series}:
            if series in heights:  # a chart of one series has no legend
                names = [y for text, y in heights.items() if text.endswith(" is better)")]
                assert heights[result.title] + 8 < heights[series] < min(names) - 8, f"{name}: {series}"


def test_the_picture_shows_the_command_of_the_readme() -> None:
    command = runpy.run_path(str(ROOT / "scripts" / "picture.py"))["COMMAND"]
    assert f"\n{command}\n" in README.read_text(encoding="utf-8")
    picture = html.unescape((DOCS / "images" / "streaming.svg").read_text(encoding="utf-8")).replace("\xa0", " ")
    assert f"$ {command}<" in picture, "run scripts/picture.py"


def test_a_wrong_result_is_refused(plots: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "half.json").write_text('{"title": "half"}')
    monkeypatch.setitem(plots["read_results"].__globals__, "RESULTS", tmp_path)
    with pytest.raises(ValueError, match=r"half\.json is no result"):
        plots["read_results"]()


@pytest.mark.parametrize("peer", [0.88, 14000.0, 0.0])
def test_a_result_with_figures_of_another_column_is_refused(
    plots: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, peer: float
) -> None:
    """As where shares stand for a peer's tokens a second."""
    about = dict.fromkeys(("title", "device", "driver", "date", "command", "notes"), "-")
    panel = {"name": "decode", "unit": "tokens/s", "higher_is_better": True, "rows": ["Llama", "Qwen3"]}
    panels = [panel | {"series": {"llmcl": [274.1, 267.9], "llama.cpp": [150.0, peer]}}]
    (tmp_path / "shifted.json").write_text(json.dumps(about | {"panels": panels}))
    monkeypatch.setitem(plots["read_results"].__globals__, "RESULTS", tmp_path)
    with pytest.raises(ValueError, match=r"shifted\.json: 'decode', Qwen3 has 267\.9 for llmcl and .* llama\.cpp"):
        plots["read_results"]()
