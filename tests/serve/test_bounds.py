"""Bounds of requests that want no answer, and of what a body may have in it."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from fake_embedder import FakeEmbedder, FakeReranker
from fake_server import INFILL, FakeEngine, Running, byte_tokenizer, running, wait_for
from parameters import slow_except

from llmcl.serve import body
from llmcl.tokenizer import Tokenizer

COUNT = "/v1/messages/count_tokens"


def texts(path: str, text: str) -> dict[str, Any]:
    """The body that has the tokens of a text counted."""
    return {"content": text} if path == "/tokenize" else {"messages": [{"role": "user", "content": text}]}


@pytest.mark.parametrize("path", ["/tokenize", COUNT])
def test_a_text_that_takes_seconds_is_not_counted(path: str, shared: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    most = shared.service.served().max_text
    assert shared.post(path, texts(path, "x" * (most - 100))).status_code == 200
    monkeypatch.setattr(Tokenizer, "encode", lambda *args, **options: pytest.fail("it was encoded"))
    for text in ("x" * (most + 1), "\u20ac" * (most // 3 + 1)):
        answer = shared.post(path, texts(path, text))
        assert answer.status_code == 413 and f"at most {most}" in answer.text and "in parts" in answer.text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
def test_nor_is_it_made_a_prompt(path: str, shared: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nothing is known of the least number of its tokens."""
    text = "x" * (shared.service.served().max_text + 1)
    monkeypatch.setattr(Tokenizer, "encode", lambda *args, **options: pytest.fail("it was encoded"))
    name = {"/v1/completions": "prompt", "/v1/responses": "input"}.get(path)
    fields = {name: text} if name else {"messages": [{"role": "user", "content": text}]}
    answer = shared.post(path, {**fields, "max_tokens": 1})
    assert answer.status_code == 400 and "bytes of text" in answer.text


class Held:
    """Encodes when it may. entered, most: how many texts are encoded now, and at most were at once."""

    def __init__(self) -> None:
        self.let = threading.Event()
        self.entered = self.most = self.n = 0
        self._lock = threading.Lock()

    def __call__(self, tokenizer: Tokenizer, text: str, *args: Any, **options: Any) -> list[int]:
        with self._lock:
            self.n += 1
            self.entered += 1
            self.most = max(self.most, self.entered)
        assert self.let.wait(60)
        with self._lock:
            self.entered -= 1
        return [5]


def test_one_text_is_counted_at_a_time_and_few_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held()
    long = "x" * 20_000
    with running(max_queue=2) as server, ThreadPoolExecutor(4) as pool:
        monkeypatch.setattr(Tokenizer, "encode", held)
        waiting = [pool.submit(server.post, path, texts(path, long)) for path in ("/tokenize", COUNT, "/tokenize")]
        try:
            wait_for(lambda: server.service.counts == 3)
            refused = server.post("/tokenize", texts("/tokenize", long))
            assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
            assert server.http.get("/health").status_code == 200
        finally:
            held.let.set()
        assert [answer.result().status_code for answer in waiting] == [200] * 3
        assert held.most == 1


