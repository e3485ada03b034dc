"""A stream that has nothing to say yet sends events that clients count, and says how far a prompt was read."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import anthropic
import pytest
from anthropic.types import RawMessageStreamEvent
from engine_server import engine_server
from fake_server import FakeEngine, Running, byte_tokenizer, events, running, strictly, wait_for
from openai.types.chat import ChatCompletionChunk
from openai.types.responses import ResponseStreamEvent

from llmcl.engine.scheduler import Job
from llmcl.ops.sample import SamplingParams
from llmcl.serve import events as serve_events

USER = [{"role": "user", "content": "Hello"}]
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER},
    "/v1/completions": {"prompt": "Hello"},
    "/v1/responses": {"input": "Hello"},
    "/v1/messages": {"messages": USER, "max_tokens": 50},
}


@pytest.fixture(scope="module")
def slow() -> Any:
    """Each token takes as long as three pings."""
    engine = FakeEngine(byte_tokenizer())
    engine.delay_s = 0.15
    engine.reply = lambda text: "abc"
    with running(engine, ping_s=0.05) as server:
        yield server


def streamed(server: Running, path: str, **fields: Any) -> list[Any]:
    """The events of a stream, as its client's own types."""
    kinds = {
        "/v1/chat/completions": ChatCompletionChunk,
        "/v1/responses": ResponseStreamEvent,
    }
    answer = server.post(path, ASKED[path] | fields | {"stream": True})
    assert answer.status_code == 200 and "\n: ping" not in answer.text
    data = [json.loads(data) for _, data in events(answer.text) if data != "[DONE]"]
    if path == "/v1/messages":
        return [event if event == {"type": "ping"} else strictly(RawMessageStreamEvent, event) for event in data]
    return [strictly(kinds[path], event) for event in data] if path in kinds else data


def test_empty_deltas_of_a_chat(slow: Running) -> None:
    choices = [chunk.choices[0] for chunk in streamed(slow, "/v1/chat/completions")]
    assert "".join(choice.delta.content or "" for choice in choices) == "abc"
    assert [choice.delta.role for choice in choices].count("assistant") == 1 and choices[0].delta.role == "assistant"
    empty = [choice for choice in choices if choice.delta.content is None and choice.finish_reason is None]
    assert len(empty) >= 3 and choices.index(empty[0]) < 3


def test_empty_texts_of_a_completion(slow: Running) -> None:
    choices = [chunk["choices"][0] for chunk in streamed(slow, "/v1/completions")]
    assert "".join(choice["text"] for choice in choices) == "abc" and not choices[0]["text"]
    assert sum(not choice["text"] for choice in choices) >= 4


def test_a_response_is_in_progress_again(slow: Running) -> None:
    received = streamed(slow, "/v1/responses")
    assert [event.sequence_number for event in received] == [*range(len(received))]
    assert [event.type for event in received].count("response.in_progress") >= 4
    assert received[-1].type == "response.completed" and received[-1].response.output_text == "abc"


def test_pings_of_a_message(slow: Running) -> None:
    received = streamed(slow, "/v1/messages")
    assert received[0].type == "message_start" and received.count({"type": "ping"}) >= 3
    with (
        anthropic.Anthropic(base_url=slow.url, api_key="none") as client,
        client.messages.stream(model="any", max_tokens=9, messages=USER) as stream,  # type: ignore[arg-type]
    ):
        assert stream.get_final_text() == "abc"


def test_an_answer_that_has_ended_gives_no_sign(slow: Running) -> None:
    """Among several it is the next one that does."""
    received = streamed(slow, "/v1/chat/completions", n=3)
    ended: set[int] = set()
    for chunk in received:
        assert chunk.choices[0].index not in ended
        ended |= {chunk.choices[0].index} if chunk.choices[0].finish_reason else set()
    assert ended == {0, 1, 2}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_how_far_a_prompt_was_read(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_events, "REPORT_S", 0.01)
    engine = FakeEngine(byte_tokenizer())
    engine.hold_after = 0
    with running(engine) as server:
        body = ASKED[path] | {"stream": True, "return_progress": True}
        said: list[dict[str, int]] = []
        with server.http.stream("POST", path, json=body) as stream:
            wait_for(lambda: engine.open)
            engine.read = 2, 3
            for line in stream.iter_lines():
                if "prompt_progress" in line:
                    said.append(json.loads(line.removeprefix("data: "))["prompt_progress"])
                    if len(said) == 2:
                        break
                    engine.read = 2, 5
        total = len(byte_tokenizer().encode(engine.asked[0][0]))
        assert [(each["total"], each["cache"], each["processed"]) for each in said] == [(total, 2, 3), (total, 2, 5)]
        assert 0 <= said[0]["time_ms"] <= said[1]["time_ms"] < 20_000
        engine.hold_after = None
        assert "prompt_progress" not in server.post(path, ASKED[path] | {"stream": True}).text
        assert "prompt_progress" not in server.post(path, ASKED[path] | {"return_progress": True}).text


def test_an_engine_says_how_far_it_is() -> None:
    job = Job([*range(2, 30)], SamplingParams(), 5)
    assert job.progress() == (0, 0)
    for position, read in (8, 8), (20, 20), (40, 28):
        job.n_found, job.sequence = 8, SimpleNamespace(position=position)  # type: ignore[assignment]
        assert job.progress() == (8, read)
    with engine_server() as one:
        request = one.engine.submit([*range(2, 30)], max_tokens=2)
        assert request.progress()[1] in (0, 28) and request.result().finish_reason
