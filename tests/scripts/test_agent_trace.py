"""scripts/agent_trace.py against llmcl's server: a prompt finds what the conversation left, whatever came between."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import agent_trace
import pytest
from agent_trace import Client, Turn
from engine_server import engine_server
from fake_server import FakeEngine, running, served

import llmcl
from llmcl.errors import ServerError, UsageError
from llmcl.runtime.platforms import DeviceEntry

PAGE = 64


def test_what_is_asked_in_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_trace, "LINE_TURNS", 2)
    monkeypatch.setattr(agent_trace, "CANCEL_TURNS", 2)
    monkeypatch.setattr(agent_trace, "WORDS", [*"abcdefgh"])  # two of the byte tokenizer's tokens
    notes: list[Turn] = []
    with engine_server(n_pages=200) as tested:
        turns = agent_trace.replay(Client(tested.server.url), 3, 0.002, notes.append)
    assert turns == notes and [turn.turn for turn in turns] == [1, 2, 3]
    assert [turn.what for turn in turns] == ["", "after a stopped request", "first line changed"]
    assert turns[0].cached_tokens == turns[2].cached_tokens == 0 < turns[1].cached_tokens
    assert turns[1].new_tokens < turns[1].prompt_tokens and turns[2].new_tokens == turns[2].prompt_tokens
    assert all(turn.ttft_ms > 0 and turn.alone_ms > 0 and turn.seconds > 0 for turn in turns)


@pytest.mark.slow
def test_side_requests_and_stopped_requests_leave_the_conversation_cached(
    default_entry: DeviceEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_trace, "LINE_TURNS", 3)
    monkeypatch.setattr(agent_trace, "CANCEL_TURNS", 3)
    with llmcl.load("smollm2", device=default_entry.index, max_context=1024) as llm:
        stand_in = FakeEngine(llm.tokenizer)
        with llm.engine(max_sequences=2, kv_pages=20) as engine, running(stand_in, loaded=False) as server:
            model = served(stand_in, max_context=engine.max_context)
            object.__setattr__(model, "engine", engine)
            server.service.ready(model)
            turns = agent_trace.replay(Client(server.url), 4, 0.012)
    assert [turn.what for turn in turns] == ["", "", "after a stopped request", "first line changed"]
    assert turns[0].cached_tokens < PAGE and turns[3].cached_tokens < PAGE
    for before, turn in pairwise(turns[:3]):
        assert turn.cached_tokens >= before.prompt_tokens // PAGE * PAGE
        assert turn.new_tokens - PAGE <= turn.prompt_tokens - turn.cached_tokens <= turn.new_tokens + PAGE


def test_the_table_and_the_chart(tmp_path: Path) -> None:
    turns = [
        Turn(1, 1000, 0, 1000, 500.0, 400.0, 1.25, 2.0, ""),
        Turn(2, 1200, 960, 180, 90.0, 60.0, 1.5, 1.0, "after a stopped request"),
    ]
    lines = agent_trace.table(turns).splitlines()
    assert lines[3] == "| 2 | 1200 | 960 | 180 | 90 | 60 | 1.50 | 1.00 | after a stopped request |"
    assert lines[-1] == "3.0 s, 44% of the prompts' tokens cached, median ratio 1.38"
    pytest.importorskip("matplotlib")
    agent_trace.draw(turns, str(tmp_path / "turns.png"))
    assert (tmp_path / "turns.png").stat().st_size > 1000


def test_a_server_that_cannot_be_asked() -> None:
    with pytest.raises(UsageError, match="expected an address such as"):
        Client("ftp://127.0.0.1")
    with pytest.raises(ServerError, match=r"http://127\.0\.0\.1:9 cannot be used"):
        Client("http://127.0.0.1:9").ask([{"role": "user", "content": "Hi"}], 1)
