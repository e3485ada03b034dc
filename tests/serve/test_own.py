"""Health, metrics, models, tokens and templates; paths and methods that are not there."""

from __future__ import annotations

import http.client
import json
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import anthropic
import openai
import pytest
from anthropic.types import ModelInfo
from anthropic.types.shared import ErrorResponse
from fake_server import FakeEngine, Running, byte_tokenizer, running, served, strictly
from openai.types import Model
from openai.types.shared import ErrorObject

from llmcl.serve import app
from llmcl.tokenizer import Tokenizer


def test_health_while_the_model_loads() -> None:
    engine = FakeEngine(byte_tokenizer())
    with running(engine, loaded=False) as server:
        server.service.progress("reading the weights", 3, 9)
        answer = server.http.get("/health")
        assert answer.status_code == 503
        assert answer.json() == {"status": "loading", "doing": "reading the weights", "done": 3, "total": 9}
        refused = server.chat()
        assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
        assert "reading the weights" in refused.json()["error"]["message"]
        assert server.http.get("/v1/models").status_code == 503
        server.service.ready(served(engine))
        assert server.http.get("/health").json() == {"status": "ok"} and server.chat().status_code == 200


def test_both_clients_list_the_model(shared: Running) -> None:
    with openai.OpenAI(base_url=f"{shared.url}/v1", api_key="none") as client:
        assert [model.id for model in client.models.list()] == ["fake"]
        assert client.models.retrieve("fake").owned_by == "llmcl"
        with pytest.raises(openai.NotFoundError, match="the model here is fake"):
            client.models.retrieve("other/model")
    with anthropic.Anthropic(base_url=shared.url, api_key="none") as other:
        assert [model.id for model in other.models.list()] == ["fake"]
        assert other.models.retrieve("fake").max_input_tokens == 2048
    strictly(Model, shared.http.get("/v1/models/fake").json())
    shown = shared.http.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).json()["data"][0]
    shown["created_at"] = ModelInfo.model_validate(shown).created_at  # JSON has no dates
    strictly(ModelInfo, shown)


def test_tokens_and_templates(shared: Running) -> None:
    ids = shared.post("/tokenize", {"content": "a🙂"}).json()["tokens"]
    assert len(ids) == 5 and shared.post("/detokenize", {"tokens": ids}).json() == {"content": "a🙂"}
    assert shared.post("/detokenize", {"tokens": [float(i) for i in ids]}).json() == {"content": "a🙂"}  # JSON's 3.0
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    assert shared.post("/apply-template", {"messages": messages}).json() == {"prompt": "[user]Hi\n[assistant]"}
    for path, body in (("/tokenize", {}), ("/detokenize", {"tokens": ["a"]}), ("/detokenize", {"tokens": [258]})):
        assert shared.post(path, body).status_code == 400


