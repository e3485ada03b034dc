"""Several models behind one port, each in a process: statuses, loading and unloading, and requests passed on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import anthropic
import httpx
import ollama
import pytest
import routed_model
from browser import Browser, find_browser
from fake_server import strictly, wait_for
from page_driver import ask, messages

from llmcl.errors import ServerError
from llmcl.runtime import child_process
from llmcl.serve.app import make_app
from llmcl.serve.client import ServerChat
from llmcl.serve.model_process import ModelProcess
from llmcl.serve.router import Router
from llmcl.serve.router_models import Models, RouterOptions
from llmcl.serve.run import Server, listen
from llmcl.serve.service import Service
from llmcl.serve.settings import Settings

COMMAND = [child_process.interpreter(), "-I", "-S", routed_model.__file__]
CHAT = "/v1/chat/completions"


class Routing:
    """A running router: its client, models, log lines, and the processes that it started."""

    def __init__(self, sources: dict[str, str], **options: Any):
        self.sources, self.said = sources, list[str]()
        self.started: list[ModelProcess] = []
        settings = Settings(quiet=True, drain_s=0.2, **options.pop("settings", {}))
        self.options = RouterOptions(lambda: dict(self.sources), self.start, self.said.append, drain_s=0.2, **options)
        self.service, self.models = Service(settings), Models(self.options)
        router = Router(self.models, self.options, settings)
        self.server = Server(self.service, make_app(self.service, router.find, router.post))
        self.listening = listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.listening[0].getsockname()[1]}"
        self.http = httpx.Client(base_url=self.url, timeout=60, trust_env=False, verify=False)

    def start(self, name: str, source: str, log: Callable[[str], None]) -> ModelProcess:
        process = ModelProcess(COMMAND, {"model": source, "name": name}, log)
        self.started.append(process)
        return process

    def ask(self, model: str | None, path: str = CHAT, **fields: Any) -> httpx.Response:
        return self.http.post(path, json=({} if model is None else {"model": model}) | fields)

    def status(self, name: str) -> dict[str, Any]:
        listed = self.http.get("/models").json()["data"]
        return next(entry["status"] for entry in listed if entry["id"] == name)

    @property
    def loaded(self) -> set[str]:
        listed = self.http.get("/models").json()["data"]
        return {entry["id"] for entry in listed if entry["status"]["value"] == "loaded"}

    @contextmanager
    def answering(self, model: str) -> Iterator[None]:
        """While the model makes an answer that does not end."""
        with self.http.stream("POST", CHAT, json={"model": model, "stream": ["one"], "hold": True}) as answer:
            lines = answer.iter_lines()
            assert next(lines) == "data: one"
            yield
            assert next(lines) is not None


@contextmanager
def routing(sources: dict[str, str], **options: Any) -> Iterator[Routing]:
    router = Routing(sources, **options)
    thread = Thread(target=router.server.run, args=(router.listening,), daemon=True)
    thread.start()
    wait_for(lambda: router.server.started)
    try:
        yield router
    finally:
        router.http.close()
        router.service.stop()
        thread.join(60)
        router.models.close()
        assert not thread.is_alive() and router.service.in_flight == 0
        assert all(process.exit_code is not None for process in router.started)


@pytest.fixture(scope="module")
def shared() -> Iterator[Routing]:
    """Two models, for tests that leave both loaded or do not care."""
    with routing({"a": "needs=1", "b/c:q4": "needs=1"}) as router:
        yield router


def test_a_request_loads_the_model_that_it_names() -> None:
    with routing({"a": "needs=1", "b": "needs=1"}) as router:
        assert router.status("a") == router.status("b") == {"value": "unloaded"}
        assert router.ask("a").json()["model"] == "a"
        assert router.loaded == {"a"}
        loading, forecast, ready = router.said
        assert loading == "a: loading" and ready.startswith("a: ready after")
        assert forecast == "a: will need 0.00 GiB, gpu has 0.00 GiB free"
        assert router.ask("b").json()["model"] == "b"
        assert router.loaded == {"a", "b"} and len(router.started) == 2


def test_a_request_and_its_answer_pass_unchanged(shared: Routing) -> None:
    body = '{ "model":"a", "messages":[{"role":"user","content":"\\u00e4 \U0001f600"}] }'
    answer = shared.http.post(CHAT + "?x=%2Fy", content=body, headers={"x-api-key": "mine", "origin": shared.url})
    seen = answer.json()
    assert seen["bytes"] == body and seen["path"] == CHAT + "?x=%2Fy" and seen["has_key"]
    assert not {"origin", "x-api-key"} & {*seen["names"]}
    assert answer.headers.get_list("x-request-id") == ["req_of_a"]
    refused = shared.ask("a", refuse=True)
    assert refused.status_code == 400 and refused.json()["method"] == "POST"


@pytest.mark.parametrize(
    "path",
    ["/v1/messages", "/v1/completions", "/completions", "/infill", "/tokenize", "/apply-template", "/api/generate"],
)
def test_all_apis_pass(path: str, shared: Routing) -> None:
    assert shared.ask("b/c:q4", path).json()["path"] == path


def test_gets_name_their_model_in_the_query(shared: Routing) -> None:
    seen = shared.http.get("/metrics?model=b/c:q4").json()
    assert (seen["model"], seen["path"]) == ("b/c:q4", "/metrics?model=b/c:q4")
    assert "llmcl_requests_total" in shared.http.get("/metrics").text
    assert shared.http.get("/props").json()["role"] == "router"
    assert shared.http.get("/health").json() == {"status": "ok"}
    assert {"/v1/messages", "/models/load"} <= shared.http.get("/openapi.json").json()["paths"].keys()
    assert shared.http.get("/").headers["content-type"].startswith("text/html")


def test_a_stream_passes_as_it_comes_and_ends_when_the_client_leaves(shared: Routing) -> None:
    with shared.http.stream("POST", CHAT, json={"model": "a", "stream": ["one", "two"]}) as answer:
        assert answer.headers["content-type"] == "text/event-stream"
        assert [line for line in answer.iter_lines() if line] == ["data: one", "data: two"]
    with shared.answering("a"):
        assert shared.service.in_flight == 1
    wait_for(lambda: "a: the client left" in shared.said)
    wait_for(lambda: not shared.service.in_flight)


@pytest.mark.parametrize(
    ("path", "error"),
    [
        (CHAT, lambda body: body["error"]),
        ("/v1/messages", lambda body: body["error"]),
        ("/api/chat", lambda body: {"message": body["error"]}),
    ],
)
def test_an_unknown_model(path: str, error: Callable[[Any], dict[str, Any]], shared: Routing) -> None:
    answer = shared.ask("z", path)
    assert answer.status_code == 404
    assert error(answer.json())["message"] == "there is no model 'z'; the models here are a, b/c:q4"
    assert shared.ask(None, path).status_code == 400
    assert "a, b/c:q4" in error(shared.ask(None, path).json())["message"]


def test_what_no_server_has(shared: Routing) -> None:
    assert shared.http.get("/v1/models/z").status_code == 404
    assert shared.http.get("/v1/models/b/c:q4").json()["id"] == "b/c:q4"
    assert shared.ask("a", "/nothing").status_code == 404
    assert shared.http.get(CHAT).status_code == 405
    assert shared.http.get("/v1/responses/resp_0").status_code == 404


def test_clients_of_other_apis_list_all_models(shared: Routing) -> None:
    with anthropic.Anthropic(base_url=shared.url, api_key="k") as client:
        assert [model.id for model in client.models.list()] == ["a", "b/c:q4"]
    shared.ask("a")
    client = ollama.Client(shared.url)
    strictly(ollama.ListResponse, client.list().model_dump())
    assert [model.model for model in client.list().models] == ["a:latest", "b/c:q4"]
    assert "a:latest" in [model.model for model in client.ps().models]
    assert shared.ask("a:latest", "/api/chat").json()["model"] == "a"


def test_loading_and_unloading_on_request() -> None:
    with routing({"a": "needs=1"}, autoload=False) as router:
        refused = router.ask("a")
        assert refused.status_code == 400 and "POST /models/load" in refused.json()["error"]["message"]
        assert router.ask("a", "/models/load").json() == {"success": True}
        wait_for(lambda: router.status("a") == {"value": "loaded"})
        assert router.ask("a", "/models/load").status_code == 400
        assert router.ask("a").status_code == 200
        assert router.ask("a", "/models/unload").json() == {"success": True}
        assert router.status("a") == {"value": "unloaded"}
        assert router.ask("a", "/models/unload").status_code == 400
        assert router.ask("a", CHAT + "?autoload=1").status_code == 200
        assert router.ask("z", "/models/load").status_code == router.ask("z", "/models/unload").status_code == 404
        assert router.said[-4] == "a: unloaded, because a client asked for it"


def test_a_load_goes_on_without_its_client_and_can_be_taken_back() -> None:
    with routing({"a": "needs=1,slow=0.5", "b": "needs=1,slow=60"}, max_waiting=1) as router:
        with pytest.raises(httpx.ReadTimeout):
            router.http.post(CHAT, json={"model": "a"}, timeout=0.1)
        wait_for(lambda: router.status("a") == {"value": "loaded"} and not router.service.in_flight)
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(router.ask, "b")
            wait_for(lambda: len(router.started) == 2)
            assert router.status("b") == {"value": "loading"}
            assert router.ask("b").status_code == 429
            router.ask("b", "/models/unload")
            assert asked.result().status_code == 503
        assert router.status("b") == {"value": "unloaded"} and router.ask("a").status_code == 200


def test_a_model_that_cannot_be_loaded() -> None:
    with routing({"a": "fails=6", "b": "needs=1"}) as router:
        answer = router.ask("a")
        assert answer.status_code == 500 and answer.headers["x-should-retry"] == "false"
        assert answer.json()["error"]["message"] == "the model a cannot be loaded: the file is damaged"
        assert router.status("a") == {"value": "unloaded", "failed": True, "exit_code": 6}
        assert router.said[1:] == [
            "a: a line before it",
            "a: error: the file is damaged",
            "a: a remedy",
            "a: not loaded: exit code 6",
        ]
        assert router.ask("b").status_code == 200


def test_the_least_recently_used_model_makes_place_but_none_that_answers() -> None:
    with routing(dict.fromkeys("abc", "needs=1"), most=2) as router:
        for name in "aba":
            router.ask(name)
        router.http.get("/metrics?model=b")  # no use
        router.ask("c")
        assert router.loaded == {"a", "c"} and "b: unloaded, because c needs its place" in router.said
        with router.answering("a"), router.answering("c"):
            refused = router.ask("b")
        assert refused.status_code == 503 and refused.headers["retry-after"] == "5"
        assert "--models-max" in refused.json()["error"]["message"]
        assert router.loaded == {"a", "c"} and router.status("b") == {"value": "unloaded"}


@pytest.mark.parametrize(
    ("measured", "limit"),
    [(0, (10, 10, 10)), (1, (10, 6, 2)), (1, (10, 10, 10))],
    ids=["of the device", "what others leave", "others have not yet written to theirs"],
)
def test_memory_is_made_before_a_load(measured: int, limit: tuple[int, ...]) -> None:
    sources = {
        name: f"needs={needs},limit={free},measured={measured}"
        for name, needs, free in zip("abc", (4, 4, 5), limit, strict=True)
    }
    with routing(sources | {"d": "needs=11,limit=10"}) as router:
        for name in "ba":
            assert router.ask(name).status_code == 200
        assert router.ask("c").status_code == 200
        assert router.loaded == {"a", "c"}
        with router.answering("c"):
            refused = router.ask("d")
            assert refused.status_code == 503 and "(c); try again later" in refused.json()["error"]["message"]
        wait_for(lambda: not router.service.in_flight)
        refused = router.ask("d")
        assert refused.status_code == 503 and "--ctx-size" in refused.json()["error"]["message"]
        assert refused.headers["x-should-retry"] == "false"
        assert router.status("d") == {"value": "unloaded", "failed": True, "exit_code": 4}
        assert router.loaded == {"a", "c"}


def test_only_models_in_the_same_memory_make_room() -> None:
    sources = {
        name: f"needs=6,limit=10,where={where}" for name, where in zip("abc", ("gpu", "cpu", "cpu"), strict=True)
    }
    with routing(sources) as router:
        for name in "abc":
            assert router.ask(name).status_code == 200
        assert router.loaded == {"a", "c"}


def test_a_crash_is_one_models() -> None:
    with routing({"a": "needs=1", "b": "needs=1"}) as router:
        router.ask("b")
        assert router.ask("a", crash=7).status_code == 502
        wait_for(lambda: router.status("a") == {"value": "unloaded", "failed": True, "exit_code": 7})
        assert router.said[-1] == "a: broke off with exit code 7"
        assert router.ask("b").status_code == router.ask("a").status_code == 200
        for path, begin in (CHAT, "data: {"), ("/v1/messages", "event: error\ndata: {"):
            wait_for(lambda: router.ask("a").status_code == 200)
            answer = router.ask("a", path, stream=["one"], crash_later=7)
            first, last, _ = answer.text.split("\n\n")
            assert first == "data: one" and last.startswith(begin) and "the model a broke off" in last


def test_an_idle_model_sleeps_until_a_request_wakes_it() -> None:
    with routing({"a": "needs=1"}, idle_s=2, autoload=False) as router:
        router.ask("a", "/models/load")
        for _ in range(6):
            assert router.ask("a").status_code == 200
            time.sleep(0.4)
        wait_for(lambda: router.status("a") == {"value": "sleeping"})
        assert router.said[-1] == "a: unloaded, because it was idle for 2 s"
        assert len(router.started) == 1
        assert router.ask("a").status_code == 200 and len(router.started) == 2
        router.ask("a", "/models/unload")
        assert router.ask("a").status_code == 400


def test_kept_responses_are_found_at_their_model(tmp_path: Path) -> None:
    with routing({"a": "needs=1", "b": "needs=1"}, settings={"state_dir": tmp_path}) as router:
        ids = {name: router.ask(name, "/responses", input="x").json()["id"] for name in "ab"}
        for name, response_id in ids.items():
            for method, path in ("GET", ""), ("GET", "/input_items"), ("DELETE", ""):
                seen = router.http.request(method, f"/v1/responses/{response_id}{path}").json()
                assert (seen["model"], seen["method"]) == (name, method)
            assert router.ask(None, "/v1/responses", previous_response_id=response_id).json()["model"] == name
        (tmp_path / "b").mkdir()
        (tmp_path / "b" / "resp_1.json").touch()  # of an earlier run
        assert router.http.get("/v1/responses/resp_1").json()["model"] == "b"
        assert router.http.get("/v1/responses/..%2Fb%2Fresp_1").status_code == 404


def test_a_kept_response_is_gone_with_its_model(shared: Routing) -> None:
    response_id = shared.ask("a", "/v1/responses").json()["id"]
    assert shared.http.get(f"/v1/responses/{response_id}").status_code == 200
    shared.ask("a", "/models/unload")
    gone = shared.http.get(f"/v1/responses/{response_id}")
    assert gone.status_code == 404 and "the model a was unloaded" in gone.json()["error"]["message"]
    assert "a" not in shared.loaded


def test_a_rescan_finds_new_models_and_unloads_what_is_gone() -> None:
    with routing({"a": "needs=1", "b": "needs=1"}) as router:
        router.ask("a")
        router.ask("b")
        router.sources = {"b": "needs=1", "c": "needs=1"}
        assert router.ask("c").status_code == 404
        listed = router.http.get("/models?reload=1").json()["data"]
        assert [(entry["id"], entry["status"]["value"]) for entry in listed] == [("b", "loaded"), ("c", "unloaded")]
        assert "a: unloaded, because it is gone" in router.said
        assert router.ask("c").status_code == 200 and router.ask("a").status_code == 404


@pytest.mark.slow
@pytest.mark.skipif(find_browser() is None, reason="no Chromium is installed")
def test_the_page_has_a_choice_of_models(chromium: Browser) -> None:
    def shows(name: str, context: str) -> str:
        return f"document.title === 'llmcl: {name}' && document.getElementById('context').textContent === '{context}'"

    with routing({"a": "needs=1", "b": "needs=1"}) as router:
        chromium.open(router.url + "/")
        chromium.wait_for(shows("a", "not loaded"))
        assert chromium.js("[...document.querySelectorAll('#models option')].map(o => o.value)") == ["a", "b"]
        chromium.js(
            "const list = document.getElementById('models'); list.value = 'b'; list.dispatchEvent(new Event('change'))"
        )
        chromium.wait_for(shows("b", "not loaded"))
        ask(chromium, "Hello")
        assert messages(chromium) == ["Hello", "I am b"] and router.loaded == {"b"}
        chromium.wait_for(shows("b", "context 64"))
        chromium.command("Page.reload")
        chromium.wait_for(shows("b", "context 64"))
        chromium.open("about:blank#left")


def test_a_chat_names_its_model(shared: Routing) -> None:
    assert "".join(piece.text for piece in ServerChat(shared.url, model="b/c:q4").send("Hello")) == "I am b/c:q4"
    with pytest.raises(ServerError, match="there is no model 'any'; the models here are a, b/c:q4"):
        next(ServerChat(shared.url).send("Hello"))


def test_a_key_is_asked_for_before_a_model_is_loaded() -> None:
    with routing({"a": "needs=1"}, settings={"api_keys": ("k",)}) as router:
        assert router.ask("a").status_code == router.ask("a", "/models/load").status_code == 401
        assert router.started == []
        router.http.headers["authorization"] = "Bearer k"
        assert router.ask("a").json()["has_key"]


def test_a_websocket_is_refused(shared: Routing) -> None:
    headers = {"upgrade": "websocket", "connection": "Upgrade", "sec-websocket-version": "13"}
    headers["sec-websocket-key"] = "dGhlIHNhbXBsZSBub25jZQ=="
    refused = shared.http.get("/v1/responses", headers=headers)
    assert refused.status_code == 501 and "WebSocket" in refused.json()["error"]["message"]


def test_the_lines_of_a_log_begin_with_the_model_but_json_stays_json(shared: Routing) -> None:
    shared.ask("a", say='{"id": 1}')
    shared.ask("a", say="careful")
    wait_for(lambda: "a: careful" in shared.said)
    assert '{"id": 1}' in shared.said


def test_a_process_without_a_router_ends() -> None:
    with routing({"a": "needs=1"}) as router:
        router.ask("a")
        (process,) = router.started
        process.close()  # as the system does when the router dies
        wait_for(lambda: process.exit_code == 0)
