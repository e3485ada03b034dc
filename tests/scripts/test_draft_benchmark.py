"""scripts/draft_benchmark.py: as many drafts are right as it was told to make right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import draft_benchmark
import pytest
from programs import TINY_SHAPE, Run

from llmcl.runtime.device import Device

pytestmark = pytest.mark.usefixtures("separate_launches_in_module")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_drafts_are_right_as_often_as_is_set(
    dtype: str,
    default_device: Device,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, layers in (("model-1.8b", 2), ("model-1.1b", 1)):  # names that differ behind a dot
        (tmp_path / name).write_text(json.dumps({**TINY_SHAPE, "num_hidden_layers": layers}))
    loaded = []
    load = draft_benchmark.load_random

    def noted(shape: str, **options: Any) -> Any:
        loaded.append(load(shape, **options))
        return loaded[-1]

    monkeypatch.setattr(draft_benchmark, "load_random", noted)
    sizes: dict[str, Any] = {"length": 1, "n_gen": 200, "rounds": 1, "agreement": (0.0, 0.7, 1.0)}
    names = [str(tmp_path / name) for name in ("model-1.8b", "model-1.1b")]
    draft_benchmark.draft_benchmark(*names, **sizes, dtype=dtype, device=str(default_device.entry.index))
    assert [llm.config.n_layers for llm in loaded] == [2, 1]
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
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
