"""64 clients at once, some of whom leave early: an answer is whole and right or refused, and nothing is left over.

They ask for 2 s, with LLMCL_TEST_LONG=1 for three minutes.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import random
import resource
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine_server import engine_server
from fake_batch import answer_of
from fake_server import END, FakeEngine, Running, byte_tokenizer, events, running, served, wait_for

from llmcl.engine.llm import LLM
from llmcl.ops.sample import SamplingParams
from llmcl.serve.run import MOST_FILES, allow_connections

N_CLIENTS = 64
N_IDLE = 1000
IDLE_MEMORY = 100 << 20  # bytes for these connections, the clients' sockets included
MORE_MEMORY = 48 << 20  # bytes that the process may have more at the end than after a third of the time

Ask = Callable[[random.Random], tuple[str, dict[str, Any], str]]
"""Draws a request: its path, its body, and the text of the answer."""


def seconds() -> float:
    return 180 if os.environ.get("LLMCL_TEST_LONG") == "1" else 2


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def one_client(http: httpx.AsyncClient, draw: random.Random, ask: Ask, seen: Counter[str], end: float) -> None:
    while time.monotonic() < end:
        path, body, expected = ask(draw)
        body["stream"] = draw.random() < 0.5
        leaves_after = draw.uniform(0.0, 0.2) if draw.random() < 0.3 else 300.0
        try:
            answer = await asyncio.wait_for(http.post(path, json=body), leaves_after)
        except asyncio.TimeoutError:
            seen["left"] += 1
            continue
        if answer.status_code == 429:
            assert answer.headers["retry-after"] == "1"
            seen["refused"] += 1
            await asyncio.sleep(draw.uniform(0.02, 0.1))
            continue
        assert answer.status_code == 200, answer.text
        objects = [json.loads(data) for _, data in events(answer.text)[:-1]] if body["stream"] else [answer.json()]
        assert "".join(said(found) for found in objects) == expected
        seen["answered"] += 1


def said(found: dict[str, Any]) -> str:
    """The text in a whole answer or a chunk of one, of either API."""
    assert "error" not in found, found
    choice = found["choices"][0]
    content = choice["text"] if "text" in choice else choice.get("message", choice.get("delta", {})).get("content")
    return str(content or "")


def load(server: Running, ask: Ask) -> Counter[str]:
    """What became of the requests of all clients; memory does not grow over the time."""
    seen: Counter[str] = Counter()
    memory: list[int] = []

    async def all_clients() -> None:
        limits, end = httpx.Limits(max_connections=N_CLIENTS), time.monotonic() + seconds()

        async def watch() -> None:
            await asyncio.sleep(seconds() / 3)
            memory.append(resident_bytes())

        async with httpx.AsyncClient(
            base_url=server.url, timeout=300, limits=limits, verify=False, trust_env=False
        ) as http:
            clients = (one_client(http, random.Random(n), ask, seen, end) for n in range(N_CLIENTS))
            await asyncio.gather(*clients, watch())

    asyncio.run(all_clients())
    wait_for(lambda: not server.service.in_flight)
    assert resident_bytes() - memory[0] < MORE_MEMORY
    print(dict(seen), f"{(resident_bytes() - memory[0]) / 2**20:+.1f} MiB")
    return seen


def test_idle_connections_cost_little() -> None:
    """1000 of them, after a request each, as clients keep them for the next one."""
    with more_files(3000), running(header_s=600.0, idle_s=600) as server, ExitStack() as opened:
        address = "127.0.0.1", int(server.url.rpartition(":")[2])
        before = resident_bytes()
        connections = [opened.enter_context(socket.create_connection(address)) for _ in range(N_IDLE)]
        for connection in connections:
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
            answer = connection.recv(4096)
            while not answer.endswith(b"}"):
                answer += connection.recv(4096)
            assert answer.startswith(b"HTTP/1.1 200 ")
        assert resident_bytes() - before < IDLE_MEMORY
        assert server.chat("beside them").json()["choices"][0]["message"]["content"] == "beside them"
        for connection in connections:  # none was closed, nor told anything
            with pytest.raises(BlockingIOError):
                connection.recv(4096, socket.MSG_DONTWAIT)


@contextmanager
def more_files(n: int) -> Iterator[None]:
    """Lets this process open so many files; skips the test where it may not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < n:
        pytest.skip(f"{n} open files are needed, and {hard} are allowed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, n), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_server_takes_the_files_that_it_may_open() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 500), hard))
    try:
        allow_connections()
        wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (max(wanted, min(soft, 500)), hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.slow
def test_clients_of_a_server() -> None:
    engine = FakeEngine(byte_tokenizer(), max_sequences=4)
    engine.delay_s = 0.001

    def ask(draw: random.Random) -> tuple[str, dict[str, Any], str]:
        text = "".join(draw.choices("abc 🙂é", k=draw.randint(1, 25)))
        return "/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}, text

    with running(engine, max_queue=24) as server:
        seen = load(server, ask)
        assert min(seen[kind] for kind in ("answered", "left", "refused")) > 0
        assert engine.open == engine.running == 0
        assert server.chat("still there").json()["choices"][0]["message"]["content"] == "still there"


@pytest.mark.slow
def test_clients_of_an_engine() -> None:
    """With few pages, prompts that begin alike, and a model whose tokens depend on all before them."""
    tokenizer = byte_tokenizer()

    def text_of(token_ids: Iterable[int]) -> str:
        detokenizer = tokenizer.detokenizer()
        return "".join(map(detokenizer.push, token_ids)) + detokenizer.flush()

    def ask(draw: random.Random) -> tuple[str, dict[str, Any], str]:
        shared, seed, n_tokens = draw.randrange(3), draw.randrange(100), draw.randint(1, 150)
        prompt = [*range(shared, shared + 64 * shared), *(draw.randrange(2, 131) for _ in range(draw.randint(1, 40)))]
        ids = answer_of(prompt, SamplingParams(seed=seed), n_tokens)
        ids = ids[: ids.index(END)] if END in ids else ids
        body = {"prompt": prompt, "seed": seed, "max_tokens": n_tokens, "temperature": 1}
        return "/v1/completions", body, text_of(ids)

    with engine_server(n_pages=9, max_sequences=6, max_queue=30) as tested:
        tested.batch.before = lambda what: time.sleep(0.0005)
        seen = load(tested.server, ask)
        wait_for(lambda: tested.is_idle)
        assert min(seen[kind] for kind in ("answered", "left", "refused")) > 0
        assert tested.engine.metrics.cached_tokens > 0
        assert tested.engine.n_preempted > 0 or seen["answered"] < 200  # on a busy machine


@pytest.mark.slow
def test_clients_of_the_demo_model(smollm2: LLM) -> None:
    """Greedily, in float32: each gets what a client gets who is alone."""
    assert smollm2.tokenizer is not None
    stand_in = FakeEngine(byte_tokenizer(), max_sequences=8)
    with (
        smollm2.engine(max_sequences=8, max_context=256) as engine,
        running(stand_in, loaded=False, max_queue=12) as server,
    ):
        model: Any = served(
            stand_in, name="smollm2", max_context=engine.max_context, vocab_size=smollm2.config.vocab_size
        )
        object.__setattr__(model, "engine", engine)
        object.__setattr__(model, "tokenizer", smollm2.tokenizer)
        server.service.ready(model)
        questions = ["Why is the sky blue?", "Name three primes.", "Who wrote Faust?", "What is a fish? " * 12]

        def body_of(question: str, n_tokens: int) -> dict[str, Any]:
            return {"messages": [{"role": "user", "content": question}], "max_tokens": n_tokens, "temperature": 0}

        expected = {
            (question, n): said(server.post("/v1/chat/completions", body_of(question, n)).json())
            for question in questions
            for n in (1, 5, 12)
        }

        def ask(draw: random.Random) -> tuple[str, dict[str, Any], str]:
            question, n_tokens = draw.choice([*expected])
            return "/v1/chat/completions", body_of(question, n_tokens), expected[question, n_tokens]

        seen = load(server, ask)
        assert seen["answered"] > 0 and seen["refused"] > 0
        assert server.metric("llamacpp:requests_processing") == server.metric("llamacpp:requests_deferred") == 0


def test_where_files_run_out_is_said_once_and_connections_wait(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    accept, refused = socket.socket.accept, []

    def none_left(listening: socket.socket) -> Any:
        if len(refused) < 3:
            refused.append(listening)
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(listening)

    with running() as server, caplog.at_level(logging.WARNING):
        monkeypatch.setattr(socket.socket, "accept", none_left)
        assert server.http.get("/health").status_code == 200
    assert len(refused) == 3
    assert [record.getMessage() for record in caplog.records] == [
        "no connection can be taken on: too many files are open; raise their limit (`ulimit -n`)"
    ]
