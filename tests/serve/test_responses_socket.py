"""The WebSocket form of /v1/responses, with OpenAI's own client and with bare WebSockets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest
from fake_server import FakeEngine, Running, byte_tokenizer, running, strictly, wait_for
from openai.resources.responses.responses import ResponsesConnection
from openai.types.responses import Response, ResponsesServerEvent
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
TOOL = {"type": "function", "name": "get_weather", "parameters": {"type": "object", "properties": {}}}


@contextmanager
def connected(server: Running, key: str = "none") -> Iterator[ResponsesConnection]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key) as client, client.responses.connect() as connection:
        yield connection


def answer(connection: ResponsesConnection, **fields: Any) -> Response:
    connection.response.create(**fields)
    for event in connection:
        if event.type in ("response.completed", "response.incomplete"):
            return event.response
        assert event.type != "error", event
    raise AssertionError("the connection ended")


def opened(server: Running, path: str = "/v1/responses", **headers: str) -> ClientConnection:
    address = server.url.replace("http:", "ws:") + path
    return connect(address, additional_headers=headers, proxy=None, compression=None)


def asked(socket: ClientConnection, text: str | None = None, **fields: Any) -> list[dict[str, Any]]:
    """The events for a message."""
    socket.send(json.dumps({"type": "response.create", "model": "any", **fields}) if text is None else text)
    received: list[dict[str, Any]] = []
    while not received or received[-1]["type"] not in ("response.completed", "response.incomplete", "error"):
        received.append(json.loads(socket.recv(10)))
    return received


def refusal(socket: ClientConnection, text: str | None = None, **fields: Any) -> tuple[int, str, str | None]:
    """Status, code and field of the error that answers a message."""
    (event,) = asked(socket, text, **fields)
    assert event["type"] == "error" and event["error"]["message"]
    return event["status"], event["error"]["code"], event["error"]["param"]


# ---- answers --------------------------------------------------------------------------------------------


def test_answers_come_as_events(shared: Running) -> None:
    with connected(shared) as connection:
        connection.response.create(model="any", input="Hello", store=False)
        events = []
        for event in connection:
            events.append(event)
            if event.type == "response.completed":
                break
        assert [event.sequence_number for event in events] == [*range(len(events))]  # type: ignore[union-attr]
        assert [event.type for event in events][:2] == ["response.created", "response.in_progress"]
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "Hello"
        assert answer(connection, model="any", input="Bye", max_output_tokens=2).status == "incomplete"
    with opened(shared) as socket:
        for event in asked(socket, input="Hello"):
            strictly(ResponsesServerEvent, event)


def test_what_was_not_stored_is_continued_on_the_connection(shared: Running) -> None:
    with connected(shared) as connection:
        first = answer(connection, model="any", input="one", store=False)
        second = answer(connection, model="any", input="two", store=False, previous_response_id=first.id)
        assert second.previous_response_id == first.id
        assert "[user]one\n[assistant]one\n[user]two" in shared.engine.asked[-1][0]
    assert shared.http.get(f"/v1/responses/{second.id}").status_code == 404
    with opened(shared) as other:
        lost = refusal(other, input="three", previous_response_id=second.id, store=False)
        assert lost == (400, "previous_response_not_found", "previous_response_id")
        assert asked(other, input="three")[-1]["type"] == "response.completed"


def test_what_was_stored_is_continued_elsewhere(shared: Running) -> None:
    with connected(shared) as connection:
        first = answer(connection, model="any", input="one")
    assert shared.http.get(f"/v1/responses/{first.id}").status_code == 200
    with opened(shared) as other:
        assert asked(other, input="two", previous_response_id=first.id)[-1]["type"] == "response.completed"
    assert shared.engine.asked[-1][0].startswith("[user]one")


def test_a_failed_continuation_loses_the_response(shared: Running) -> None:
    orphan = {"type": "function_call_output", "call_id": "call_missing", "output": "42"}
    for wrong in {"input": [orphan]}, {"input": 5}, {"input": "x" * 3000}, {"input": "Hi", "temperature": -1}:
        with opened(shared) as socket:
            first = asked(socket, input="one", store=False)[-1]["response"]["id"]
            assert refusal(socket, previous_response_id=first, **wrong)[0] == 400
            lost = refusal(socket, input="two", previous_response_id=first)
            assert lost == (400, "previous_response_not_found", "previous_response_id")


def test_a_tool_is_called_and_its_result_sent() -> None:
    engine = FakeEngine(byte_tokenizer())
    engine.reply = lambda text: "Rain" if "get_weather{" in text else CALL
    with running(engine) as server, opened(server) as socket:
        first = asked(socket, input="Weather?", tools=[TOOL], store=False)[-1]["response"]
        (call,) = first["output"]
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "rain"}
        second = asked(socket, input=[result], tools=[TOOL], store=False, previous_response_id=first["id"])
        assert second[-1]["response"]["output"][0]["content"][0]["text"] == "Rain"


def test_a_warm_up_has_no_output(shared: Running) -> None:
    with connected(shared) as connection:
        warm = answer(connection, model="any", input="one", generate=False, store=False)
        assert warm.output == [] and warm.status == "completed"
        assert shared.engine.asked[-1][0].startswith("[user]one")  # so the prompt is in the prefix cache
        answer(connection, model="any", input="two", previous_response_id=warm.id)
        assert "[user]one\n[user]two" in shared.engine.asked[-1][0]


def test_messages_wait_for_the_answer_before() -> None:
    with running() as server, opened(server, "/responses") as socket:  # also without /v1
        server.engine.delay_s = 0.01
        for text in "one", "two", "three":
            socket.send(json.dumps({"type": "response.create", "model": "any", "input": text}))
        done: list[str] = []
        while len(done) < 3:
            event = json.loads(socket.recv(10))
            assert server.engine.running <= 1
            if event["type"] == "response.completed":
                done.append(event["response"]["output"][0]["content"][0]["text"])
        assert done == ["one", "two", "three"]


# ---- what is refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "param"),
    [
        ("{", None),
        ("[]", "the body"),
        ("{}", "type"),
        ('{"type": "response.steer", "input": []}', "type"),
        ('{"type": "response.create", "stream_id": "a", "input": "Hi"}', "stream_id"),
        ('{"type": "response.create", "background": true, "input": "Hi"}', "background"),
        ('{"type": "response.create", "generate": 1, "input": "Hi"}', "generate"),
        ('{"type": "response.create"}', "input"),
    ],
)
def test_wrong_messages(text: str, param: str | None, shared: Running) -> None:
    with opened(shared) as socket:
        status, code, blamed = refusal(socket, text)
        assert status == 400 and code and blamed == param
        assert asked(socket, input="Hi")[-1]["type"] == "response.completed"


def test_an_error_during_an_answer() -> None:
    with running() as server, opened(server) as socket:
        server.engine.fail = RuntimeError("no")
        event = asked(socket, input="Hello")[-1]
        assert event["type"] == "error" and event["status"] == 500 and "RuntimeError" in event["error"]["message"]
        server.engine.fail = None
        assert asked(socket, input="Hello")[-1]["type"] == "response.completed"


def test_keys_and_origins_are_checked() -> None:
    with running(api_keys=("key",)) as server:
        with connected(server, "key") as connection:
            assert answer(connection, model="any", input="Hi").output_text == "Hi"
        bearer = "Bearer key"
        for headers, status in (
            ({}, 401),
            ({"Authorization": "Bearer other"}, 401),
            ({"Authorization": bearer, "Origin": "https://example.org"}, 403),
        ):
            with pytest.raises(InvalidStatus) as caught:
                opened(server, **headers)
            assert caught.value.response.status_code == status
            assert json.loads(caught.value.response.body or b"")["error"]["message"]
        opened(server, Authorization=bearer, Origin=server.url).close()


def test_other_paths_have_no_socket(shared: Running) -> None:
    for path in "/", "/v1/models", "/v1/chat/completions", "/v1/responses/resp_1", "/other":
        with pytest.raises(InvalidStatus) as caught:
            opened(shared, path)
        assert caught.value.response.status_code == 404
    assert shared.http.get("/v1/responses").status_code == 405


def test_a_model_that_loads() -> None:
    with running(loaded=False) as server:
        with pytest.raises(InvalidStatus) as caught:
            opened(server)
        assert caught.value.response.status_code == 503 and caught.value.response.headers["retry-after"]


# ---- ends -----------------------------------------------------------------------------------------------


def test_a_client_that_leaves_ends_its_answer() -> None:
    with running() as server, opened(server) as socket:
        server.engine.hold_after = 1
        for text in "Hello", "Never asked":
            socket.send(json.dumps({"type": "response.create", "model": "any", "input": text}))
        wait_for(lambda: server.engine.running == 1)
        socket.close()
        wait_for(lambda: server.engine.open == server.service.in_flight == 0)
        wait_for(lambda: server.metric('llmcl_requests_total{api="/v1/responses",status="101"}') == 1)
        assert server.metric('llmcl_requests_total{api="/v1/responses",status="499"}') >= 1
        assert len(server.engine.asked) == 1


def test_messages_are_bounded() -> None:
    with running(max_body_bytes=1000) as server:
        with opened(server) as socket, pytest.raises(ConnectionClosed) as caught:
            socket.send("x" * 1001)
            socket.recv(10)
        assert caught.value.rcvd is not None and caught.value.rcvd.code == 1009
        server.engine.hold_after = 1
        with opened(server) as socket, pytest.raises(ConnectionClosed) as caught:
            for _ in range(3):
                socket.send(json.dumps({"type": "response.create", "model": "any", "input": "x" * 500}))
            while True:
                socket.recv(10)
        assert caught.value.rcvd is not None and caught.value.rcvd.code == 1009


def test_a_connection_has_a_longest_life() -> None:
    with running(socket_s=0.1) as server, opened(server) as socket:
        event = json.loads(socket.recv(10))
        assert event["error"]["code"] == "websocket_connection_limit_reached"
        with pytest.raises(ConnectionClosed):
            socket.recv(10)


def test_a_server_that_stops_closes_the_connection() -> None:
    with running() as server:
        socket = opened(server)
        server.service.stop()
        with pytest.raises(ConnectionClosed) as caught:
            socket.recv(10)
        assert caught.value.rcvd is not None and caught.value.rcvd.code == 1012
