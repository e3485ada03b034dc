"""What a new user types in the first minutes (first_minutes.py)."""

from __future__ import annotations

from pathlib import Path

from first_minutes import COMMANDS, type_all


def test_the_first_minutes(tmp_path: Path) -> None:
    assert len(COMMANDS) >= 40
    assert type_all(tmp_path) == []
