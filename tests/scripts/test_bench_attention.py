"""The attention benchmark and the example: they run, what they say is checked, and wrong results are no figures."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from programs import Run, run_script

from llmcl.runtime.device import Device


@pytest.mark.slow
def test_tables_in_every_format(default_device: Device, run_here: Run, tmp_path: Path) -> None:
    files = [tmp_path / f"out.{kind}" for kind in ("md", "csv", "json")]
    outputs = [
        x for flag, file in zip(("--markdown", "--csv", "--json"), files, strict=True) for x in (flag, str(file))
    ]
    device = str(default_device.entry.index)
    done = run_here("bench_attention.py", "--quick", "-t", "1,4,7", "--device", device, *outputs)
    assert done.returncode == 0, done.stderr
    text = files[0].read_text()
    assert text == done.stdout
    assert all(
        name in text for name in ("host fallback", "three-phase", "ours, float16 KV", "A100 reference", "unfused")
    )
    result: dict[str, Any] = json.loads(files[2].read_text())
    assert [table["number"] for table in result["tables"]] == [1, 4, 7]
    assert [len(table["rows"]) for table in result["tables"]] == [8, 2, 2]
    cells = list(csv.DictReader(files[1].open()))
    assert {(c["table"], c["column"]) for c in cells} >= {("1", "ms a layer"), ("4", "ratio")}


@pytest.mark.slow
def test_a_result_for_the_charts(
    default_device: Device, run_here: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the table that it is of, the one that takes longest: PyTorch compiles its own kernels for it."""
    from plot_results import Panel, Result, table

    file, tables, device = tmp_path / "result.json", tmp_path / "tables.json", str(default_device.entry.index)
    outputs = ["--result", str(file), "--json", str(tables)]
    monkeypatch.setattr("torch._inductor.config.compile_threads", 1)  # it would start processes that import PyTorch
    done = run_here("bench_attention.py", "--quick", "-t", "6", "--device", device, *outputs)
    assert done.returncode == 0, done.stderr
    assert [(table["number"], len(table["rows"])) for table in json.loads(tables.read_text())["tables"]] == [(6, 2)]
    values = json.loads(file.read_text())
    result = Result(**values | {"panels": [Panel(**panel) for panel in values["panels"]]})
    lines = table(result).splitlines()
    assert lines[2].startswith("| a call, causal | ") and result.command.endswith(f"--device {device} -t 6")
    first = result.panels[0]
    assert first.rows == ["causal", "ALiBi, causal"] and min(map(min, first.series.values())) > 0
    assert "scaled_dot_product_attention takes" in result.notes


def test_visible_pairs() -> None:
    from attention_bench.results import visible_pairs

    from llmcl.attention import masks

    assert visible_pairs(None, 300) == 300 * 300 and visible_pairs(masks.causal, 300) == 300 * 301 // 2
    assert visible_pairs(masks.sliding_window(2), 300) == 2 * 300 - 1


def test_refusals(run_here: Run, tmp_path: Path) -> None:
    for arguments, message in [
        (["-t", "8"], "1 to 7"),
        (["--csv", "/no/such/folder/x"], "cannot be written"),
        (["--result", str(tmp_path / "x")], "expected one of them: -t 6,7"),
    ]:
        done = run_here("bench_attention.py", *arguments)
        assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


def test_a_wrong_result_is_no_figure() -> None:
    from attention_bench.baselines import Contestant
    from attention_bench.measuring import WrongResultError, check, expected_rows

    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 2, 8, 16)) for _ in range(3))
    right = expected_rows((q, k, v), np.arange(8))

    def contestant(result: np.ndarray) -> Contestant:
        return Contestant(lambda k: None, lambda: None, lambda: result)

    assert check("right", contestant(right.astype(np.float32)), right) < 1e-6
    for wrong in (right + 0.01, np.where(right == right[0, 0, 0, 0], np.nan, right)):
        with pytest.raises(WrongResultError, match="differs from float64"):
            check("wrong", contestant(wrong), right)


@pytest.mark.slow
def test_the_example_changes_the_answers_of_the_demo_model(default_device: Device) -> None:
    done = run_script("examples/custom_attention.py", "--device", str(default_device.entry.index), "-n", "16")
    assert done.returncode == 0, done.stderr
    answers = [line for line in done.stdout.splitlines() if line.startswith("    ")]
    assert len(answers) == 4 and len(set(answers)) == 4, done.stdout
    assert "Paris" in answers[0]
