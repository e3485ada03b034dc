"""The Python and JavaScript blocks of docs/guide/server.md, run as they stand against a server."""

from __future__ import annotations

import re
from pathlib import Path

import node_clients
import pytest
from fake_server import Running

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "server.md"
ADDRESS = "http://127.0.0.1:8080"
SAID = "Why is the sky b"  # the fake engine repeats, 16 bytes of it


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", GUIDE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("block", blocks("python"), ids=lambda block: block.split()[1])
def test_the_python_block_runs(block: str, shared: Running, capsys: pytest.CaptureFixture[str]) -> None:
    assert ADDRESS in block
    exec(compile(block.replace(ADDRESS, shared.url), str(GUIDE), "exec"), {})
    assert capsys.readouterr().out.strip() == SAID


@pytest.mark.skipif(node_clients.why_not() is not None, reason=str(node_clients.why_not()))
@pytest.mark.parametrize("block", blocks("js"), ids=lambda block: block.split()[1])
def test_the_javascript_block_runs(block: str, shared: Running) -> None:
    assert ADDRESS in block
    assert node_clients.run_script(block.replace(ADDRESS, shared.url)).strip() == SAID


def test_there_are_blocks() -> None:
    assert len(blocks("python")) == len(blocks("js")) == 2
