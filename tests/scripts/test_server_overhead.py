"""scripts/server_overhead.py against a server whose engine needs no device."""

from __future__ import annotations

import re
import time

import pytest
import server_overhead
from engine_server import engine_server
from fake_server import END
from server_overhead import Plan, Turn


def test_both_ways_are_measured() -> None:
    notes: list[str] = []
    plan = Plan(streams=4, n_prompt=20, n_gen=12, rounds=2)
    with engine_server(max_sequences=4) as tested:
        tested.batch.before = lambda what: time.sleep(0.002)
        pairs = server_overhead.measure(
            tested.engine, tested.server.url, 131, [END], plan, notes.append, time.thread_time
        )
        assert tested.engine.metrics.cached_tokens == 0 and tested.engine.metrics.prompt_tokens == 5 * 2 * 4 * 20
    assert len(pairs) == 4 and len(notes) == 5
    for direct, http in pairs:
        assert direct.throughput > 0 and http.throughput > 0 and direct.ttft_ms >= 2 and http.ttft_ms >= 2
        assert direct.tbt_ms > 1.5 and http.client_us > 0 == direct.client_us
    assert re.fullmatch(
        r"\| \| engine .*\n\|---.*\n(\| [^|]+( \| [\d.]+){2} \| [-+]?[\d.]+x? \([^|]+ to [^|]+\) \|\n){5}",
        server_overhead.table(pairs),
    )


def test_the_table_has_medians_of_what_is_added() -> None:
    pairs = [(Turn(100, 10, 2, 5), Turn(90 + n, 12 + n, 2.25, 30, 7)) for n in (0, 5, 100)]
    shown = server_overhead.table(pairs)
    assert "| throughput, tokens/s | 100.0 | 95.0 | 0.950x (0.925 to 1.425) |" in shown
    assert "| TTFT p50, ms | 10.00 | 17.00 | +7.00 (+4.50 to +54.50) |" in shown
    assert "| TBT p50, ms | 2.000 | 2.250 | +0.250 (+0.250 to +0.250) |" in shown
    assert "| event loop, us/token | 5.0 | 30.0 | +25.0 (+25.0 to +25.0) |" in shown
    assert "| clients, us/token | 0.0 | 7.0 | +7.0 (+7.0 to +7.0) |" in shown


def test_a_server_that_refuses_ends_it() -> None:
    with (
        engine_server(max_sequences=2, api_keys=("key",)) as tested,
        pytest.raises(SystemExit, match="401"),
    ):
        server_overhead.measure(tested.engine, tested.server.url, 131, [END], Plan(2, 5, 5, 1), print, time.thread_time)
