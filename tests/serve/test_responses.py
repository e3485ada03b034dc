"""/v1/responses with OpenAI's own client and its types."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from fake_server import FakeEngine, Running, byte_tokenizer, events, running, strictly
from openai.types.responses import Response, ResponseStreamEvent

from llmcl.serve.kept import Kept, KeptResponse

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
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].image_url"),
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


# ---- Open Responses -----------------------------------------------------------------------------------

# The fields of a response that its specification requires, with the types that their values may have.
REQUIRED: dict[str, tuple[type, ...]] = {
    "id": (str,),
    "object": (str,),
    "created_at": (int,),
    "completed_at": (int, type(None)),
    "status": (str,),
    "incomplete_details": (dict, type(None)),
    "model": (str,),
    "previous_response_id": (str, type(None)),
    "instructions": (str, type(None)),
    "output": (list,),
    "error": (dict, type(None)),
    "tools": (list,),
    "tool_choice": (str, dict),
    "truncation": (str,),
    "parallel_tool_calls": (bool,),
    "text": (dict,),
    "top_p": (int, float),
    "presence_penalty": (int, float),
    "frequency_penalty": (int, float),
    "top_logprobs": (int,),
    "temperature": (int, float),
    "reasoning": (dict, type(None)),
    "usage": (dict, type(None)),
    "max_output_tokens": (int, type(None)),
    "max_tool_calls": (int, type(None)),
    "store": (bool,),
    "background": (bool,),
    "service_tier": (str,),
    "metadata": (dict,),
    "safety_identifier": (str, type(None)),
    "prompt_cache_key": (str, type(None)),
}


def test_every_response_has_the_required_fields(shared: Running) -> None:
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    asked = {"input": "Hello", "presence_penalty": 0.5, "frequency_penalty": -1, "store": False, "tools": [tool]}
    received = [shared.post("/v1/responses", asked).json()]
    for most in 3, 100:
        answer = shared.post("/v1/responses", {**asked, "stream": True, "max_output_tokens": most})
        data = [json.loads(data) for _, data in events(answer.text)]
        received += [event["response"] for event in data if "response" in event]
    assert [response["status"] for response in received] == [
        "completed",
        *("in_progress", "in_progress", "incomplete"),
        *("in_progress", "in_progress", "completed"),
    ]
    for response in received:
        for name, kinds in REQUIRED.items():
            assert name in response and type(response[name]) in kinds, name
        assert (response["completed_at"] is not None) == (response["status"] == "completed")
        assert (response["presence_penalty"], response["frequency_penalty"]) == (0.5, -1)
        assert response["store"] is False
        assert {*response["tools"][0]} == {"type", "name", "description", "parameters", "strict"}


def test_a_request_goes_on_from_a_response(server: Running, client: openai.OpenAI) -> None:
    def ask(**fields: Any) -> dict[str, Any]:
        answer = server.post("/v1/responses", fields)
        assert answer.status_code == 200, answer.text
        body: dict[str, Any] = answer.json()
        return body

    first = ask(input="one", instructions="Be brief.")
    second = ask(input="two", previous_response_id=first["id"], instructions="Be long.")
    assert second["previous_response_id"] == first["id"] and first["store"] is True
    assert server.engine.asked[-1][0] == "[system]Be long.\n[user]one\n[assistant]one\n[user]two\n[assistant]"
    streamed = server.post("/v1/responses", {"input": "3", "previous_response_id": second["id"], "stream": True})
    third = json.loads(events(streamed.text)[-1][1])["response"]["id"]
    ask(input="four", previous_response_id=third)
    everything = "[user]one\n[assistant]one\n[user]two\n[assistant]two\n[user]3\n[assistant]3\n[user]four\n[assistant]"
    assert server.engine.asked[-1][0] == everything
    ask(input="other", previous_response_id=first["id"])  # two may go on from the same one
    assert server.engine.asked[-1][0] == "[user]one\n[assistant]one\n[user]other\n[assistant]"


def test_calls_of_a_response_that_is_kept() -> None:
    engine = FakeEngine(byte_tokenizer())
    engine.reply = lambda text: '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    tools = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
    with running(engine) as server:
        first = server.post("/v1/responses", {"input": "go", "tools": tools}).json()
        result = {"type": "function_call_output", "call_id": first["output"][0]["call_id"], "output": "42"}
        asked = {"input": [result], "previous_response_id": first["id"], "tools": tools}
        assert server.post("/v1/responses", asked).status_code == 200
        assert '[user]go\n[assistant]<f{"a": 1}>\n[tool]42\n[assistant]' in engine.asked[-1][0]


def test_what_is_not_kept_is_said(shared: Running) -> None:
    first = shared.post("/v1/responses", {"input": "one", "store": False}).json()
    for name in first["id"], "resp_other":
        answer = shared.post("/v1/responses", {"input": "two", "previous_response_id": name})
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["code"] == "previous_response_not_found"
        assert error["param"] == "previous_response_id" and "whole conversation" in error["message"]


def test_memory_for_conversations_is_bounded() -> None:
    def of_size(n: int) -> KeptResponse:
        return KeptResponse([{"role": "user", "content": "x" * n}])

    kept = Kept(most=3, most_characters=5000)
    for n in range(5):
        kept.add(f"{n}", of_size(100))
        kept.get("1")
    assert len(kept) == 3 and kept.get("0") is None and kept.get("1") is not None and kept.get("4") is not None
    kept.add("large", of_size(4100))
    assert len(kept) == 1 and kept.get("large") is not None
    kept.add("too large", of_size(5000))
    assert len(kept) == 1 and kept.get("too large") is None
    assert kept.remove("large") and not kept.remove("large") and len(kept) == 0
    for n in range(3):  # what was forgotten takes no room
        kept.add(f"{n}", of_size(1000))
    assert len(kept) == 3


def test_a_failure_is_an_event() -> None:
    engine = FakeEngine(byte_tokenizer())
    engine.fail = KeyError("k")
    with running(engine) as server:
        answer = server.post("/v1/responses", {"input": "Hello", "stream": True})
        last = strictly(ResponseStreamEvent, json.loads(events(answer.text)[-1][1]))
        assert last.type == "error" and "KeyError" in last.message
