"""scripts/compare_launches.py: its table. What it compares is in tests/kernels/test_persistent_step.py."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import compare_launches
import pytest
from programs import Run


def test_a_row_for_each_depth(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    llm = SimpleNamespace(device=None, weight_bytes_per_token=10**8, kv_bytes_per_position=0)
    monkeypatch.setattr(compare_launches, "load", lambda *args, **settings: nullcontext(llm))
    monkeypatch.setattr(compare_launches, "read_bandwidth", lambda device: 2e10)
    monkeypatch.setattr(compare_launches, "first_token_s", lambda model, device: 0.5)
    steps = {0: ([0.01, 0.01, 0.01], [0.011, 0.012, 0.013]), 16: ([0.02] * 3, [0.02] * 3)}
    monkeypatch.setattr(compare_launches, "rounds", lambda llm, depth: steps[depth])
    compare_launches.compare_launches(["folder/small"], (0, 16))
    head, rule, *rows = capsys.readouterr().out.splitlines()
    assert head.count("|") == rule.count("|")
    assert rows == [
        "| small | 0 | 100.0 | 83.3 | 1.20 (1.10 - 1.30) | 50.0% | 0.50 s |",
        "| small | 16 | 50.0 | 50.0 | 1.00 (1.00 - 1.00) | 25.0% | 0.50 s |",
    ]


def test_an_unknown_model_is_named_once(run_here: Run) -> None:
    done = run_here("compare_launches.py", "-m", "nosuch")
    assert done.returncode == 6 and done.stderr.count("error: nosuch") == 1, done.stderr
