"""Who is let in, and what a request may cost before it is understood."""

from __future__ import annotations

import gzip
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest
from fake_server import Running, running

from llmcl.errors import UsageError
from llmcl.serve.settings import Settings


@pytest.fixture(scope="module")
def locked() -> Iterator[Running]:
    with running(api_keys=("secret-1", "secret-2"), max_body_bytes=5000, max_header_bytes=4096) as server:
        yield server


def connect(server: Running) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])))
    connection.settimeout(10)
    return connection


def everything(connection: socket.socket) -> bytes:
    received = b""
    while data := connection.recv(4096):
        received += data
    return received


@pytest.mark.parametrize("key", ["secret-1", "secret-2"])
def test_each_key_opens_in_both_clients_ways(key: str, locked: Running) -> None:
    assert locked.chat().status_code == 401
    for headers in ({"authorization": f"Bearer {key}"}, {"authorization": f"bearer {key}"}, {"x-api-key": key}):
        assert locked.http.get("/v1/models", headers=headers).status_code == 200
    with openai.OpenAI(base_url=f"{locked.url}/v1", api_key=key, max_retries=0) as client:
        assert client.models.list().data


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": "Bearer"},
        {"authorization": "Bearer secret"},
        {"authorization": "Basic secret-1"},
        {"authorization": "secret-1"},
        {"x-api-key": "secret-1 secret-2"},
        {"x-api-key": "secr\u00e9t"},
    ],
    ids=str,
)
@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/props", "/nowhere"])
def test_other_keys_do_not(headers: dict[str, str], path: str, locked: Running) -> None:
    sent = {name: value.encode("latin-1") for name, value in headers.items()}
    answer = locked.http.get(path, headers=sent)  # type: ignore[arg-type]
    assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
    assert "secret" not in answer.text


def test_health_needs_no_key(locked: Running) -> None:
    assert locked.http.get("/health").status_code == 200


def test_the_key_is_looked_at_before_the_body(locked: Running) -> None:
    """The answer comes although not a byte of the body was sent, and the connection ends."""
    with connect(locked) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 4000\r\n\r\n")
        assert everything(connection).startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize("length", [b"content-length: 5001", b"content-length: " + b"9" * 18])
def test_a_large_body_is_refused_by_its_length(length: bytes, locked: Running) -> None:
    with connect(locked) as connection:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-api-key: secret-1\r\n"
        connection.sendall(head + length + b"\r\n\r\n")
        answer = everything(connection)
    assert answer.startswith(b"HTTP/1.1 413 ") and b"5000 bytes" in answer


def test_another_name_of_a_path_is_as_open_as_the_path(locked: Running) -> None:
    assert locked.http.get("/v1/health").status_code == 200
    assert locked.http.get("/models").status_code == locked.http.get("/v1/models").status_code == 401


def test_a_large_body_is_refused_in_chunks(locked: Running) -> None:
    with connect(locked) as connection:
        head = b"POST /v1/messages HTTP/1.1\r\nhost: x\r\nx-api-key: secret-1\r\ntransfer-encoding: chunked\r\n\r\n"
        connection.sendall(head + (b"400\r\n" + b"x" * 1024 + b"\r\n") * 5)
        answer = everything(connection)
    assert answer.startswith(b"HTTP/1.1 413 ") and b"request_too_large" in answer


def test_a_client_that_sends_all_of_a_large_body_reads_why_it_is_refused(locked: Running) -> None:
    """A connection that is closed with bytes in it that nobody read takes the answer with it."""
    for key, status in ((b"secret-1", b"413"), (b"wrong", b"401")):
        with connect(locked) as connection:
            length = b"\r\ncontent-length: 30000000\r\n\r\n"
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-api-key: " + key + length)
            connection.sendall(b"x" * 30_000_000)
            answer = everything(connection)
        assert answer.startswith(b"HTTP/1.1 " + status) and b"connection: close" in answer and b"message" in answer


def test_a_client_that_never_ends_its_refused_body_is_cut_off() -> None:
    with running(max_body_bytes=5000, linger_s=0.5) as server, connect(server) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 1000000000\r\n\r\n")
        start = time.monotonic()
        with pytest.raises(OSError):
            while time.monotonic() - start < 60:
                connection.sendall(b"x" * 1000)
        assert 0.4 < time.monotonic() - start < 60


