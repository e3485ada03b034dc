"""Reading, forgetting and compacting conversations of /v1/responses, with OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from fake_server import FakeEngine, Running, byte_tokenizer, events, running, strictly
from openai.types.responses import Response, ResponseItem, ResponseUsage

from llmcl.serve.fields import Fields
from llmcl.serve.kept_responses import latest_users, read_items


@pytest.fixture
def client(shared: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{shared.url}/v1", api_key="none", max_retries=0) as client:
        yield client


# ---- reading and forgetting -----------------------------------------------------------------------------


def test_a_response_is_read_again(client: openai.OpenAI, shared: Running) -> None:
    first = client.responses.create(model="any", input="Hello", instructions="Be brief.", metadata={"a": "b"})
    assert client.responses.retrieve(first.id) == first
    strictly(Response, shared.http.get(f"/v1/responses/{first.id}").json())
    streamed = shared.post("/v1/responses", {"input": "Hello", "stream": True, "max_output_tokens": 3})
    last = json.loads(events(streamed.text)[-1][1])["response"]
    assert last["status"] == "incomplete" and shared.http.get(f"/v1/responses/{last['id']}").json() == last


def test_a_response_is_forgotten(client: openai.OpenAI, shared: Running) -> None:
    first = client.responses.create(model="any", input="one")
    second = client.responses.create(model="any", input="two", previous_response_id=first.id)
    deleted = shared.http.delete(f"/v1/responses/{first.id}")
    assert deleted.json() == {"id": first.id, "object": "response", "deleted": True}
    with pytest.raises(openai.NotFoundError, match="not found"):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.delete(first.id)
    with pytest.raises(openai.BadRequestError, match="is kept"):
        client.responses.create(model="any", input="two", previous_response_id=first.id)
    third = client.responses.create(model="any", input="three", previous_response_id=second.id)
    assert third.output_text == "three" and "[user]one" in shared.engine.asked[-1][0]
    client.responses.delete(second.id)


def test_what_was_not_stored_is_not_there(client: openai.OpenAI) -> None:
    first = client.responses.create(model="any", input="one", store=False)
    for name in first.id, "resp_other", "{id}", "a b":
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(name)
        with pytest.raises(openai.NotFoundError):
            client.responses.input_items.list(name)


def test_events_are_not_kept(client: openai.OpenAI) -> None:
    first = client.responses.create(model="any", input="one")
    with pytest.raises(openai.BadRequestError, match="stream"):
        client.responses.retrieve(first.id, stream=True)


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("POST", "/v1/responses/resp_1", "GET, HEAD, DELETE"),
        ("DELETE", "/v1/responses/resp_1/input_items", "GET, HEAD"),
        ("DELETE", "/v1/responses", "POST"),
        ("GET", "/v1/responses/compact", "POST"),
    ],
)
def test_other_methods(method: str, path: str, allow: str, shared: Running) -> None:
    answer = shared.http.request(method, path)
    assert answer.status_code == 405 and answer.headers["allow"] == allow


def test_keys_guard_them() -> None:
    with running(api_keys=("key",)) as server:
        kept = server.post("/v1/responses", {"input": "Hi"}, authorization="Bearer key").json()["id"]
        for method, path in ("GET", ""), ("DELETE", ""), ("GET", "/input_items"):
            assert server.http.request(method, f"/v1/responses/{kept}{path}").status_code == 401
        foreign = {"authorization": "Bearer key", "origin": "https://example.org"}
        assert server.http.delete(f"/v1/responses/{kept}", headers=foreign).status_code == 403
        assert server.http.get(f"/v1/responses/{kept}", headers={"x-api-key": "key"}).status_code == 200


# ---- input items ----------------------------------------------------------------------------------------


def test_input_items(client: openai.OpenAI, shared: Running) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    items: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "one"}]},
        {"type": "reasoning", "id": "r", "summary": []},
        call,
        {"type": "function_call_output", "call_id": "c", "output": "42"},
    ]
    first = client.responses.create(model="any", input=items, instructions="Answer.")
    second = client.responses.create(model="any", input="so?", previous_response_id=first.id)
    found = [*client.responses.input_items.list(second.id, order="asc")]
    kinds = ["message", "message", "reasoning", "function_call", "function_call_output", "message", "message"]
    assert [item.type for item in found] == kinds and len({item.id for item in found}) == len(kinds)
    for item in shared.http.get(f"/v1/responses/{second.id}/input_items").json()["data"]:
        strictly(ResponseItem, item)
    texts = [item.content[0].text for item in found if item.type == "message"]  # type: ignore[union-attr]
    assert texts == ["Be brief.", "one", first.output_text, "so?"]
    assert found[5].id == first.output[0].id
    pages = [*client.responses.input_items.list(second.id, limit=3).iter_pages()]
    assert [len(page.data) for page in pages] == [3, 3, 1]
    assert [item.id for page in pages for item in page.data] == [item.id for item in reversed(found)]


def test_instructions_alone_are_kept(shared: Running) -> None:
    """Found by a fuzzer, as was the same for a compaction."""
    asked = {"model": "any", "instructions": "Be brief.", "input": None}
    first = shared.post("/v1/responses", asked)
    assert first.status_code == 200 and shared.http.get(f"/v1/responses/{first.json()['id']}").status_code == 200
    listed = shared.http.get(f"/v1/responses/{first.json()['id']}/input_items").json()
    assert listed == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}
    assert shared.post("/v1/responses/compact", asked).json()["output"][0]["type"] == "compaction"


@pytest.mark.parametrize(
    ("query", "param"), [("limit=0", "limit"), ("limit=101", "limit"), ("order=up", "order"), ("after=x", "after")]
)
def test_wrong_pages(query: str, param: str, client: openai.OpenAI, shared: Running) -> None:
    name = client.responses.create(model="any", input="one").id
    answer = shared.http.get(f"/v1/responses/{name}/input_items?{query}")
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


# ---- compaction -----------------------------------------------------------------------------------------


@pytest.fixture
def summing() -> Iterator[tuple[Running, openai.OpenAI]]:
    engine = FakeEngine(byte_tokenizer())
    engine.reply = lambda text: "\nThe user likes fish."
    with running(engine) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        yield server, client


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_a_conversation_is_compacted(summing: tuple[Running, openai.OpenAI]) -> None:
    server, client = summing
    conversation: list[Any] = [user("I like fish."), {"role": "assistant", "content": "Good."}, user("Which?")]
    compacted = client.responses.compact(model="any", input=conversation, instructions="Be brief.")
    assert compacted.object == "response.compaction" and [item.type for item in compacted.output] == [
        "message",
        "message",
        "compaction",
    ]
    asked = server.engine.asked[-1][0]
    assert asked.startswith("[system]Be brief.\n[user]I like fish.\n[assistant]Good.\n[user]Which?\n\nThe conversation")
    assert asked.endswith("[assistant]") and server.engine.asked[-1][1]["max_tokens"] == 2048 // 4
    strictly(ResponseUsage, compacted.usage.model_dump(exclude_none=True))
    assert compacted.usage.input_tokens == len(asked)
    items: list[Any] = [item.to_dict(warnings=False) for item in compacted.output]
    assert [item["content"][0]["text"] for item in items[:2]] == ["I like fish.", "Which?"]
    assert "fish" not in items[2]["encrypted_content"]
    client.responses.create(model="any", input=[*items, user("So?")])
    assert server.engine.asked[-1][0] == (
        "[user]I like fish.\n\nWhich?\n\nSummary of the conversation so far:\nThe user likes fish.\n\nSo?\n[assistant]"
    )


def test_a_kept_response_is_compacted(summing: tuple[Running, openai.OpenAI]) -> None:
    server, client = summing
    first = client.responses.create(model="any", input="I like fish.")
    for fields in {}, {"input": "Which?", "instructions": "Be brief."}:
        compacted = client.responses.compact(model="any", previous_response_id=first.id, **fields)  # type: ignore[arg-type]
        texts = [item.content[0].text for item in compacted.output if item.type == "message"]  # type: ignore[union-attr]
        assert texts == ["I like fish.", *(["Which?"] if fields else [])]
        system = "[system]Be brief.\n" if fields else ""
        assert server.engine.asked[-1][0].startswith(f"{system}[user]I like fish.\n[assistant]\nThe user likes fish.")


@pytest.mark.parametrize(("most", "kept"), [(1700, "abc"), (699, "bc"), (500, "bc"), (499, "c"), (99, "")])
def test_only_the_latest_messages_stay(most: int, kept: str) -> None:
    said = [user("a" * 1200), {"role": "assistant", "content": "d" * 5000}, user("b" * 400), user("c" * 100)]
    items = latest_users(read_items(Fields({"input": said})), most)
    assert "".join(item["content"][0]["text"][0] for item in items) == kept


def test_what_cannot_be_compacted(shared: Running) -> None:
    for fields, param in (
        ({}, "input"),
        ({"input": "Hi", "model": None}, "model"),  # which Open Responses requires here
        ({"input": []}, "input"),
        ({"previous_response_id": "resp_other"}, "previous_response_id"),
        ({"input": "x" * 3000}, "input"),
    ):
        answer = shared.post("/v1/responses/compact", {"model": "any", **fields})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param
    for content in "", "gAAAAABo", "llmcl1.!!", "llmcl1.gA==":
        item = {"type": "compaction", "id": "c", "encrypted_content": content}
        answer = shared.post("/v1/responses", {"input": [item, user("So?")]})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "input[0].encrypted_content"


# ---- Open Responses' compliance cases -------------------------------------------------------------------

SAID = {"type": "message", "role": "user", "content": "What's the weather like in San Francisco?"}
PROPERTIES = {"location": {"type": "string", "description": "The city and state, e.g. San Francisco, CA"}}
TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the current weather for a location",
    "parameters": {"type": "object", "properties": PROPERTIES, "required": ["location"]},
}
CASES: dict[str, dict[str, Any]] = {
    "basic-response": {"input": [SAID]},
    "system-prompt": {"input": [{"type": "message", "role": "system", "content": "You are a pirate."}, SAID]},
    "tool-calling": {"input": [SAID], "tools": [TOOL]},
    "assistant-phase": {
        "input": [
            {"type": "message", "role": "assistant", "phase": "commentary", "content": "I look it up."},
            {"type": "message", "role": "assistant", "phase": "final_answer", "content": "Sunny."},
            SAID,
        ]
    },
    "multi-turn": {
        "input": [
            {"type": "message", "role": "user", "content": "My name is Alice."},
            {"type": "message", "role": "assistant", "content": "Hello Alice!"},
            {"type": "message", "role": "user", "content": "What is my name?"},
        ]
    },
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("case", CASES)
def test_compliance(case: str, stream: bool) -> None:
    """What the suite's validators check: items of the right type, the state, and for calls each kind of event.

    Its cases with a WebSocket are in test_responses_socket.py.
    """
    engine = FakeEngine(byte_tokenizer())
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"location": "San Francisco, CA"}}\n</tool_call>'
    engine.reply = lambda text: call if case == "tool-calling" else "Ahoy"
    with running(engine) as server:
        answer = server.post("/v1/responses", CASES[case] | {"model": "any", "stream": stream})
        assert answer.status_code == 200, answer.text
        data = [json.loads(data) for _, data in events(answer.text)] if stream else []
        response = strictly(Response, data[-1]["response"] if stream else answer.json())
    kind = "function_call" if case == "tool-calling" else "message"
    assert response.status == "completed" and [item.type for item in response.output] == [kind]
    if stream and kind == "function_call":
        told = [(event["type"], (event.get("item") or {}).get("type")) for event in data]
        for name in "output_item.added", "output_item.done":
            assert (f"response.{name}", "function_call") in told
        for name in "delta", "done":
            assert (f"response.function_call_arguments.{name}", None) in told
