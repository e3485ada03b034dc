"""A client that goes away ends its request, wherever that is; and how much is taken on at once."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from fake_server import FakeEngine, Running, byte_tokenizer, running, wait_for

USER: list[Any] = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def held() -> Iterator[Running]:
    """A server whose answers stop after two tokens and never end."""
    engine = FakeEngine(byte_tokenizer())
    engine.hold_after = 2
    with running(engine) as server:
        yield server


def ask(
    server: Running, path: str = "/v1/chat/completions", *, room: int | None = None, **fields: Any
) -> socket.socket:
    """A connection on which a request was sent. room: bytes that the system takes for a client who does not read."""
    body = json.dumps({"messages": USER, "prompt": "Hello", "max_tokens": 50, **fields}).encode()
    connection = socket.socket()
    if room is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)  # else it may take more and more
    connection.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages"])
def test_a_client_that_leaves_ends_its_request(path: str, stream: bool, held: Running) -> None:
    connection = ask(held, path, stream=stream)
    wait_for(lambda: held.engine.running)
    if stream:
        assert connection.recv(100)
    connection.close()
    wait_for(lambda: not held.engine.open and not held.service.in_flight)
    assert held.metric(f'llmcl_requests_total{{api="{path}",status="499"}}') == 1


def test_all_answers_of_a_request_end(held: Running) -> None:
    connection = ask(held, n=5)
    wait_for(lambda: held.engine.open == 5)
    assert held.metric("llamacpp:requests_processing") == 2 and held.metric("llamacpp:requests_deferred") == 3
    connection.close()
    wait_for(lambda: not held.engine.open)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_waits_may_leave_too(stream: bool, held: Running) -> None:
    running_ones = [ask(held), ask(held)]
    wait_for(lambda: held.engine.running == 2)
    waiting = ask(held, stream=stream)
    wait_for(lambda: held.engine.open == 3)
    waiting.close()
    wait_for(lambda: held.engine.open == 2)
    assert held.engine.running == 2
    for connection in running_ones:
        connection.close()


def test_a_full_queue_refuses(held: Running) -> None:
    connections = []
    for n in range(1, 7):  # 2 places, which the first have, and a queue of 4
        connections.append(ask(held, stream=True))
        wait_for(lambda n=n: held.engine.open == n)  # type: ignore[misc]
    refused = held.chat()
    assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
    with openai.OpenAI(base_url=f"{held.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.RateLimitError) as error:
            client.chat.completions.create(model="any", messages=USER, stream=True)
        assert error.value.code == "queue_full"
        connections[0].close()
        wait_for(lambda: held.service.in_flight == 5)
        held.engine.hold_after = None
        connections[1].close()
        answer = client.chat.completions.create(model="any", messages=USER, timeout=60)  # from the queue
        assert answer.choices[0].message.content == "Hello"
    for connection in connections:
        connection.close()


def test_a_silent_stream_says_that_it_lives() -> None:
    engine = FakeEngine(byte_tokenizer())
    engine.hold_after = 1
    with running(engine, ping_s=0.05) as server:
        connection = ask(server, stream=True)
        received = b""
        while received.count(b'"delta": {}') < 2:
            received += connection.recv(1000)
        connection.close()


def test_a_client_that_reads_nothing_is_cut_off() -> None:
    engine = FakeEngine(byte_tokenizer())
    engine.reply = lambda text: "x" * 1900
    with running(engine, send_s=0.2) as server:
        server.listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        connection = ask(server, "/v1/completions", room=4096, stream=True, max_tokens=2000)
        wait_for(lambda: server.engine.asked)  # `open` it may be for less time than a busy machine takes to look
        wait_for(lambda: server.metric('llmcl_requests_total{api="/v1/completions",status="499"}') == 1)
        wait_for(lambda: not server.engine.open)
        connection.close()
