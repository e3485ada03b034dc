"""Timing statistics: the definitions, against NumPy and on a clock that the test moves."""

from __future__ import annotations

import json
import math
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmcl.engine.stats import Recorder, report_so_far, summarize
from llmcl.models.sequence import StepCount

TBT_FIELDS = ["mean", "std", "min", "p50", "p90", "p95", "p99", "max", "stalls"]
MEASURED: dict[str, Any] = {  # besides the times of the tokens
    "load_ms": 250.0,
    "compile_ms": 70.0,
    "decode_steps": 4,
    "device_to_host_bytes": 16,
    "host_to_device_bytes": 2,
    "kernel_launches": 600,
    "peak_device_bytes": 3 * 2**20,
}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A clock in nanoseconds, as a list of one value."""
    now = [5_000_000_000]
    monkeypatch.setattr(time, "perf_counter_ns", lambda: now[0])
    return now


def recorded(clock: list[int], gaps_ms: list[float], recorder: Recorder) -> list[float | None]:
    tbt = []
    for gap in gaps_ms:
        clock[0] += round(gap * 1e6)
        tbt.append(recorder.token())
    return tbt


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60))
def test_summarize_equals_numpy(times: list[float]) -> None:
    summary = summarize(times)
    assert list(summary) == TBT_FIELDS
    expected = {"mean": np.mean(times), "std": np.std(times), "min": min(times), "max": max(times)}
    expected |= {name: np.percentile(times, int(name[1:])) for name in ("p50", "p90", "p95", "p99")}
    for name, value in expected.items():
        assert summary[name] == pytest.approx(value, rel=1e-9, abs=1e-9 * max(times)), name


def test_stalls_are_above_twice_the_median() -> None:
    assert summarize([10, 10, 10, 10, 20, 20.001, 90])["stalls"] == 2
    assert summarize([10, 10])["stalls"] == 0


def test_summary_of_nothing_is_none_and_no_stalls() -> None:
    assert summarize([]) == dict.fromkeys(TBT_FIELDS[:-1]) | {"stalls": 0}


def test_recorder_computes_what_the_definitions_say(clock: list[int]) -> None:
    recorder = Recorder(prompt_tokens=50, prefilled_tokens=20)
    clock[0] += 30_000_000
    assert recorded(clock, [100, 10, 10, 10, 30], recorder) == [None, 10, 10, 10, 30]
    clock[0] += 10**9  # what happens after the last token does not count
    stats = recorder.finish(**MEASURED)
    assert stats.to_dict() == {
        "prompt_tokens": 50,
        "cached_tokens": 30,
        "generated_tokens": 5,
        "load_ms": 250.0,
        "compile_ms": 70.0,
        "ttft_ms": 130.0,
        "prefill_tokens_per_s": pytest.approx(20 / 0.13),
        "tbt_ms": pytest.approx(summarize([10, 10, 10, 30])),
        "tpot_ms": pytest.approx(15.0),
        "decode_tokens_per_s": pytest.approx(1000 / 15),
        "device_to_host_bytes_per_token": 4.0,
        "host_to_device_bytes_per_token": 0.5,
        "kernel_launches_per_token": 150.0,
        "rows_per_step": None,
        "tokens_per_step": None,
        "drafted_tokens": None,
        "accepted_tokens": None,
        "peak_device_bytes": 3 * 2**20,
        "queue_ms": None,
        "arrivals": 5,
        "stage_shares": None,
    }
    assert stats.tbt_ms["stalls"] == 1
    assert "prompt    50 tokens, 30 of them cached\n" in stats.report()


def test_tokens_that_arrive_together_are_one_arrival(clock: list[int]) -> None:
    """Seven tokens at a time, as on a busy processor; the host handles each in 0.02 ms."""
    recorder, tbt = Recorder(5), list[float | None]()
    for wait_ms in (100, 70, 70, 70, 210):
        for i in range(7):
            clock[0] += round(1e6 * (0.02 if i else wait_ms))
            tbt.append(recorder.token(together=i > 0))
    assert tbt[:7] == [None] + [0.0] * 6 and tbt[7:14] == [pytest.approx(70.12)] + [0.0] * 6
    stats = recorder.finish()
    assert stats.arrivals == 5 and stats.generated_tokens == 35
    assert stats.tbt_ms == pytest.approx(summarize([70.12, 70.12, 70.12, 210.12]))
    assert stats.tpot_ms == pytest.approx((3 * 70 + 210 + 30 * 0.02) / 34)  # from the first token to the last
    report = stats.report()
    assert "arrivals  5, 7.00 tokens each" in report and "time between two arrivals" in report
    assert "stalls    1 of 4" in report and "p50 70.12" in report
    so_far = report_so_far([ms for ms in tbt if ms is not None], 35)
    assert so_far.splitlines()[1:] == [line for line in report.splitlines() if line in so_far][-4:]
    assert "arrivals  5, 7.00 tokens each" in so_far and "stalls    1 of 4" in so_far


def test_all_tokens_in_one_arrival(clock: list[int]) -> None:
    recorder = Recorder(5)
    assert [recorder.token(together=together) for together in (False, True)] == [None, 0.0]
    stats = recorder.finish()
    assert stats.arrivals == 1 and stats.tbt_ms == summarize([])
    assert "stalls" not in stats.report() and "arrivals  1, 2.00 tokens each" in stats.report()


def test_the_last_stage_has_the_rest_of_the_time(clock: list[int]) -> None:
    recorder = Recorder(1)
    recorded(clock, [3, 10], recorder)
    stats = recorder.finish(stage_seconds=[0.002, 0.005])
    assert stats.stage_shares == pytest.approx([0.2, 0.5, 0.3])
    assert "stages    20% + 50% + 30%" in stats.report()


def test_with_drafts_bytes_are_those_of_a_token_and_not_of_a_step(clock: list[int]) -> None:
    recorder = Recorder(50)
    recorded(clock, [100, 10, 0, 0, 10], recorder)
    verified = StepCount(steps=4, rows=20, tokens=12)
    stats = recorder.finish(**MEASURED, verified=verified)
    assert stats.device_to_host_bytes_per_token == 1.0 and stats.kernel_launches_per_token == 600 / 16
    assert stats.rows_per_step == 24 / 8 and stats.tokens_per_step == 16 / 8
    report = stats.report()
    assert "drafts    2.00 tokens a step of 3.00 rows, 8 of 16 accepted" in report and "stalls" not in report


def test_recorder_counts_from_a_start_that_was_taken_earlier(clock: list[int]) -> None:
    recorder = Recorder(8, start_ns=clock[0] - 40_000_000)
    recorded(clock, [10], recorder)
    stats = recorder.finish()
    assert stats.ttft_ms == pytest.approx(50) and stats.prefill_tokens_per_s == pytest.approx(160)


def test_the_time_in_a_queue_is_part_of_ttft_and_not_of_prefill(clock: list[int]) -> None:
    recorder = Recorder(8)
    clock[0] += 30_000_000
    recorder.begun_ns = clock[0]
    recorded(clock, [10], recorder)
    stats = recorder.finish()
    assert stats.queue_ms == pytest.approx(30) and stats.ttft_ms == pytest.approx(40)
    assert stats.prefill_tokens_per_s == pytest.approx(800)
    assert "queue     30.0 ms" in stats.report() and "queue" not in Recorder(8).finish().report()


@pytest.mark.parametrize("n_tokens", [0, 1, 2])
def test_few_tokens_give_none_and_valid_json(clock: list[int], n_tokens: int) -> None:
    recorder = Recorder(3)
    recorded(clock, [7.0] * n_tokens, recorder)
    stats = recorder.finish()
    values = json.loads(json.dumps(stats.to_dict(), allow_nan=False))
    assert values["generated_tokens"] == n_tokens
    assert (values["ttft_ms"] is None) == (values["prefill_tokens_per_s"] is None) == (n_tokens == 0)
    assert (values["tpot_ms"] is None) == (values["tbt_ms"]["p50"] is None) == (n_tokens < 2)
    assert (values["decode_tokens_per_s"] is None) == (n_tokens < 2)
    assert values["device_to_host_bytes_per_token"] is None
    assert ("TPOT" in stats.report()) == ("stalls" in stats.report()) == (n_tokens == 2)


def test_tokens_at_the_same_instant_give_no_infinite_rate(clock: list[int]) -> None:
    recorder = Recorder(3)
    recorded(clock, [0, 0, 0], recorder)
    stats = recorder.finish()
    assert stats.tpot_ms == 0 and stats.decode_tokens_per_s is None and stats.prefill_tokens_per_s is None


def test_report_shows_every_quantity_with_its_unit(clock: list[int]) -> None:
    recorder = Recorder(50)
    recorded(clock, [100, 10, 10, 40], recorder)
    stats = recorder.finish(**MEASURED)
    lines = stats.report(device="Some GPU", model="smollm2").splitlines()
    shown = {line[:10].strip(): line[10:] for line in lines if line[:10].strip()}
    assert shown["model"] == "smollm2" and shown["device"] == "Some GPU"
    for label, expected in {
        "load": "250 ms",
        "compile": "70 ms",
        "prompt": "50 tokens",
        "prefill": "500.0 tokens/s",
        "TTFT": "100.0 ms",
        "answer": "4 tokens",
        "decode": "50.0 tokens/s",
        "TPOT": "20.00 ms",
        "TBT": "mean 20.00  std 14.14  min 10.00  max 40.00 ms",
        "stalls": "1 of 3",
        "traffic": "4.0 bytes to the host, 0.5 to the device",
        "launches": "150.0 kernels",
        "memory": "3.0 MiB",
    }.items():
        assert f"{shown[label]} ".startswith(f"{expected} "), label
    assert max(map(len, lines)) <= 100
    assert "p50 10.00  p90 34.00  p95 37.00  p99 39.40 ms" in stats.report()


def test_report_of_a_device_without_a_name_has_no_device_line() -> None:
    assert "device" not in Recorder(1).finish().report()


def test_times_are_those_of_a_real_clock() -> None:
    recorder = Recorder(1)
    recorder.token()
    time.sleep(0.02)
    tbt = recorder.token()
    assert tbt is not None and 20 <= tbt < 60000 and math.isclose(recorder.finish().tpot_ms or 0, tbt)