def test_a_client_that_leaves_is_not_counted_for(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held()
    with running() as server, ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(Tokenizer, "encode", held)
        first = pool.submit(server.post, "/tokenize", texts("/tokenize", "a"))
        wait_for(lambda: held.entered == 1)
        sent = json.dumps(texts("/tokenize", "b")).encode()
        with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as connection:
            head = b"POST /tokenize HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: %d\r\n\r\n" % len(sent)
            connection.sendall(head + sent)
            wait_for(lambda: server.service.counts == 2)
        wait_for(lambda: server.service.counts == 1)
        held.let.set()
        assert first.result().json() == {"tokens": [5]}
        assert server.metric('llmcl_requests_total{api="/tokenize",status="499"}') == 1
    assert held.n == 1


def test_a_count_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held()
    with running(count_s=0.2) as server:
        monkeypatch.setattr(Tokenizer, "encode", held)
        try:
            answer = server.post("/tokenize", texts("/tokenize", "a"))
            assert answer.status_code == 503 and "0.2 s" in answer.text and answer.headers["retry-after"] == "1"
            assert server.service.counts == 0
        finally:
            held.let.set()


@pytest.mark.parametrize(
    "sent",
    [
        b'{"a": {' + b",".join(b'"%x":1' % i for i in range(1_450_000)) + b"}}",
        b'{"a": [' + b",".join([b"1"] * 1_450_000) + b"]}",
        b'{"a": [' + b",".join([b"[]"] * 1_450_000) + b"]}",
        b'{"a": [' + b",".join([b'{"a":1}'] * 1_450_000) + b"]}",
        b'{"a": [' + b",".join([b'"a\\\\","\\""'] * 700_000) + b"]}",
        b"[" * 15_000_000,
    ],
    ids=["keys", "numbers", "lists", "objects", "strings", "depth"],
)
def test_a_body_of_a_million_elements_keeps_nobody_waiting(sent: bytes, shared: Running) -> None:
    """The largest that is parsed takes a tenth of the time; these took up to two seconds."""
    with ThreadPoolExecutor(1) as pool:
        refused = pool.submit(shared.http.post, "/tokenize", content=sent)
        longest = 0.0
        while not refused.done():
            start = time.process_time()  # of the server, too; other processes do not count
            assert shared.http.get("/health").status_code == 200
            longest = max(longest, time.process_time() - start)
    answer = refused.result()
    assert answer.status_code == 413 and str(body.MAX_KEYS) in answer.json()["error"]["message"]
    assert longest < 1.5


def test_signs_in_strings_are_no_elements(shared: Running) -> None:
    """A table as text, and JSON that stands in a string."""
    for text in ("1,2,3,4,5,6,7,8\n" * 50_000, '{"a": "b\\\\", "c": [1]}\\' * 30_000):
        answer = shared.post("/tokenize", {"content": text, "other": ["x"] * 1000})
        assert answer.status_code == 200 and len(answer.json()["tokens"]) == len(text)


def test_token_ids_of_a_long_context_are_taken(shared: Running) -> None:
    answer = shared.post("/detokenize", {"tokens": [70] * 260_000})
    assert answer.status_code == 200 and len(answer.json()["content"]) == 260_000


def test_numbers_of_hundreds_of_digits_are_refused_by_name(shared: Running) -> None:
    huge = 10**400
    for name in ("temperature", "top_p", "min_p", "repeat_penalty", "presence_penalty", "frequency_penalty"):
        for number in (huge, -huge):
            answer = shared.chat("Hi", **{name: number})
            assert answer.status_code == 400 and answer.json()["error"]["param"] == name, answer.text
    answer = shared.chat("Hi", logit_bias={"5": huge})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "logit_bias.5"


@pytest.fixture(scope="module")
def able() -> Iterator[Running]:
    """A server whose model can infill, too."""
    with running(FakeEngine(byte_tokenizer(added=INFILL))) as server:
        server.service.ready(replace(server.service.served(), embedder=FakeEmbedder(), reranker=FakeReranker()))
        yield server


@pytest.mark.parametrize(
    "value",
    slow_except([10**400, -(10**400), 1e308, [10**400], {"x": 10**400}], 10**400, 1e308),
    ids=lambda v: str(v)[:9],
)
def test_no_field_fails_by_a_number(value: Any, able: Running) -> None:
    """Whatever field of whichever path has it."""
    described = able.http.get("/openapi.json").json()["paths"]
    said = [{"role": "user", "content": "Hi"}]
    least = {"messages": said, "input": "Hi", "max_tokens": 1, "content": "Hi", "tokens": [5]}
    least |= {"model": "fake", "input_prefix": "Hi", "input_suffix": "Hi", "query": "Hi", "documents": ["Hi"]}
    for path, methods in described.items():
        if "post" not in methods:
            continue
        schema = methods["post"]["requestBody"]["content"]["application/json"]["schema"]
        properties = schema.get("items", schema)["properties"]
        base = {"prompt": "Hi"} if path == "/v1/completions" else least
        for name in properties:
            body: Any = [{name: value}] if "items" in schema else base | {name: value}
            answer = able.post(path, body)
            allowed = (403,) if path.endswith("load_lora_adapter") else (200, 400)
            assert answer.status_code in allowed, (path, name, answer.text)


def test_numbers_in_schemas(shared: Running) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 10**400}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    for fields in ({"json_schema": schema}, {"tools": [tool]}, {"tools": [tool], "tool_choice": "required"}):
        assert shared.chat("Hi", **fields).status_code in (200, 400)
