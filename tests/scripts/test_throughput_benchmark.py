"""The benchmark of several sequences: its arithmetic, its formats, and a run of the script."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from pathlib import Path

import arrivals
import pytest
from programs import TINY_SHAPE, Run, run_script

from llmcl.tools import throughput
from llmcl.tools.rows import format_rows
from llmcl.tools.throughput import ThroughputRow

pytestmark = pytest.mark.usefixtures("separate_launches_in_module")

ROWS = [
    ThroughputRow(
        "m", "d", "bfloat16", "float16", 128, 32, pl, pl * 160, 0.5, pl * 256.0, 0.64, pl * 50.0, 1.14, 1.0, 20.0, share
    )
    for pl, share in ((1, 0.5), (8, None))
]


def test_formats() -> None:
    table = format_rows(ROWS, "md", throughput.markdown).splitlines()
    cells = [cell.strip() for cell in table[2].strip("|").split("|")]
    assert [cell.strip() for cell in table[0].strip("|").split("|")][3:11] == [
        "PP", "TG", "PL", "N_KV", "T_PP s", "S_PP t/s", "T_TG s", "S_TG t/s"
    ]  # fmt: skip
    assert cells[3:11] == ["128", "32", "1", "160", "0.500", "256.0", "0.640", "50.0"] and cells[-1] == "50.0%"
    assert table[3].strip("|").split("|")[-1].strip() == ""
    read = list(csv.DictReader(io.StringIO(format_rows(ROWS, "csv", throughput.markdown))))
    assert [row["pl"] for row in read] == ["1", "8"] and read[0]["s_tg"] == "50.0"
    objects = json.loads(format_rows(ROWS, "json", throughput.markdown))
    assert objects == [json.loads(line) for line in format_rows(ROWS, "jsonl", throughput.markdown).splitlines()]
    assert objects[1]["bandwidth_share"] is None


@pytest.mark.slow
def test_script(tmp_path: Path, run_here: Run) -> None:
    shape, output, picture = tmp_path / "config.json", tmp_path / "rows.jsonl", tmp_path / "plot.png"
    shape.write_text(json.dumps(TINY_SHAPE))
    sizes = ["-p", "20", "-n", "5", "-b", "1,3", "-r", "1"]
    files = ["--format", "jsonl", "-o", str(output), "--plot", str(picture)]
    done = run_here("llmcl", "bench", "--random", str(shape), *sizes, *files)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(row["pl"], row["n_kv"]) for row in rows] == [(1, 25), (3, 75)]
    for row in rows:
        assert row["s_pp"] == pytest.approx(row["pl"] * 20 / row["t_pp"])
        assert row["s_tg"] == pytest.approx(row["pl"] * 5 / row["t_tg"])
        assert row["ms_per_step"] == pytest.approx(200 * row["t_tg"])
        assert 0 < row["bandwidth_share"] < 1
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_script_with_chunks(tmp_path: Path, run_here: Run) -> None:
    shape, output = tmp_path / "config.json", tmp_path / "rows.jsonl"
    shape.write_text(json.dumps(TINY_SHAPE))
    sizes = ["-npp", "20", "-npl", "2,3", "--chunk", "5,17", "-r", "1"]
    done = run_here("throughput_benchmark.py", "--random", str(shape), *sizes, "--format", "jsonl", "-o", str(output))
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(row["pl"], row["chunk"]) for row in rows] == [(2, 5), (2, 17), (3, 5), (3, 17)]
    assert all(row["ms_per_step"] > 0 and row["ms_without"] > 0 for row in rows)
    refused = run_here("throughput_benchmark.py", "--random", str(shape), "--chunk", "5", "--rate", "1")
    assert refused.returncode != 0 and "--rate or --chunk" in refused.stderr


@pytest.mark.slow
def test_script_with_arrivals(tmp_path: Path) -> None:
    shape, output, picture = tmp_path / "config.json", tmp_path / "rows.jsonl", tmp_path / "plot.svg"
    shape.write_text(json.dumps(TINY_SHAPE))
    sizes = ["--rate", "20,200", "-npp", "20", "-ntg", "6", "-npl", "4", "--requests", "9", "--streams", "1"]
    files = ["--format", "jsonl", "-o", str(output), "--plot", str(picture)]
    done = run_script("throughput_benchmark.py", "--random", str(shape), *sizes, *files)
    assert done.returncode == 0, done.stderr
    assert "TTFT p50/p90/p99 ms" in done.stderr
    for row in (json.loads(line) for line in output.read_text().splitlines()):
        assert row["complete"] == row["requests"] == 9 and row["streams"] == 1
        for times in (row["ttft_ms"], row["queue_ms"], row["tbt_ms"]):
            assert 0 <= times["p50"] <= times["p90"] <= times["p99"]
        assert row["ttft_ms"]["p50"] >= row["queue_ms"]["p50"]
        assert row["tbt_ratio"] == pytest.approx(row["tbt_ms"]["p99"] / row["tbt_ms"]["p50"])
        assert row["rows_per_step"] >= 1 and 0 < row["busy"] < 1.2 and 0 < row["bandwidth_share"] < 1
    assert picture.read_text().count("<svg") == 1


def test_arrivals_are_the_same_for_a_seed_and_as_many_as_asked() -> None:
    plan = arrivals.Plan((5.0,), seconds=20.0, requests=1000, seed=3)
    drawn = [list(arrivals.draw(5.0, 100, 30, plan, 50)) for _ in range(2)]
    assert drawn[0] == drawn[1] != list(arrivals.draw(5.0, 100, 30, dataclasses.replace(plan, seed=4), 50))
    due = [arrival.due_s for arrival in drawn[0]]
    assert due == sorted(due) and due[0] == 0 and due[-1] < 20
    assert 60 < len(due) < 140  # 100 +- 4 standard deviations
    assert all(25 <= len(arrival.prompt) <= 400 and 7 <= arrival.n_gen <= 120 for arrival in drawn[0])
    assert 80 < sorted(len(arrival.prompt) for arrival in drawn[0])[len(due) // 2] < 125
    few = list(arrivals.draw(5.0, 100, 30, dataclasses.replace(plan, requests=3), 50))
    assert few == drawn[0][:3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-m", "smollm2", "--rate", "1,0"], "expected numbers above 0, separated by commas"),
        (["-m", "smollm2", "--rate", "1", "-npl", "4", "--streams", "4"], "leave no place for requests"),
        (["-m", "smollm2"], "--rate or --chunk"),
        (["-m", "smollm2", "--rate", "1", "-npl", "1,65"], "-npl/--n-parallel 65: at most 64 sequences at once"),
        (["-m", "smollm2", "-npp", "0"], "expected whole numbers, 1 or more"),
        (["--rate", "1"], "give one of -m/--model"),
        (["-m", "smollm2", "--rate", "1", "-o", "/no/such/folder/rows.md"], "/no/such/folder"),
    ],
)
def test_bad_requests_are_refused(arguments: list[str], message: str, run_here: Run) -> None:
    done = run_here("throughput_benchmark.py", *arguments)
    assert done.returncode == 2 and message in done.stderr, done.stderr
