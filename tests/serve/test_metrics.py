"""/metrics of a server with a real engine, and the dashboard that shows it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_server import EngineServer, engine_server
from fake_server import running, wait_for

DASHBOARD = Path(__file__).resolve().parents[2] / "docs" / "grafana.json"


@pytest.fixture(scope="module")
def used() -> Iterator[EngineServer]:
    """After two requests with the same long beginning, one after the other."""
    with engine_server() as served:
        for n in range(2):
            prompt = [*range(2, 130), n, n]
            answer = served.server.post("/v1/completions", {"prompt": prompt, "max_tokens": 9})
            assert answer.status_code == 200, answer.text
            wait_for(lambda: served.is_idle)
        yield served


def test_what_the_engine_counts(used: EngineServer) -> None:
    metric, n_tokens = used.server.metric, used.server.metric("llamacpp:tokens_predicted_total")
    assert metric("llamacpp:prompt_tokens_total") == 130 + 2 and metric("llmcl_cached_prompt_tokens_total") == 128
    assert metric('llmcl_cached_tokens_bucket{le="0.0"}') == 1 and metric('llmcl_cached_tokens_bucket{le="256.0"}') == 2
    assert metric("llamacpp:spec_decode_num_draft_tokens_total") == metric("llmcl_accepted_tokens_count") == 0
    assert metric("llmcl_queue_seconds_count") == 2 and 0 < metric("llmcl_queue_seconds_sum") < 60
    assert 0 < metric("llamacpp:prompt_seconds_total") < 60 and metric("llmcl_preemptions_total") == 0
    steps = metric("llamacpp:n_decode_total")  # 3 and 1 of prompts, 64 rows at most; one for each token but the first
    assert steps == metric("llmcl_step_rows_count") == 3 + 1 + n_tokens - 2
    assert metric("llmcl_step_rows_sum") == 132 + n_tokens - 2
    assert metric('llmcl_step_rows_bucket{le="1.0"}') == n_tokens - 2
    assert metric('llmcl_step_rows_bucket{le="+Inf"}') == steps
    assert metric("llamacpp:n_busy_slots_per_decode") == 1


def test_it_says_when_requests_gave_their_pages_away() -> None:
    with engine_server(n_pages=5, max_sequences=4) as small:
        prompts = [[*range(n, n + 50)] for n in range(2, 6)]
        asked = {"prompt": prompts, "max_tokens": 60, "temperature": 0, "seed": 5}
        small.batch.before = lambda what: time.sleep(0.005)  # so that all of them arrive before the first ends
        assert small.server.post("/v1/completions", asked).status_code == 200
        assert small.server.metric("llmcl_preemptions_total") == small.engine.n_preempted > 0
        assert small.server.metric("llmcl_queue_seconds_count") == 4  # a preempted request began once


def test_before_the_model_is_ready_there_is_no_engine() -> None:
    with running(loaded=False) as server:
        shown = server.http.get("/metrics").text
    assert "llmcl_requests_total" in shown and "llmcl_step_rows" not in shown


def test_the_dashboard_asks_for_metrics_that_exist(used: EngineServer) -> None:
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    asked = [target["expr"] for panel in panels for target in panel["targets"]]
    names = {name for text in asked for name in re.findall(r"\b(?:llamacpp:|llmcl_)\w+", text)}
    lines = used.server.http.get("/metrics").text.splitlines()
    there = {re.split(r"[{ ]", line)[0] for line in lines if not line.startswith("#")}
    ours = {name for name in there if not name.endswith(("_count", "_sum", "_created"))}
    assert names == ours  # nothing that is counted is left out, either
    assert len({(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}) == len(panels)
