"""The notebooks of docs/examples/ run from the first cell to the last, and their links lead somewhere."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "docs" / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


def cells(path: Path, kind: str) -> list[str]:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == kind]


def test_there_is_one() -> None:
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_runs(
    path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The code runs in IPython, the program behind a notebook's kernel."""
    from IPython.core.interactiveshell import InteractiveShell

    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    shell = InteractiveShell.instance()
    try:
        for code in cells(path, "code"):
            shell.run_cell(code).raise_error()
        values: dict[str, Any] = shell.user_ns
        assert len(values["tbt_ms"]) == values["stats"].generated_tokens - 1 > 10
        axis = values["figure"].axes[0]
        assert [bar.get_height() for bar in axis.patches] == values["tbt_ms"]
        assert "tokens/s" in capsys.readouterr().out
    finally:
        values["plt"].close("all")
        InteractiveShell.clear_instance()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_links_lead_somewhere(path: Path) -> None:
    links = [link for text in cells(path, "markdown") for link in re.findall(r"\]\(([^)\s]+)\)", text)]
    assert links
    for link in links:
        assert "://" in link or (EXAMPLES / link).exists(), link


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_no_output_is_kept(path: Path) -> None:
    """An output of one machine would be taken for what the reader should see."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook["cells"])