def test_two_lengths_of_a_body_are_refused(server: Running) -> None:
    with connect(server) as connection:
        lengths = b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n" + lengths)
        assert everything(connection).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("coding", ["gzip", "deflate", "x"])
def test_a_compressed_body_is_refused(coding: str, locked: Running) -> None:
    """It could grow beyond any limit."""
    headers = {"x-api-key": "secret-1", "content-encoding": coding}
    answer = locked.http.post("/v1/completions", content=gzip.compress(b'{"prompt": "a"}'), headers=headers)
    assert answer.status_code == 415 and coding in answer.json()["error"]["message"]
    headers["content-encoding"] = "identity"
    assert locked.http.post("/v1/completions", content=b'{"prompt": "a"}', headers=headers).status_code == 200


def test_large_headers_are_refused(locked: Running) -> None:
    with connect(locked) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nx: " + b"x" * 5000)
        assert everything(connection).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\nx: "])
def test_slow_headers_are_cut_off(sent: bytes) -> None:
    with running(header_s=0.3) as server, connect(server) as connection:
        connection.sendall(sent)
        start = time.monotonic()
        while time.monotonic() - start < 60:
            try:
                connection.sendall(b"x" if sent else b"")  # a byte now and then changes nothing
                connection.settimeout(0.1)
                if connection.recv(100) == b"":
                    break
            except TimeoutError:
                continue
            except OSError:
                break
        assert time.monotonic() - start < 60


def test_headers_in_time_are_no_reason_to_cut(server: Running) -> None:
    """The deadline is one of the headers alone, for the second request of a connection as well."""
    engine = server.engine
    engine.delay_s = 0.25  # for the six tokens of "Hello": longer than the deadline, which a busy machine must keep
    with running(engine, header_s=1.0) as slow:
        for _ in range(2):
            assert slow.chat().status_code == 200


def test_a_slow_body_is_cut_off() -> None:
    with running(body_s=0.2) as server, connect(server) as connection:
        connection.sendall(b'POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 50\r\n\r\n{"pro')
        assert everything(connection).startswith(b"HTTP/1.1 408 ")


# ---- the file system and templates --------------------------------------------------------------------

SECRET = "secret-of-this-machine"


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_text(SECRET)
    return tmp_path / "secret"


@contextmanager
def no_file_opened(path: Path) -> Iterator[None]:
    """Fails where this process, the server's, opens the file meanwhile."""
    if not _OPENED:
        sys.addaudithook(_note_open)
    _OPENED[:] = [""]
    yield
    assert not [name for name in _OPENED if path.name in name]


_OPENED: list[str] = []


