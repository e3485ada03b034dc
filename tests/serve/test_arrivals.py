"""The engine is told of requests as soon as they are there, and that each of them has begun or never will."""

from __future__ import annotations

import json
import socket
from threading import Event
from typing import Any

import pytest
from fake_server import Running, wait_for

LONG_S = 20.0


def send(server: Running, path: str, body: dict[str, Any]) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])))
    data = json.dumps(body).encode()
    connection.sendall(
        f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data
    )
    return connection


def hold(server: Running) -> Event:
    """Holds the server's event loop up, until the event is set."""
    server.http.get("/health")
    (connection,) = server.server.server_state.connections
    begun, held = Event(), Event()
    connection.loop.call_soon_threadsafe(lambda: (begun.set(), held.wait(LONG_S)))
    assert begun.wait(LONG_S)
    return held


def expected_at_each_beginning(server: Running) -> list[int]:
    """Filled as requests begin: how many were expected then."""
    engine, found = server.engine, []
    stream = engine.stream

    def noting(prompt: Any, **options: Any) -> Any:
        found.append(engine.expected)
        return stream(prompt, **options)

    engine.stream = noting  # type: ignore[method-assign]
    return found


def test_requests_that_came_together_are_expected_together(server: Running) -> None:
    found, held = expected_at_each_beginning(server), hold(server)
    messages = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    bodies = {
        "/v1/completions": {"prompt": [5, 6]},
        "/v1/chat/completions": messages,
        "/v1/messages": messages,
        "/v1/responses": {"input": "Hi"},
    }
    connections = [send(server, path, body) for path, body in bodies.items()]
    held.set()
    wait_for(lambda: len(found) == 4)
    assert found[0] == 4  # the first, which needs no template, begins before the others
    wait_for(lambda: not server.engine.expected)
    for connection in connections:
        connection.close()


@pytest.mark.parametrize("fields", [{"temperature": "hot"}, {"prompt": None}, {"prompt": [1] * 3000}, {"n": 100}])
def test_a_request_that_is_refused_is_expected_no_longer(fields: dict[str, Any], server: Running) -> None:
    assert server.post("/v1/completions", {"prompt": "Hi", **fields}).status_code == 400
    wait_for(lambda: not server.engine.expected)


def test_other_requests_are_not_expected(server: Running) -> None:
    found, held = expected_at_each_beginning(server), hold(server)
    connections = [send(server, "/tokenize", {"content": "Hi"}), send(server, "/v1/completions", {"prompt": "Hi"})]
    held.set()
    wait_for(lambda: len(found) == 1)
    assert found == [1]
    for connection in connections:
        connection.close()
