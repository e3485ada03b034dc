"""scripts/draft_benchmark.py: as many drafts are right as it was told to make right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from programs import TINY_SHAPE, Run

from llmcl.runtime.device import Device


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.full)])
def test_drafts_are_right_as_often_as_is_set(dtype: str, default_device: Device, tmp_path: Path, run_here: Run) -> None:
    for name in ("large", "small"):
        (tmp_path / f"{name}.json").write_text(json.dumps(TINY_SHAPE))
    shapes = ["--random", str(tmp_path / "large.json"), "--draft", str(tmp_path / "small.json")]
    options = ["--length", "1", "-n", "200", "-r", "1", "--dtype", dtype, "--device", str(default_device.entry.index)]
    done = run_here("draft_benchmark.py", *shapes, *options, "--agreement", "0,0.7,1")
    assert done.returncode == 0, done.stderr
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines()[2:]]
    accepted = [float(cells[4].rstrip("%")) for cells in rows]
    assert accepted[0] == 0 and accepted[2] == 100 and 55 < accepted[1] < 85
    assert [float(cells[5]) for cells in rows][::2] == pytest.approx([1.0, 2.0], abs=0.02)  # the last draft is cut


def test_refusals(run_here: Run) -> None:
    for options, message in (
        (["--agreement", "1.5"], "expected numbers from 0 to 1, separated by commas"),
        (["--dtype", "q4_0"], "--dtype is q4_0; expected bfloat16, float16 or float32"),
    ):
        done = run_here("draft_benchmark.py", *options)
        assert done.returncode != 0 and message in done.stderr
