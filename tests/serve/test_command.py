"""`llmcl serve` as a command: what it refuses before it listens, and its life from the start to a signal."""

from __future__ import annotations

import errno
import gc
import os
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from echo_engine import Engine
from fake_server import FakeEngine, byte_tokenizer, free_port, served, wait_for

from llmcl.architectures.embedding import NO_SETTINGS
from llmcl.cli.serve import model_name
from llmcl.engine.images import Images
from llmcl.errors import CheckpointError, UsageError
from llmcl.serve.model_facts import ModelFacts
from llmcl.serve.run import listen, serve
from llmcl.serve.settings import Settings


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--host", "0.0.0.0"], ["--host '0.0.0.0'", "--api-key", "--no-auth"]),
        (["--no-auth", "--api-key", "k"], ["--no-auth", "--api-key"]),
        (["--api-key", "two words"], ["API key"]),
        (["--api-key-file", "no/such/file"], ["--api-key-file no/such/file", "cannot be read"]),
        (["--port", "65536"], ["--port", "65535"]),
        (["--max-sequences", "0"], ["--max-sequences"]),
        (["--max-queue", "-1"], ["--max-queue"]),
        (["--drain-seconds", "-1"], ["--drain-seconds"]),
        (["--cache-file-size", "0"], ["--cache-file-size"]),
        (["--allow-remote-images", "a.example,https://b.example"], ["--allow-remote-images", "'https://b.example'"]),
        (["--log-format", "xml"], ["--log-format", "text, json"]),
        (["--host", "no.such.host.invalid", "--no-auth"], ["no.such.host.invalid", "cannot listen"]),
    ],
    ids=lambda value: " ".join(value)[:30],
)
def test_bad_options_end_it_before_it_listens(
    options: list[str], said: list[str], engine: Engine, invoke: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke("serve", "-m", "m", *options) == 2
    errors = capsys.readouterr().err
    assert all(word in errors for word in said), errors
    assert not engine.loaded


def test_a_port_in_use(engine: Engine, invoke: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    with listen("127.0.0.1", 0)[0] as taken:
        port = str(taken.getsockname()[1])
        assert invoke("serve", "-m", "m", "--port", port) == 2
    assert f"--port {port}: cannot listen" in capsys.readouterr().err


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6")
def test_all_addresses_are_those_of_both_versions() -> None:
    with listen("::", 0)[0] as listening:
        for host in "127.0.0.1", "::1":
            socket.create_connection((host, listening.getsockname()[1]), 5).close()


@pytest.fixture
def resolved(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes every name have these addresses."""

    def resolve(*addresses: str) -> None:
        def found(host: str, port: int, **_: Any) -> list[Any]:
            families = [socket.AF_INET6 if ":" in address else socket.AF_INET for address in addresses]
            more = {socket.AF_INET6: (0, 0), socket.AF_INET: ()}
            pairs = zip(families, addresses, strict=True)
            return [(family, socket.SOCK_STREAM, 6, "", (address, port, *more[family])) for family, address in pairs]

        monkeypatch.setattr(socket, "getaddrinfo", found)

    return resolve


def addresses_of(listening: list[socket.socket]) -> list[str]:
    """Closes the sockets, which have one port."""
    names = [made.getsockname() for made in listening]
    for made in listening:
        made.close()
    assert len({port for _, port, *_ in names}) == 1
    return [name[0] for name in names]


@pytest.mark.parametrize("port", [0, 1])
def test_a_name_is_served_on_all_its_addresses(port: int, resolved: Callable[..., None]) -> None:
    if port:
        port = free_port()
    resolved("127.0.0.1", "127.0.0.2", "127.0.0.1")
    assert addresses_of(listen("localhost", port)) == ["127.0.0.1", "127.0.0.2"]
    if socket.has_dualstack_ipv6():
        resolved("::1", "127.0.0.1")
        assert addresses_of(listen("localhost", port)) == ["::1", "127.0.0.1"]


def test_an_address_of_another_machine_is_left_out(resolved: Callable[..., None]) -> None:
    resolved("192.0.2.1", "127.0.0.1")
    assert addresses_of(listen("localhost", 0)) == ["127.0.0.1"]
    resolved("192.0.2.1")
    with pytest.raises(UsageError, match="--host localhost --port 0: cannot listen there"):
        listen("localhost", 0)


def test_a_port_in_use_on_one_address_is_in_use(resolved: Callable[..., None]) -> None:
    with listen("127.0.0.2", 0)[0] as taken:
        port = taken.getsockname()[1]
        resolved("127.0.0.1", "127.0.0.2")
        with pytest.raises(UsageError, match="cannot listen"):
            listen("localhost", port)
        socket.create_server(("127.0.0.1", port)).close()  # nothing listens there


def test_a_free_port_is_looked_for_until_all_addresses_have_it(
    resolved: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    create, taken = socket.create_server, iter([True, True])

    def in_use_at_first(address: Any, **options: Any) -> socket.socket:
        if address[1] and next(taken, False):
            raise OSError(errno.EADDRINUSE, "in use")
        return create(address, **options)

    monkeypatch.setattr(socket, "create_server", in_use_at_first)
    resolved("127.0.0.1", "127.0.0.2")
    assert addresses_of(listen("localhost", 0)) == ["127.0.0.1", "127.0.0.2"]


@pytest.mark.parametrize("host", ["a" * 70, "no.such\nhost.invalid"])
def test_what_is_no_name_is_refused_on_one_line(host: str) -> None:
    with pytest.raises(UsageError, match=r"^--host .* cannot listen there .*$"):
        listen(host, 0)


@pytest.mark.parametrize("text", [None, "", b"\xff"])
@pytest.mark.parametrize("option", ["--api-key-file", "--cache-file"])
def test_names_of_files_stand_on_one_line(
    option: str,
    text: str | bytes | None,
    engine: Engine,
    invoke: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    file = tmp_path / "a\nb"
    if option == "--cache-file":
        file.mkdir(exist_ok=True)
    elif text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert invoke("serve", "-m", "m", option, str(file)) == 2
    assert "a\\nb: " in capsys.readouterr().err


def test_an_empty_file_of_keys_opens_nothing(
    engine: Engine, invoke: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text("\n\n")
    assert invoke("serve", "-m", "m", "--api-key-file", str(tmp_path / "keys")) == 2
    assert "has no keys" in capsys.readouterr().err


def test_a_model_that_cannot_be_loaded_ends_it(
    engine: Engine, invoke: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import llmcl

    def load(model: str, **settings: Any) -> Any:
        raise CheckpointError("the file is damaged")

    monkeypatch.setattr(llmcl, "load", load)
    assert invoke("serve", "-m", "m", "--port", "0") == 6
    assert "error: the file is damaged" in capsys.readouterr().err


def test_options_reach_the_server(
    engine: Engine, invoke: Callable[..., int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also from variables; the keys of a file count with the others."""
    import llmcl.serve.run

    started: dict[str, Any] = {}
    fake = FakeEngine(byte_tokenizer())

    def run(settings: Settings, load: Callable[..., Any]) -> None:
        before = gc.get_stats()[2]["collections"]
        started.update(settings=settings, served=load(lambda *_: None))
        started["collections"] = gc.get_stats()[2]["collections"] - before

    def open_engine(**given: Any) -> Any:
        started["engine"] = given
        return SimpleNamespace(stream=fake.stream, max_context=99, close=lambda: started.update(closed=True))

    monkeypatch.setattr(llmcl.serve.run, "serve", run)
    for name, value in (
        ("tokenizer", fake.tokenizer),
        ("engine", open_engine),
        ("close", lambda: None),
        ("grammars", None),
        ("embedding", NO_SETTINGS),
    ):
        monkeypatch.setattr(engine, name, value, raising=False)
    facts: dict[str, Any] = {
        "bidirectional": False,
        "architecture": "llama",
        "hidden_size": 576,
        "dtype": "bfloat16",
        "n_parameters": lambda: 134_515_008,
    }
    monkeypatch.setattr(engine, "config", SimpleNamespace(vocab_size=258, **facts), raising=False)
    embedding, layer = SimpleNamespace(nbytes=100), SimpleNamespace(nbytes=10)
    weights = SimpleNamespace(embedding=embedding, matrices=[embedding, layer])  # a tied head
    model = SimpleNamespace(stages=[SimpleNamespace(weights=weights)])
    monkeypatch.setattr(engine, "model", model, raising=False)
    monkeypatch.setattr(engine, "images", Images("m", lambda progress: None))
    monkeypatch.setenv("LLMCL_API_KEY", "one two")
    monkeypatch.setenv("LLMCL_MAX_QUEUE", "5")
    (tmp_path / "keys").write_text("three\n\nfour\n")
    options = "--host 0.0.0.0 --port 0 --max-sequences 3 --drain-seconds 1.5 --log-format json --alias mine"
    origins = "-c 48 --kv-page-size 128 --cors-origin https://a.example --cors-origin https://b.example -q"
    origins += " --allow-remote-images A.example,192.0.2.7:80"
    keys = ["--api-key-file", str(tmp_path / "keys")]
    assert invoke("serve", "-m", "m", *options.split(), *origins.split(), *keys) == 0
    assert started["collections"] == 1  # not in the middle of an answer
    settings = started["settings"]
    assert settings.api_keys == ("one", "two", "three", "four")
    assert (settings.max_sequences, settings.max_queue, settings.drain_s) == (3, 5, 1.5)
    assert settings.image_hosts == ("a.example", "192.0.2.7:80")
    assert settings.cors_origins == ("https://a.example", "https://b.example") and settings.log_format == "json"
    assert engine.loaded["max_context"] == 48 and started["engine"].pop("progress")
    assert started["engine"] == {"max_sequences": 3, "kv_page_tokens": 128, "batch_invariant": False}
    made = started["served"]
    assert (made.name, made.max_context, made.vocab_size) == ("mine", 99, 258)
    assert made.facts == ModelFacts("llama", 134_515_008, 576, "float32", 110, is_gguf=False)
    assert not made.takes_images
    made.close()
    assert started["closed"]


def test_a_models_name_holds_no_folder(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    assert (
        model_name(str(tmp_path / "model-q4.gguf")) == "model-q4" and model_name(str(tmp_path / "folder")) == "folder"
    )
    assert model_name("owner/name") == "owner/name"


# ---- a life -------------------------------------------------------------------------------------------


@pytest.fixture
def life(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Life]:
    """Runs `serve` in this thread, which alone gets signals, and what a client does in another."""
    return Life


class Life:
    """helper: what a client does, and sends signals; it is called with this and a client that reached the server."""

    def __init__(self, helper: Callable[[Life, httpx.Client], None], hang_up: Any = lambda *_: None, **settings: Any):
        port = free_port()
        self.engine = FakeEngine(byte_tokenizer())
        self.load = threading.Event()
        self.closed = False
        problems: list[BaseException] = []

        def help() -> None:
            try:
                url = f"http://127.0.0.1:{port}"
                with httpx.Client(base_url=url, timeout=60, verify=False, trust_env=False) as client:
                    wait_for(lambda: answers(client))
                    helper(self, client)
            except BaseException as error:
                problems.append(error)
            finally:
                for _ in range(2):  # should it not have ended yet
                    self.signal()

        def load(progress: Any) -> Any:
            progress("reading the weights", 1, 2)
            self.load.wait(60)
            return served(self.engine, close=self.close)

        # What comes after the server's own end has this to meet, and not pytest's end.
        before = {sig: signal.signal(sig, signal.SIG_IGN) for sig in (signal.SIGINT, signal.SIGTERM)}
        before[signal.SIGHUP] = signal.signal(signal.SIGHUP, hang_up)
        thread = threading.Thread(target=help)
        thread.start()
        try:
            serve(Settings(port=port, quiet=True, **settings), load)
        finally:
            thread.join(90)
            for sig, handler in before.items():
                signal.signal(sig, handler)
        if problems:
            raise problems[0]

    def signal(self, which: int = signal.SIGTERM) -> None:
        os.kill(os.getpid(), which)

    def close(self) -> None:
        self.closed = True


def answers(client: httpx.Client) -> bool:
    try:
        return bool(client.get("/health").status_code)
    except httpx.TransportError:
        return False


def ask(client: httpx.Client) -> str:
    said = {"messages": [{"role": "user", "content": "Hello"}], "stream": True}
    return client.post("/v1/chat/completions", json=said).text


@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_lets_answers_end(which: int, life: Callable[..., Life]) -> None:
    """It listens while it loads; after the signal nothing new is taken on, and what is under way comes to its end."""
    seen: list[Any] = []

    def client_does(server: Life, client: httpx.Client) -> None:
        seen.append(client.get("/health").json()["doing"])
        server.load.set()
        wait_for(lambda: client.get("/health").status_code == 200)
        server.engine.reply, server.engine.delay_s = lambda text: "Hello" * 99, 0.2
        answer = threading.Thread(target=lambda: seen.append(ask(client)))
        answer.start()
        wait_for(lambda: server.engine.running)
        server.signal(which)
        wait_for(lambda: client.get("/health").json()["status"] == "stopping")
        refused = client.post("/v1/completions", json={"prompt": "x"})
        seen.append(refused.status_code)
        server.engine.delay_s = 0.0  # until now it was under way
        answer.join()

    done = life(client_does, drain_s=60)
    doing, status, text = seen
    assert doing == "reading the weights" and status == 503
    assert text.endswith("data: [DONE]\n\n") and '"content": "o"' in text and '"stop"' in text
    assert done.closed


def test_a_server_that_was_told_so_outlives_its_terminal(life: Callable[..., Life]) -> None:
    def client_does(server: Life, client: httpx.Client) -> None:
        server.load.set()
        wait_for(lambda: client.get("/health").status_code == 200)
        server.signal(signal.SIGHUP)
        assert ask(client).endswith("data: [DONE]\n\n")
        assert client.get("/health").status_code == 200

    life(client_does, signal.SIG_IGN)


def test_answers_that_do_not_end_are_cut(life: Callable[..., Life]) -> None:
    seen: list[str] = []

    def client_does(server: Life, client: httpx.Client) -> None:
        server.load.set()
        server.engine.hold_after = 1
        wait_for(lambda: client.get("/health").status_code == 200)

        def read() -> None:
            try:
                seen.append(ask(client))
            except httpx.RemoteProtocolError:
                seen.append("cut")

        answer = threading.Thread(target=read)
        answer.start()
        wait_for(lambda: server.engine.running)
        server.signal()
        answer.join()

    done = life(client_does, drain_s=0.3)
    assert seen == ["cut"] and done.closed and done.engine.open == 0


def test_a_signal_while_it_loads_ends_it(life: Callable[..., Life]) -> None:
    done = life(lambda server, client: server.signal())
    assert not done.closed
    done.load.set()