def _note_open(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open" and isinstance(arguments[0], (str, bytes, os.PathLike)):
        _OPENED.append(os.fsdecode(arguments[0]))


def test_the_hook_sees_what_is_opened(secret: Path) -> None:
    with pytest.raises(AssertionError), no_file_opened(secret):
        secret.read_text()


@pytest.mark.parametrize(
    "target",
    [
        "{}",
        "/..{}",
        "/../../../../..{}",
        "/%2e%2e/%2e%2e{}",
        "/v1/models/..{}",
        "/v1/models{}",
        "//{}",
        "/?x={}",
        "/.{}",
    ],
)
def test_no_path_reaches_the_file_system(target: str, secret: Path, shared: Running) -> None:
    with connect(shared) as connection, no_file_opened(secret):
        path = target.format(secret).encode()
        connection.sendall(b"GET " + path + b" HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n")
        answer = everything(connection)
    assert answer.startswith((b"HTTP/1.1 404 ", b"HTTP/1.1 200 ")) and SECRET.encode() not in answer
    assert (b" 200 " in answer[:15]) == (target == "/?x={}")


@pytest.mark.parametrize(
    "request_line", ["GET /%00%1b[2J", "A /\u2028%E2%80%AE", "PUT /v1/models", "GET /page/%00", "GET /v1/models/%1b"]
)
def test_a_path_cannot_write_to_a_terminal(request_line: str, shared: Running) -> None:
    """The message goes to the log and to the client's terminal."""
    with connect(shared) as connection:
        connection.sendall(f"{request_line} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n".encode())
        status, _, body = everything(connection).partition(b"\r\n\r\n")
    assert status.startswith((b"HTTP/1.1 404 ", b"HTTP/1.1 405 ", b"HTTP/1.1 400 "))
    assert not body.startswith(b"{") or json.loads(body)["error"]["message"].isprintable()


def test_no_field_names_a_file_or_brings_a_template(secret: Path, shared: Running) -> None:
    template = "{% include '" + str(secret) + "' %}{{ ''.__class__.__mro__ }}"
    with no_file_opened(secret):
        for fields in (
            {"model": str(secret)},
            {"chat_template": template, "chat_template_kwargs": {"chat_template": template, "template": template}},
            {"documents": [{"path": str(secret)}], "slot_save_path": str(secret)},
        ):
            assert shared.chat("Hello", **fields).status_code == 200
            assert shared.engine.asked[-1][0] == "[user]Hello\n[assistant]"
        assert shared.chat("Hello", lora=str(secret)).status_code == 400
        assert shared.chat("Hello", lora=[{"id": str(secret)}]).status_code == 400
        part = {"type": "image_url", "image_url": {"url": f"file://{secret}"}}
        said = [{"role": "user", "content": [part]}]
        assert shared.post("/v1/chat/completions", {"messages": said}).status_code == 400
        answer = shared.chat(template)  # a message is no template
        assert answer.json()["choices"][0]["message"]["content"] == template


# ---- browsers -----------------------------------------------------------------------------------------


def test_other_pages_may_not_use_the_server(shared: Running) -> None:
    for origin in ("https://evil.example", "null", "http://127.0.0.1:1"):
        answer = shared.http.post("/v1/chat/completions", content=b"{}", headers={"origin": origin})
        assert answer.status_code == 403 and "--cors-origin" in answer.text
    assert shared.http.get("/health", headers={"origin": shared.url}).status_code == 200


def test_nor_by_a_name_that_was_bent_to_this_machine(shared: Running) -> None:
    answer = shared.http.get("/v1/models", headers={"host": "evil.example", "origin": "http://evil.example"})
    assert answer.status_code == 403 and "--api-key" in answer.text
    for host in ("localhost:8080", "127.0.0.1", "[::1]:80", "llm.localhost"):
        assert shared.http.get("/v1/models", headers={"host": host}).status_code == 200, host


@pytest.mark.parametrize(
    "host",
    [
        "[::1]evil.com",
        "[::1]:80evil.com",
        "127.0.0.1:80@evil.com",
        "127.0.0.1@evil.com",
        "127.0.0.1:80:80",
        "127.0.0.1/evil.com",
        "127.0.0.1:evil.com",
        "localhost#evil.com",
        "localhost,evil.com",
        "[localhost]",
        "[::1",
        "::1]",
        "[]",
        ":80",
        "127.0.0.1 evil.com",
    ],
)
def test_nor_by_a_host_that_only_begins_like_this_machine(host: str, shared: Running) -> None:
    assert raw(shared, f"host: {host}").startswith(b"HTTP/1.1 403 ")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ("host: 127.0.0.1\r\norigin: http://[", 403),
        ("host: 127.0.0.1\r\norigin: http://[::1", 403),
        ("host: 127.0.0.1\r\norigin: http://127.0.0.1", 200),
        ("host: 127.0.0.1\r\norigin: https://127.0.0.1", 200),
        ("host: LOCALHOST:80\r\norigin: http://localhost:80", 200),
        ("host: 127.0.0.1\r\norigin: ftp://127.0.0.1", 403),
        ("host: 127.0.0.1\r\norigin: http://127.0.0.1/x", 403),
        ("host: 127.0.0.1\r\norigin: http://127.0.0.1\r\norigin: https://evil.com", 403),
        ("host: 127.0.0.1\r\norigin: https://evil.com\r\norigin: http://127.0.0.1", 403),
        ("host: 127.0.0.1\r\norigin:", 403),
        ("host:\r\norigin: null", 403),
        ("host:\r\norigin:", 403),
        ("host:\r\norigin: http://", 403),
        ("host:", 200),
        ("host: 127.0.0.1\r\nhost: evil.com", 400),
    ],
)
def test_origins_and_hosts_that_no_browser_writes(headers: str, status: int, shared: Running) -> None:
    assert raw(shared, headers).startswith(b"HTTP/1.1 %d " % status)


