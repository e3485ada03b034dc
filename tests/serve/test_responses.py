"""/v1/responses with OpenAI's own client and its types."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from fake_server import FakeEngine, Running, byte_tokenizer, events, running, strictly
from openai.types.responses import Response, ResponseStreamEvent

BEGIN = ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"]
END = ["response.output_text.done", "response.content_part.done", "response.output_item.done"]


@pytest.fixture
def client(shared: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{shared.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_client_gets_a_response(client: openai.OpenAI, shared: Running) -> None:
    answer = client.responses.create(model="any", input="Hello", instructions="Be brief.")
    assert answer.output_text == "Hello" and answer.status == "completed" and answer.usage is not None
    assert answer.usage.input_tokens == len("[system]Be brief.\n[user]Hello\n[assistant]")
    given = {"input": "Hello", "max_output_tokens": 3, "metadata": {"a": "b"}, "parallel_tool_calls": False}
    cut = strictly(Response, shared.post("/v1/responses", given).json())
    assert cut.output_text == "Hel" and cut.status == "incomplete" and cut.metadata == {"a": "b"}
    assert cut.incomplete_details is not None and cut.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize(("most", "end"), [(100, "response.completed"), (3, "response.incomplete")])
def test_every_event_is_the_clients_own(most: int, end: str, shared: Running) -> None:
    answer = shared.post("/v1/responses", {"input": "Hello", "stream": True, "max_output_tokens": most})
    found = [strictly(ResponseStreamEvent, json.loads(data)) for _, data in events(answer.text)]
    assert [event.type for event in found] == [name for name, _ in events(answer.text)]
    assert [event.sequence_number for event in found] == [*range(len(found))]
    deltas = [event for event in found if event.type == "response.output_text.delta"]
    assert [event.type for event in found] == [*BEGIN, *(event.type for event in deltas), *END, end]
    texts = [event.text for event in found if event.type == "response.output_text.done"]
    assert texts == ["".join(event.delta for event in deltas)] == ["Hello"[:most]]


def test_the_client_streams(client: openai.OpenAI) -> None:
    with client.responses.stream(model="any", input="Hello") as stream:
        assert stream.get_final_response().output_text == "Hello"


@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}], ids=["text", "object"])
def test_items_of_every_kind(arguments: Any, server: Running) -> None:
    """What agents send: earlier calls and their results, thoughts, fields that mean nothing here."""
    items: list[dict[str, Any]] = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "one"}]},
        {"type": "reasoning", "id": "r", "summary": []},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments},
        {"type": "function_call_output", "call_id": "c", "output": "42"},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "two", "annotations": []}],
        },
        {"role": "user", "content": "so?"},
    ]
    unknown = {"store": False, "include": [], "prompt_cache_key": "k", "client_metadata": {"x": 1}, "tools": []}
    answer = server.post(
        "/v1/responses", {"input": items, "reasoning": {"effort": "low"}, "tool_choice": "auto", **unknown}
    )
    assert answer.status_code == 200, answer.text
    assert server.engine.asked[0][0] == (
        '[system]Be brief.\n[user]one\n[assistant]<f{"a": 1}>\n[tool]42\n[assistant]two\n[user]so?\n[assistant]'
    )


def test_items_of_one_answer_are_one_message() -> None:
    """Thoughts, what was said and calls made at once are several items; templates take roles in turns."""
    template = (
        "{% for m in messages %}[{{ m.role }}]({{ m.reasoning_content }}){{ m.content }}"
        "{% for c in m.tool_calls or [] %}<{{ c.id }}>{% endfor %}{% endfor %} {{ reasoning_effort }}"
    )

    def call(name: str) -> dict[str, Any]:
        return {"type": "function_call", "call_id": name, "name": "f", "arguments": "{}"}

    items = [
        {"role": "user", "content": "a"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
        call("1"),
        call("2"),
        *({"type": "function_call_output", "call_id": name, "output": name} for name in "12"),
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "so"}]},
        call("3"),
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "x"},
        {"role": "user", "content": "c"},
    ]
    with running(FakeEngine(byte_tokenizer(template))) as server:
        answer = server.post("/v1/responses", {"input": items, "reasoning": {"effort": "low", "summary": "auto"}})
        assert answer.status_code == 200, answer.text
        assert server.engine.asked[-1][0] == (
            "[user]()a[assistant](hm)b<1><2>[tool]()1[tool]()2[assistant](so)<3>[user]()c low"
        )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": "x" * 3000}, "input"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": "x", "metadata": {"a": 1}}, "metadata.a"),
        ({"input": "x", "max_output_tokens": "9"}, "max_output_tokens"),
        ({"input": "x", "previous_response_id": "r"}, "previous_response_id"),
        ({"input": "x", "tools": [{"type": "function"}]}, "tools[0].name"),
        ({"input": "x", "text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"input": "x", "text": {"format": {"type": "json_schema", "schema": {"type": 3}}}}, "text.format.schema"),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], param: str, shared: Running) -> None:
    answer = shared.post("/v1/responses", fields)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


def test_a_failure_is_an_event() -> None:
    engine = FakeEngine(byte_tokenizer())
    engine.fail = KeyError("k")
    with running(engine) as server:
        answer = server.post("/v1/responses", {"input": "Hello", "stream": True})
        last = strictly(ResponseStreamEvent, json.loads(events(answer.text)[-1][1]))
        assert last.type == "error" and "KeyError" in last.message
