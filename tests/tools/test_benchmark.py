"""The benchmark: its arithmetic and formats on an engine with known times, and runs of the script."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from programs import TINY_SHAPE, Run, run_llmcl

from llmcl.engine.generation import Piece
from llmcl.errors import ContextLengthError, OutOfDeviceMemoryError
from llmcl.runtime import roofline
from llmcl.tools import benchmark
from llmcl.tools.rows import format_rows


class Engine:
    """Stands in for LLM: prefill at 1000 tokens/s, decode steps of 10 ms (the last of each run 30 ms)."""

    model_name = "steady"
    max_context = 1024
    dtype = "bfloat16"
    kv_dtype = "float16"
    weight_bytes_per_token = 100_000_000
    kv_bytes_per_position = 1_000_000
    config = SimpleNamespace(n_parameters=lambda: 50_000_000)
    model = SimpleNamespace(layers=[], decode_ops=None)
    has_tokenizer = False

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []
        self.device = SimpleNamespace(name="Steady Device", read_bandwidth=lambda: 20e9)
        self.place = self.device.name

    def bench_prefill(self, n_tokens: int) -> float:
        self.calls.append(("pp", n_tokens, 0))
        return n_tokens / 1000

    def bench_decode(self, n_tokens: int, depth: int) -> list[float]:
        self.calls.append(("tg", n_tokens, depth))
        return [0.010] * (n_tokens - 1) + [0.030]

    def stream(self, prompt: Any, *, max_tokens: int, ignore_eos: bool, seed: int, **sampling: Any) -> Iterator[Piece]:
        assert ignore_eos
        self.calls.append(("gen", max_tokens, seed))
        stats = SimpleNamespace(prompt_tokens=10, decode_tokens_per_s=100.0, ttft_ms=5.0)
        for i in range(max_tokens):
            last = i == max_tokens - 1
            end: tuple[Any, Any] = ("length", stats) if last else (None, None)
            yield Piece("x", i, 10.0 if i else None, *end)


def measure(
    engine: Any, plan: benchmark.BenchmarkPlan, note: Callable[[str], None] = lambda text: None
) -> benchmark.Result:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(roofline, "read_bandwidth", lambda device: device.read_bandwidth())
        patch.setattr(benchmark, "why_separate", lambda layers, ops: None)
        return benchmark.run(engine, plan, note)


@pytest.fixture
def result() -> benchmark.Result:
    plan = benchmark.BenchmarkPlan(n_prompt=(200,), n_gen=(8,), depths=(0, 100), generate_tokens=5, repetitions=2)
    return measure(Engine(), plan)


def test_rows_are_named_as_in_llama_bench(result: benchmark.Result) -> None:
    assert [row.test for row in result.rows] == ["pp200", "tg8", "tg8 @ d100", "gen5"]


def test_each_test_is_warmed_up_and_repeated() -> None:
    engine = Engine()
    measure(engine, benchmark.BenchmarkPlan((16,), (4,), (32,), 4, repetitions=2))
    assert engine.calls == [("pp", 16, 0)] * 3 + [("tg", 4, 32)] * 3 + [("gen", 4, seed) for seed in (0, 1, 2)]


def test_figures_follow_from_the_times(result: benchmark.Result) -> None:
    prefill, empty, deep, generation = result.rows
    assert prefill.avg_ts == pytest.approx(1000) and prefill.stddev_ts == pytest.approx(0, abs=1e-9)
    assert empty.avg_ts == pytest.approx(8 / 0.1)
    assert empty.ms_per_token == pytest.approx(12.5)
    # steps 1..8 attend to 1..8 positions: 4.5 on average
    assert empty.bytes_per_token == pytest.approx(104.5e6)
    assert empty.gb_per_s == pytest.approx(104.5e6 * 80 / 1e9)
    assert empty.bandwidth_share == pytest.approx(104.5e6 * 80 / 20e9)
    assert deep.bytes_per_token == pytest.approx(204.5e6)
    assert empty.tbt_ms is not None and empty.tbt_ms["p50"] == pytest.approx(10)
    assert empty.tbt_ms["max"] == pytest.approx(30) and empty.tbt_ms["stalls"] == 2  # one in each repetition
    assert generation.avg_ts == 100 and generation.ttft_ms == 5
    assert result.generations_tbt_ms == [[10.0] * 4] * 2


def test_standard_deviation_is_over_repetitions(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    seconds = iter([1.0, 0.5, 0.25])  # the first is the warm-up
    monkeypatch.setattr(engine, "bench_prefill", lambda n_tokens: next(seconds))
    (row,) = measure(engine, benchmark.BenchmarkPlan((100,), (), (0,), 0, repetitions=2)).rows
    assert row.samples_ts == (200.0, 400.0)
    assert row.avg_ts == 300.0
    assert row.stddev_ts == pytest.approx(141.42, rel=1e-4)


def test_no_memory_for_the_probe_leaves_the_share_out() -> None:
    engine = Engine()
    notes: list[str] = []

    def refuse() -> float:
        raise OutOfDeviceMemoryError("full")

    engine.device.read_bandwidth = refuse
    (row,) = measure(engine, benchmark.BenchmarkPlan((), (4,), (0,), 0, repetitions=1), notes.append).rows
    assert row.bandwidth_share is None and row.gb_per_s is not None
    assert any("full" in note for note in notes)
    assert "of bandwidth" in format_rows([row], "md", benchmark.markdown)


def test_formats_say_the_same(result: benchmark.Result) -> None:
    as_json = json.loads(format_rows(result.rows, "json", benchmark.markdown))
    as_lines = [json.loads(line) for line in format_rows(result.rows, "jsonl", benchmark.markdown).splitlines()]
    as_csv = list(csv.DictReader(io.StringIO(format_rows(result.rows, "csv", benchmark.markdown))))
    assert as_json == as_lines
    assert len(as_json) == len(as_csv) == 4
    for row, item in zip(as_json, as_csv, strict=True):
        assert item["test"] == row["test"]
        assert float(item["avg_ts"]) == row["avg_ts"]
        if row["tbt_ms"]:
            assert (
                float(item["tbt_p99_ms"]) == row["tbt_ms"]["p99"] and float(item["stalls"]) == row["tbt_ms"]["stalls"]
            )


def test_markdown_has_llama_benchs_columns_and_the_share(result: benchmark.Result) -> None:
    text = format_rows(result.rows, "md", benchmark.markdown)
    rows, tbt, bandwidth = (
        text.split("\n\n", 1)[0].splitlines(),
        text.split("\n\n")[2].splitlines(),
        text.splitlines()[-1],
    )
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in rows]
    assert cells[0] == [
        *("model", "size", "params", "backend", "device", "dtype", "test", "t/s"),
        *("ms/token", "GB/s", "of bandwidth"),
    ]
    assert cells[2][6:] == ["pp200", "1000.00 ± 0.00", "1.000", "", ""]
    assert cells[3] == [
        *(
            "steady",
            "95.37 MiB",
            "50.00 M",
            "OpenCL",
            "Steady Device",
            "bfloat16, KV float16",
            "tg8",
            "80.00 ± 0.00",
        ),
        *("12.500", "8.36", "41.8%"),
    ]
    assert [line.split("|")[1].strip() for line in tbt[2:]] == ["tg8", "tg8 @ d100", "gen5"]
    assert bandwidth == "Streaming read of the device: 20.0 GB/s"
    assert len({len(line) for line in rows}) == 1


def test_context_is_checked_before_measuring() -> None:
    plan = benchmark.BenchmarkPlan((512,), (128,), (0, 4096), 0)
    assert plan.context_tokens() == 4224
    engine = Engine()
    with pytest.raises(ContextLengthError, match=r"4224.*1024"):
        measure(engine, plan)
    assert engine.calls == []


# ---- the script ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "parts"),
    [
        ([], 2, ["--model", "--random"]),
        (["-m", "smollm2", "--random", "llama-3.2-1b"], 2, ["--model", "--random"]),
        (["--random", "llama-3.2-1b", "--quantize", "q4_0"], 2, ["--quantize", "--dtype q4_0"]),
        (["-m", "smollm2", "-p", "0", "-n", "0", "-g", "0"], 2, ["nothing to measure"]),
        (["-m", "smollm2", "-n", "1,x"], 2, ["--n-gen", "'x'", "0 or more"]),
        (["-m", "smollm2", "-d", "-1"], 2, ["--n-depth", "'-1'", "0 or more"]),
        (["-m", "smollm2", "-r", "0"], 2, ["--repetitions", "'0'", "1 or more"]),
        (["-m", "smollm2", "--format", "xml"], 2, ["--format", "xml", "md, csv, json, jsonl"]),
        (["-m", "smollm2", "-d", "4096", "-c", "4000"], 9, ["4224", "4000", "--ctx-size"]),
        (["-m", "smollm2", "-o", "no/such/folder/file"], 2, ["--output", "no/such/folder/file"]),
        (["-m", "smollm2", "--plot", "picture.xyz"], 2, ["--plot", "picture.xyz", ".png"]),
        (["-m", "smollm2", "--plot", "picture.png", "-g", "0"], 2, ["--plot", "-g"]),
    ],
)
def test_bad_requests_are_refused(arguments: list[str], code: int, parts: list[str], run_here: Run) -> None:
    done = run_here("llmcl", "bench", *arguments)
    assert (done.returncode, done.stdout) == (code, "")
    for part in parts:
        assert part in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_the_demo_model_is_measured(tmp_path: Path, run_here: Run) -> None:
    output, picture = tmp_path / "rows.json", tmp_path / "tbt.png"
    has_matplotlib = importlib.util.find_spec("matplotlib") is not None
    options = ["-m", "smollm2", "-p", "32", "-n", "8", "-d", "0,64", "-g", "8", "-r", "2", "--format", "json"]
    if not has_matplotlib:
        refused = run_here("llmcl", "bench", *options, "--plot", str(picture))
        assert refused.returncode == 2 and "llmcl[plot]" in refused.stderr
    done = run_llmcl("bench", *options, "-o", str(output), *(["--plot", str(picture)] if has_matplotlib else []))
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    rows = json.loads(output.read_text(encoding="utf-8"))
    assert [row["test"] for row in rows] == ["pp32", "tg8", "tg8 @ d64", "gen8"]
    for row in rows:
        assert row["avg_ts"] > 0 and row["device"] and row["n_params"] > 1e8
        assert len(row["samples_ts"]) == 2
    for row in rows[1:]:
        assert 0 < row["bandwidth_share"] < 1.5, "more than the device can read: the bytes or the bandwidth are wrong"
        assert row["tbt_ms"]["p50"] > 0
    assert rows[2]["bytes_per_token"] > rows[1]["bytes_per_token"] > 9e7
    assert "tg8 @ d64" in done.stderr and "of bandwidth" in done.stderr
    if has_matplotlib:
        assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_random_weights_of_a_shape(tmp_path: Path, run_here: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the device's bandwidth, which the demo model's test measures: that takes seconds."""
    monkeypatch.setattr(roofline, "read_bandwidth", lambda device: 1e9)
    shape = tmp_path / "config.json"
    shape.write_text(json.dumps(TINY_SHAPE), encoding="utf-8")
    sizes = "-p", "16", "-n", "4", "-d", "8", "-g", "4", "-r", "1"
    done = run_here("llmcl", "bench", "--random", str(shape), "--dtype", "bfloat16", *sizes, "--format", "jsonl")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["test"] for row in rows] == ["pp16", "tg4 @ d8", "gen4"]
    assert all(row["avg_ts"] > 0 for row in rows)
