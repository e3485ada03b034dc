"""The Python blocks of docs/guide/server.md, run as they stand against a server."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fake_server import Running

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "server.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.split()[1])
def test_the_block_runs(block: str, shared: Running, capsys: pytest.CaptureFixture[str]) -> None:
    address = "http://127.0.0.1:8080"
    assert address in block
    exec(compile(block.replace(address, shared.url), str(GUIDE), "exec"), {})
    assert capsys.readouterr().out.strip() == "Why is the sky b"  # the fake engine repeats, 16 bytes of it


def test_there_are_blocks() -> None:
    assert len(BLOCKS) == 2