def raw(server: Running, headers: str) -> bytes:
    """The answer to a request with exactly these headers."""
    with connect(server) as connection:
        connection.sendall(f"GET /v1/models HTTP/1.1\r\n{headers}\r\nconnection: close\r\n\r\n".encode())
        return everything(connection)


def test_a_request_without_a_host_is_no_browsers(shared: Running) -> None:
    """Health checks of proxies ask in HTTP/1.0."""
    with connect(shared) as connection:
        connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert everything(connection).startswith(b"HTTP/1.1 200 ")


def test_a_page_that_was_named_may() -> None:
    page = {"origin": "https://good.example"}
    with running(api_keys=("k",), cors_origins=("https://good.example",)) as server:
        asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        answer = server.http.options("/v1/chat/completions", headers=page | asked)
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == page["origin"]
        refused = server.http.get("/v1/models", headers=page)
        assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == page["origin"]
        assert server.http.get("/v1/models", headers=page | {"x-api-key": "k"}).status_code == 200
        assert server.http.get("/v1/models", headers={"origin": "https://bad.example"}).status_code == 403


# ---- settings -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.7", "example.org", ""])
def test_other_machines_need_a_key(host: str) -> None:
    with pytest.raises(UsageError, match="--api-key KEY, or --no-auth"):
        Settings(host=host)
    Settings(host=host, api_keys=("k",))
    Settings(host=host, no_auth=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_this_machine_needs_none(host: str) -> None:
    assert Settings(host=host).is_local


@pytest.mark.parametrize("key", ["", "a b", "k\u00e9y", "a\n"])
def test_keys_that_no_header_can_carry(key: str) -> None:
    with pytest.raises(UsageError, match="visible ASCII") as refused:
        Settings(api_keys=("good", key))
    assert "good" not in str(refused.value)


def test_a_key_and_none_contradict() -> None:
    with pytest.raises(UsageError, match="--no-auth and --api-key"):
        Settings(api_keys=("k",), no_auth=True)


@pytest.mark.parametrize(
    ("target", "host", "status"),
    [
        ("http://127.0.0.1/v1/models", "127.0.0.1", 200),
        ("HTTP://localhost:8080/v1/models?x=1", "evil.example", 200),  # the target's counts
        ("http://evil.example/v1/models", "127.0.0.1", 403),
        ("http://127.0.0.1/v1/nothing", "127.0.0.1", 404),
        ("http://127.0.0.1", "127.0.0.1", 200),
        ("http://127.0.0.1?x=1", "127.0.0.1", 200),
        ("http://evil.example@127.0.0.1/v1/models", "127.0.0.1", 404),
        ("http:///v1/models", "127.0.0.1", 404),
        ("*", "127.0.0.1", 404),
    ],
)
def test_a_target_in_absolute_form_is_its_path(target: str, host: str, status: int) -> None:
    """As clients send it that take the server for a proxy."""
    with running() as server, connect(server) as connection:
        connection.sendall(f"GET {target} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n".encode())
        assert everything(connection).startswith(b"HTTP/1.1 %d " % status)


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_the_head_of_a_stream(version: str) -> None:
    """Our own headers, and those that say how the body ends."""
    with running() as server, connect(server) as connection:
        body = b'{"prompt": "Hello", "stream": true}'
        head = f"POST /v1/completions HTTP/{version}\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
        connection.sendall(head.encode() + b"connection: close\r\n\r\n" + body)
        lines, _, rest = everything(connection).partition(b"\r\n\r\n")
    status, *headers = lines.decode("ascii").split("\r\n")
    values = dict(header.lower().split(": ", 1) for header in headers)
    assert status == "HTTP/1.1 200 OK" and len(values) == len(headers)
    assert values["content-type"] == "text/event-stream; charset=utf-8" and values["connection"] == "close"
    assert values["x-request-id"].startswith("req_") and "date" in values
    assert values.get("transfer-encoding") == (None if version == "1.0" else "chunked")
    assert (b"[DONE]\n\n" if version == "1.0" else b"\r\n0\r\n\r\n") in rest
