"""Structured output over HTTP: under the names of OpenAI, vLLM and llama-server, and refused with a reason."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import openai
import pytest
from fake_server import FakeEngine, Running, byte_tokenizer, running
from pydantic import BaseModel

from llmcl.grammar import trial, without_unknown_formats

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


class Fish(BaseModel):
    name: str
    legs: int


@pytest.fixture(scope="module")
def fishing() -> Iterator[Running]:
    """A server whose answers are always the same JSON text."""
    engine = FakeEngine(byte_tokenizer())
    engine.reply = lambda text: '{"name": "cod", "legs": 0}'
    with running(engine) as server:
        yield server


CHAT: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"response_format": {"type": "json_object"}}, {"schema": {"type": "object"}}),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, {"schema": SCHEMA}),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, {"schema": SCHEMA}),
    ({"json_schema": SCHEMA}, {"schema": SCHEMA}),
    ({"grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
    ({"structured_outputs": {"json": SCHEMA}}, {"schema": SCHEMA}),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, {"schema": json.dumps(SCHEMA)}),
    ({"structured_outputs": {"json_object": True}}, {"schema": {"type": "object"}}),
    ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
    ({"structured_outputs": {"choice": ["yes", 'n"o']}}, {"grammar": 'start: "yes" | "n\\"o"'}),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, {"grammar": 'start: "a"'}),
    ({"guided_json": SCHEMA}, {"schema": SCHEMA}),
    ({"guided_regex": "a+"}, {"regex": "a+"}),
    ({"guided_choice": ["yes"]}, {"grammar": 'start: "yes"'}),
    ({"response_format": {"type": "text"}, "json_schema": None}, {}),
]


@pytest.mark.parametrize(("fields", "expected"), CHAT, ids=lambda value: json.dumps(value)[:60])
def test_it_reaches_the_engine(fields: dict[str, Any], expected: dict[str, Any], server: Running) -> None:
    assert server.chat(**fields).status_code == 200
    options = server.engine.asked[-1][1]
    assert {name: options[name] for name in ("schema", "regex", "grammar") if name in options} == expected


def test_the_other_paths_take_it_too(server: Running) -> None:
    for path, fields, expected in (
        ("/v1/completions", {"prompt": "x", "structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        (
            "/v1/responses",
            {"input": "x", "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
            {"schema": SCHEMA},
        ),
        ("/v1/responses", {"input": "x", "text": {"format": {"type": "json_object"}}}, {"schema": {"type": "object"}}),
        (
            "/v1/messages",
            {
                "max_tokens": 9,
                "messages": [{"role": "user", "content": "x"}],
                "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
            },
            {"schema": SCHEMA},
        ),
    ):
        answer = server.post(path, fields)
        assert answer.status_code == 200, answer.text
        options = server.engine.asked[-1][1]
        assert {name: options[name] for name in ("schema", "regex", "grammar") if name in options} == expected


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format.type", "expected one of"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}},
            "response_format.json_schema.schema",
            "expected a JSON object",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "objec"}}}},
            "response_format.json_schema.schema",
            "Invalid type: objec",
        ),
        ({"json_schema": {"not": {}}}, "json_schema", "Unimplemented keys"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {}}},
            "response_format.json_schema.schema",
            "is missing",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": None}}},
            "response_format.json_schema.schema",
            "is null",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format.schema", "is missing"),
        ({"response_format": {"type": "json_schema", "schema": None}}, "response_format.schema", "is null"),
        ({"json_schema": {"$ref": "file:///etc/passwd"}}, "json_schema", "not present in a registry"),
        ({"grammar": "start: a"}, "grammar", "unknown name"),
        ({"grammar": 5}, "grammar", "expected a string"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "unclosed group"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "expected a list of texts"),
        ({"structured_outputs": {"regex": "a", "grammar": "b"}}, "structured_outputs.regex", "give one of them"),
        ({"json_schema": {}, "response_format": {"type": "json_object"}}, "response_format", "give one of them"),
    ],
    ids=lambda value: str(value)[:40],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_what_is_refused_is_a_400_that_says_why(
    fields: dict[str, Any], param: str, reason: str, stream: bool, shared: Running
) -> None:
    answer = shared.chat(stream=stream, **fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and reason in error["message"] and len(error["message"]) < 600


def test_unknown_formats_are_annotations(server: Running) -> None:
    """`format` may also be the name of a property, and part of a value."""
    secret = {"type": "string", "format": "password"}
    schema = {
        "type": "object",
        "properties": {"format": secret, "at": {"type": "string", "format": "date"}, "e": {"enum": [{"format": "x"}]}},
        "$defs": {"format": {"type": "array", "items": secret}},
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    assert server.chat(json_schema=schema).status_code == 200
    assert server.chat(tools=[tool], tool_choice="required").status_code == 200
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(400):
        deep = {"type": "array", "items": deep}
    assert without_unknown_formats(deep) == deep
    function = tool["function"] | {"parameters": {"type": "object", "properties": {"x": deep}}}
    answer = server.chat(tools=[{"type": "function", "function": function}], tool_choice="required")
    assert answer.status_code == 400, answer.text
    text = {"type": "string"}
    assert without_unknown_formats(schema) == {
        "type": "object",
        "properties": {"format": text, "at": {"type": "string", "format": "date"}, "e": {"enum": [{"format": "x"}]}},
        "$defs": {"format": {"type": "array", "items": text}},
    }


def test_branches_that_exclude_each_other(shared: Running) -> None:
    def branch(kind: str) -> dict[str, Any]:
        properties = {"kind": {"const": kind}, "x": {"type": "integer"}}
        return {"type": "object", "properties": properties, "required": ["kind", "x"]}

    for schema in {"oneOf": [branch("a"), branch("b")]}, {"oneOf": [{"type": "string"}, {"type": "integer"}]}:
        assert shared.chat(json_schema=schema).status_code == 200
    refused = shared.chat(json_schema={"oneOf": [{"type": "integer"}, {"type": "number"}]})
    assert refused.status_code == 400 and "anyOf" in refused.text and "coerce" not in refused.text


def test_a_schema_that_takes_too_long_holds_nobody_up(shared: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "CPU_LIMIT_S", 1)
    endless = {"allOf": [{"type": "string", "pattern": f"a{{{n}}}.*b.*c"} for n in range(3, 30)]}
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(shared.chat, json_schema=endless)
        time.sleep(0.2)
        assert shared.http.get("/health").status_code == 200 and shared.chat("Hello").status_code == 200
        answer = asked.result()
    assert answer.status_code == 400 and "takes more than 1 s" in answer.json()["error"]["message"]


def test_the_clients_parse_into_a_class(fishing: Running) -> None:
    with openai.OpenAI(base_url=f"{fishing.url}/v1", api_key="none", max_retries=0) as client:
        chat = client.chat.completions.parse(
            model="any", messages=[{"role": "user", "content": "x"}], response_format=Fish
        )
        assert chat.choices[0].message.parsed == Fish(name="cod", legs=0)
        made = client.responses.parse(model="any", input="x", text_format=Fish)
        assert made.output_parsed == Fish(name="cod", legs=0)
        with client.chat.completions.stream(
            model="any", messages=[{"role": "user", "content": "x"}], response_format=Fish
        ) as stream:
            assert stream.get_final_completion().choices[0].message.parsed == Fish(name="cod", legs=0)
    with anthropic.Anthropic(base_url=fishing.url, api_key="none", max_retries=0) as other:
        message = other.messages.parse(
            model="any", max_tokens=99, messages=[{"role": "user", "content": "x"}], output_format=Fish
        )
        assert message.parsed_output == Fish(name="cod", legs=0)
    schemas = [options["schema"] for _, options in fishing.engine.asked]
    assert len(schemas) == 4 and all(schema["properties"].keys() == {"name", "legs"} for schema in schemas)


def test_an_answer_that_is_cut_says_so(fishing: Running) -> None:
    answer = fishing.chat(json_schema=SCHEMA, max_tokens=5).json()["choices"][0]
    assert answer["finish_reason"] == "length" and answer["message"]["content"] == '{"nam'
