"""What a new user types in the first minutes (first_minutes.py)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

if sys.platform == "win32":
    pytest.skip("no pseudo-terminals", allow_module_level=True)

from first_minutes import N_COMMANDS, type_all


def test_there_are_many() -> None:
    assert N_COMMANDS >= 60


@pytest.mark.parametrize("groups", [("start",), pytest.param(("usage", "hub", "answers"), marks=pytest.mark.slow)])
def test_the_first_minutes(groups: tuple[str, ...], tmp_path: Path) -> None:
    assert type_all(tmp_path, groups) == []