def test_a_text_of_many_tokens_keeps_no_other_client_waiting(shared: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, let = threading.Event(), threading.Event()

    def decode(tokenizer: Tokenizer, ids: list[int]) -> str:
        begun.set()
        assert let.wait(30)
        return "text"

    monkeypatch.setattr(Tokenizer, "decode", decode)
    with ThreadPoolExecutor(1) as pool:
        text = pool.submit(shared.post, "/detokenize", {"tokens": [5]})
        try:
            assert begun.wait(30) and shared.http.get("/health", timeout=10).status_code == 200
        finally:
            let.set()
        assert text.result().json() == {"content": "text"}


def test_props(shared: Running) -> None:
    props = shared.http.get("/props").json()
    assert props["default_generation_settings"]["n_ctx"] == 2048 and props["total_slots"] == 2


def test_metrics_count(server: Running) -> None:
    server.chat()
    server.chat(max_tokens=2, n=2)
    server.chat(temperature="hot")
    server.http.get("/v1/models/" + "x" * 50)
    assert server.metric("llamacpp:tokens_predicted_total") == 6 + 2 * 2
    assert server.metric("llamacpp:tokens_predicted_seconds_total") == pytest.approx((5 + 2) * 1.5e-3)
    assert server.metric("llamacpp:requests_processing") == server.metric("llamacpp:requests_deferred") == 0
    assert server.metric('llmcl_requests_total{api="/v1/chat/completions",status="200"}') == 2
    assert server.metric('llmcl_requests_total{api="/v1/chat/completions",status="400"}') == 1
    assert server.metric('llmcl_requests_total{api="other",status="404"}') == 1
    assert server.metric("llmcl_tbt_seconds_count") == 7 and server.metric("llmcl_ttft_seconds_count") == 3


def test_no_part_of_an_answer_waits_for_an_acknowledgement(server: Running) -> None:
    """The system would hold back the second of two small writes for 40 ms."""
    server.http.get("/health")
    (connection,) = server.server.server_state.connections
    taken = connection.transport.get_extra_info("socket")
    assert taken.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_embeddings_are_not_made(shared: Running) -> None:
    with (
        openai.OpenAI(base_url=f"{shared.url}/v1", api_key="none") as client,
        pytest.raises(openai.InternalServerError, match="no embeddings") as refused,
    ):
        client.embeddings.create(model="any", input="x")
    assert refused.value.status_code == 501 and refused.value.response.headers["x-should-retry"] == "false"


def test_codex_finds_the_list_that_it_looks_for(shared: Running) -> None:
    listed = shared.http.get("/v1/models?client_version=0.153.4").json()
    assert listed["models"] == [] and [model["id"] for model in listed["data"]] == ["fake"]
    assert "models" not in shared.http.get("/v1/models").json()


def test_llama_servers_names_of_paths(shared: Running) -> None:
    for path, name in app.ALIASES.items():
        known = "GET" if name in app.GET else "POST"
        for method in "GET", "POST":
            found, expected = (shared.http.request(method, each, json={"prompt": "a"}) for each in (path, name))
            assert found.status_code == expected.status_code and (found.status_code == 405) == (method != known)
    with openai.OpenAI(base_url=shared.url, api_key="none") as client:
        answer = client.chat.completions.create(model="any", messages=[{"role": "user", "content": "Hi"}])
        assert answer.choices[0].message.content == "Hi"


@pytest.mark.parametrize(
    ("path", "allow"), [("/health", "GET, HEAD"), ("/v1/models/x", "GET, HEAD"), ("/v1/completions", "POST")]
)
def test_other_methods_hear_which_there_are(path: str, allow: str, shared: Running) -> None:
    for method in "OPTIONS", "PUT", "DELETE":
        answer = shared.http.request(method, path)
        assert answer.status_code == 405 and answer.headers["allow"] == allow


def test_head_has_no_body(shared: Running) -> None:
    for path in "/", "/health", "/v1/models":
        answer = shared.http.head(path)
        assert answer.status_code == 200 and answer.content == b""


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/v2", 404), ("GET", "/v1/messages", 405)])
def test_what_is_not_there(method: str, path: str, status: int, shared: Running) -> None:
    answer = shared.http.request(method, path)
    assert answer.status_code == status and path in answer.text
    if path.startswith("/v1/messages"):
        strictly(ErrorResponse, answer.json())
    else:
        strictly(ErrorObject, answer.json()["error"])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no device that is always full")
def test_a_log_that_cannot_be_written_ends_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w") as full, running(quiet=False) as server:
        monkeypatch.setattr(sys, "stderr", full)
        connection = http.client.HTTPConnection("127.0.0.1", server.listening.getsockname()[1], timeout=20)
        connection.auto_open = 0  # a second connection would be an error
        connection.connect()
        for _ in range(3):
            connection.request("GET", "/v1/models")
            answer = connection.getresponse()
            assert answer.status == 200 and answer.read()
        connection.close()
        monkeypatch.undo()
        full.close = lambda: None  # type: ignore[method-assign]  # what it holds cannot be written


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_line_for_each_request(log_format: str, capfd: pytest.CaptureFixture[str]) -> None:
    with running(quiet=False, log_format=log_format) as server:
        request_id = server.chat().headers["x-request-id"]
        server.chat(temperature="hot")
        server.http.get("/%1b[2J")
        server.http.get("/health")
        server.http.get("/page/main.js")
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 3 and "\x1b" not in "".join(lines)
    lines.sort(key=lambda line: (request_id not in line, "temperature" not in line))  # one may end before another
    if log_format == "json":
        first, second, _ = map(json.loads, lines)
        assert first["id"] == request_id and first["status"] == 200 and first["tokens"] == 6 and first["tbt_ms"] == 1.5
        assert first["ttft_ms"] > 0 and second["status"] == 400 and "temperature" in second["error"]
    else:
        head = f"{request_id} POST /v1/chat/completions 200"
        assert lines[0].startswith(f"{head} prompt_tokens=23 cached_tokens=0 tokens=6 ttft_ms=")
        assert "tbt_ms=1.5 " in lines[0] and " 400 " in lines[1] and "error: temperature: " in lines[1]
