"""Images that the server fetches: from the hosts that it was told to, and from nowhere else."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import pytest
from image_server import ImageEngine, image_server, picture

from llmcl.errors import UsageError
from llmcl.serve import remote_images
from llmcl.serve.remote_images import FetchError, fetch, is_public, parse_hosts


class Host:
    """A web server on loopback. asked: the paths and Host headers."""

    def __init__(self, server: HTTPServer):
        self.port = server.server_port
        self.listed = f"127.0.0.1:{self.port}"
        self.url = f"http://{self.listed}"
        self.asked: list[tuple[str, str | None]] = []


@contextmanager
def web_host() -> Iterator[Host]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            host.asked.append((self.path, self.headers["host"]))
            if self.path == "/slow":
                time.sleep(0.5)
                return
            if self.path.startswith("/to/"):
                self.send_response(302)
                self.send_header("Location", self.path.removeprefix("/to/"))
                self.end_headers()
                return
            data = {"/large": bytes(5000), "/text": b"<html>"}.get(self.path, picture())
            self.send_response(404 if self.path == "/none" else 200)
            if self.path != "/large":
                self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        host = Host(server)
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield host
        server.shutdown()


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with web_host() as opened:
        yield opened


def fetched(url: str, *hosts: str) -> bytes:
    return asyncio.run(fetch(url, parse_hosts(",".join(hosts)) if hosts else ()))


def test_an_image_is_fetched_once_for_a_conversation(host: Host) -> None:
    host.asked.clear()
    with image_server(image_hosts=(host.listed,)) as server:
        part = {"type": "input_image", "image_url": f"{host.url}/a.png?x=1"}
        first = server.post("/v1/responses", {"input": [{"role": "user", "content": [part]}]}).json()
        answer = server.post("/v1/responses", {"input": "b", "previous_response_id": first["id"]})
        assert answer.status_code == 200 and host.asked == [("/a.png?x=1", host.listed)]
        assert isinstance(server.engine, ImageEngine) and server.engine.images() == [(3, 2)]
        source = {"type": "url", "url": f"{host.url}/b.png"}
        said = [{"role": "user", "content": [{"type": "image", "source": source}]}]
        assert server.post("/v1/messages", {"messages": said, "max_tokens": 1}).status_code == 200
        source["url"] = f"{host.url}/text"
        refused = server.post("/v1/messages", {"messages": said, "max_tokens": 1})
        assert refused.status_code == 400 and "messages[0].content[0]: " in refused.json()["error"]["message"]


def test_redirects_stay_on_the_list(host: Host) -> None:
    assert fetched(f"{host.url}/to//a.png", host.listed) == picture()
    for there in (
        "http://127.0.0.2/a.png",
        "http://localhost/a.png",
        "file:///etc/passwd",
        f"{host.url}@evil.example/",
    ):
        with pytest.raises(FetchError, match=r"not fetched from|expected a data URL|names a user"):
            fetched(f"{host.url}/to/{there}", host.listed)
    with pytest.raises(FetchError, match="redirects"):
        fetched(f"{host.url}/to//to//to//to//a.png", host.listed)


@pytest.mark.parametrize(
    ("path", "word"), [("/none", "status 404"), ("/large", "more than"), ("/slow", "not fetched within")]
)
def test_bounds(path: str, word: str, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_images, "MAX_BYTES", 4000)
    monkeypatch.setattr(remote_images, "FETCH_S", 0.2)
    with pytest.raises(FetchError, match=word):
        fetched(host.url + path, host.listed)


def test_a_server_that_closes_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        Thread(target=lambda: listening.accept()[0].close(), daemon=True).start()
        with pytest.raises(FetchError, match="cannot be fetched"):
            fetched(f"http://127.0.0.1:{port}/", f"127.0.0.1:{port}")


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/a.png",
        "http://other.example/",
        "http://images.example.org:8080/",
        "http://images.example.org.evil.example/",
        "http://images.example.org@evil.example/",
        "http://evil.example/#@images.example.org",
        "http://evil.example\\@images.example.org/",
        "http://images.example.org\n.evil.example/",
        "http://2130706433/",
        "http://0x7f.1/",
        "http://[::ffff:127.0.0.1]/",
        "ftp://images.example.org/",
        "file://images.example.org/etc/passwd",
        "//images.example.org/",
        "http://",
        "http://[",
        "http://images.example.org:99999/",
        "http://images.\u00e9xample.org/",
        "http://images.example.org/" + "a" * 5000,
    ],
)
def test_other_addresses_are_not_fetched(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncio, "open_connection", None)
    with pytest.raises(FetchError) as refused:
        fetched(url, "images.example.org", "192.0.2.7")
    assert str(refused.value).isprintable() and len(str(refused.value)) < 400


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "10.1.2.3", "169.254.169.254", "::1", "::ffff:192.168.0.1", "fe80::1"]
)
def test_a_name_with_a_private_address_is_not_asked(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The public address before it does not help."""
    asked = []

    async def resolve(self: Any, host: str, port: int, **_: Any) -> list[Any]:
        asked.append(host)
        return [(None, None, 0, "", (each, port)) for each in ("93.184.215.14", address)]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", resolve)
    monkeypatch.setattr(asyncio, "open_connection", None)
    with pytest.raises(FetchError, match="not public"):
        fetched("http://Images.Example.org./", "images.example.org")
    assert asked == ["images.example.org"]


def test_the_connection_goes_to_the_address_that_was_checked(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second look at the name could give another address."""
    connected = []
    connect = asyncio.open_connection

    async def resolve(self: Any, host: str, port: int, **_: Any) -> list[Any]:
        return [(None, None, 0, "", ("93.184.215.14", port))]

    async def open_connection(address: str, port: int, **options: Any) -> Any:
        connected.append(address)
        return await connect("127.0.0.1", port, **options)

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", resolve)
    monkeypatch.setattr(asyncio, "open_connection", open_connection)
    named = f"images.example.org:{host.port}"
    assert fetched(f"http://{named}/a.png", named) == picture()
    assert connected == ["93.184.215.14"] and host.asked[-1] == ("/a.png", named)


def test_public_addresses() -> None:
    for text in ("93.184.215.14", "2606:2800:21f:cb07::1", "::ffff:93.184.215.14", "64:ff9b::5db8:d70e"):
        assert is_public(text), text
    private = ("0.0.0.0", "100.64.0.1", "192.0.2.7", "224.0.0.1", "255.255.255.255", "fd00::1", "ff02::1", "::")
    carried = ("64:ff9b::7f00:1", "2002:7f00:1::", "fe80::1%eth0", "::ffff:10.0.0.1", "no address")
    for text in (*private, *carried):
        assert not is_public(text), text


def test_lists_of_hosts() -> None:
    assert parse_hosts("A.example., 192.0.2.7:08000,[2001:DB8:0::7]:80") == (
        "a.example",
        "192.0.2.7:8000",
        "[2001:db8::7]:80",
    )
    assert parse_hosts(None) == ()
    for text in ("", "a,,b", "https://a.example", "a.example/x", "*", "a:0", "a:70000", "[::1", "[zz]", "a b", "[1:2]"):
        with pytest.raises(UsageError, match="--allow-remote-images"):
            parse_hosts(text)
