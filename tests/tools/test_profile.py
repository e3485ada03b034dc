"""The profiler: its arithmetic on known times, its refusals, and the command as a user runs it."""

from __future__ import annotations

import csv
import dataclasses
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pyopencl as cl
import pytest
from programs import TINY_SHAPE, Run

import llmcl
from llmcl.errors import DeviceError
from llmcl.runtime.device import Cost, Device
from llmcl.runtime.platforms import DeviceEntry
from llmcl.runtime.profiler import LaunchRecord, ProfilingDevice, steps
from llmcl.tools.profile import profile, summarize

STAGES = ("queued", "submit", "start", "end")


def record(name: str, start: int, end: int, position: int, cost: Cost | None = None) -> LaunchRecord:
    return LaunchRecord(name, start - 5, start - 2, start, end, (64,), (8,), "decode", position, 1, cost)


def test_figures_follow_from_the_times() -> None:
    records = [
        record("a", 1000, 2000, 7, Cost(500, 4000.0)),
        record("b", 2100, 2400, 7),
        record("a", 3400, 4400, 8, Cost(1500, 0.0)),
        record("b", 4400, 4700, 8),
    ]
    phase = summarize(records, 2, bandwidth=4e9, arithmetic_peak=4e9)
    assert [len(step) for step in steps(records)] == [2, 2]
    assert phase.span_ms == pytest.approx(3.7e-3) and phase.kernel_ms == pytest.approx(2.6e-3)
    assert phase.idle_ms == pytest.approx(1.1e-3) and phase.between_steps_ms == pytest.approx(1.0e-3)
    assert phase.median_gap_us == pytest.approx(0.05) and phase.queued_to_start_us == pytest.approx(0.005)
    a, b = phase.rows
    assert (a.name, a.calls, b.name, b.calls) == ("a", 2, "b", 2)
    assert a.total_ms == pytest.approx(2e-3) and a.mean_us == pytest.approx(1.0)
    assert a.share == pytest.approx(2.0 / 2.6)
    assert a.gb_per_s == pytest.approx(1.0) and a.gflop_per_s == pytest.approx(2.0)
    assert (a.ceiling, a.of_ceiling) == ("arithmetic", pytest.approx(0.5))
    assert b.gb_per_s == 0


def test_an_ordinary_device_takes_no_times(default_device: Device) -> None:
    properties = default_device.queue.properties
    assert not properties & cl.command_queue_properties.PROFILING_ENABLE


def test_a_device_that_cannot_take_times(default_device: Device) -> None:
    without = SimpleNamespace(queue_properties=0)
    entry = dataclasses.replace(default_device.entry, device=without)
    with pytest.raises(DeviceError, match=r"offers no profiling .*choose another --device"):
        ProfilingDevice(entry)


@pytest.mark.slow
def test_every_kernel_is_recorded_once(cl_entry: DeviceEntry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two chunks of prefill and three steps, whose launches the device counts too.

    The device's own speed, which takes seconds, test_the_command measures.
    """
    shape = tmp_path / "config.json"
    shape.write_text(json.dumps({**TINY_SHAPE, "max_position_embeddings": 1024}))
    device = ProfilingDevice(cl_entry)
    monkeypatch.setattr("llmcl.models.model.prefill_chunk", lambda device: 64)
    for peak in ("read_bandwidth", "arithmetic_peak"):
        monkeypatch.setattr(f"llmcl.tools.profile.{peak}", lambda device: 1e9)
    with llmcl.load_random(str(shape), device=device, dtype="float32", max_context=100) as llm:
        result = profile(llm, 72, 3)
    calls = Counter((r.phase, r.name) for r in result.records)
    assert calls["prefill", "attention_prefill"] == 3 and calls["decode", "attention_decode"] == 6
    positions = [r.position for r in result.records if r.name in ("attention_prefill", "attention_decode")]
    assert positions == [0, 64, 71, 72, 72, 73, 73, 74, 74]  # of the last layer the last token alone
    for r in result.records:
        assert 0 < r.start <= r.end and r.cost is not None and r.cost.nbytes > 0, r
    (first,) = {r.cost for r in result.records if r.name == "attention_decode" and r.position == 72}
    assert first is not None and first.flops == 4 * 4 * 32 * 73
    assert [p.n_tokens for p in result.phases] == [72, 3]


def test_the_command(tmp_path: Path, run_here: Run) -> None:
    folder, shape = tmp_path / "made" / "here", tmp_path / "config.json"
    shape.write_text(json.dumps(TINY_SHAPE))
    done = run_here("llmcl", "profile", "--random", str(shape), "-p", "32", "-n", "4", "-o", str(folder))
    assert done.returncode == 0, done.stderr
    for part in ("prefill, 32 tokens", "decode, 4 tokens", "attention_prefill", "linear_decode", "of ceiling", "idle"):
        assert part in done.stdout
    assert max(map(len, done.stdout.splitlines()[:5])) <= 80
    with (folder / "cl_profiling.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        assert [int(row[stage]) for stage in STAGES] == sorted(int(row[stage]) for stage in STAGES)
        assert int(row["duration"]) == int(row["end"]) - int(row["start"])
    assert sum(row["name"] == "attention_decode" for row in rows) == 4 * 2
    sizes = [[int(n) for n in row[f"{kind}_size"].split("x")] for row in rows[:1] for kind in ("global", "local")]
    assert len(sizes[0]) == len(sizes[1])
    trace = json.loads((folder / "cl_trace.json").read_text(encoding="utf-8"))["traceEvents"]
    drawn = [event for event in trace if event["ph"] == "X"]
    assert sum(event["tid"] == 2 for event in drawn) == len(rows)
    assert [event["name"] for event in drawn if event["tid"] == 1][-1] == "decode at 35"
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in drawn)


@pytest.mark.parametrize(
    ("arguments", "code", "parts"),
    [
        ([], 2, ["--model", "--random"]),
        (["-m", "smollm2", "-p", "0"], 2, ["--n-prompt", "1 or more"]),
        (["-m", "smollm2", "-n", "x"], 2, ["--n-gen", "0 or more"]),
        (["-m", "smollm2", "-o", "pyproject.toml/x"], 2, ["--output-dir", "pyproject.toml"]),
        (["-m", "smollm2", "--device", "no-such-device"], 3, ["no-such-device"]),
    ],
)
def test_bad_requests_are_refused(arguments: list[str], code: int, parts: list[str], run_here: Run) -> None:
    done = run_here("llmcl", "profile", *arguments)
    assert (done.returncode, done.stdout) == (code, "")
    for part in parts:
        assert part in done.stderr
    assert "Traceback" not in done.stderr
