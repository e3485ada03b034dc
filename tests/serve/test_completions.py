"""/v1/completions with OpenAI's own client and its types."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from fake_server import END, Running, events, running, strictly
from openai.types import Completion

from llmcl.serve.app import make_app


@pytest.fixture(scope="module")
def echoing() -> Iterator[Running]:
    """A server whose engine repeats the prompt."""
    with running() as server:
        server.engine.reply = lambda text: text
        yield server


def complete(server: Running, prompt: Any, **fields: Any) -> Completion:
    answer = server.post("/v1/completions", {"prompt": prompt, **fields})
    assert answer.status_code == 200, answer.text
    completion: Completion = strictly(Completion, answer.json())
    return completion


def test_the_client_gets_a_completion(echoing: Running) -> None:
    with openai.OpenAI(base_url=f"{echoing.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.completions.create(model="any", prompt="abc")
        assert answer.choices[0].text == "abc" and answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None and (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 4)
        stream = client.completions.create(model="any", prompt="abc", stream=True, echo=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == "abcabc"


def test_an_answer_has_16_tokens_unless_told(echoing: Running) -> None:
    answer = complete(echoing, "x" * 40)
    assert answer.choices[0].text == "x" * 16 and answer.choices[0].finish_reason == "length"


def test_prompts_of_every_kind(echoing: Running) -> None:
    ids = echoing.engine.tokenizer.encode("abc")
    for prompt, expected in (
        ("abc", ["abc"]),
        (ids, ["abc"]),
        ([float(i) for i in ids], ["abc"]),
        (["a", "bc"], ["a", "bc"]),
        ([ids, ids[:1]], ["abc", "a"]),
    ):
        answer = complete(echoing, prompt, n=2)
        assert [choice.text for choice in answer.choices] == [text for text in expected for _ in range(2)]
        assert [choice.index for choice in answer.choices] == [*range(2 * len(expected))]


@pytest.mark.parametrize("stream", [False, True])
def test_the_places_are_free_before_the_client_has_the_answer(stream: bool, echoing: Running) -> None:
    """It may ask again at once."""
    service, in_flight = echoing.service, list[int]()
    body = {"prompt": "a", "n": service.settings.max_in_flight, "stream": stream}
    arriving = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> Any:
        return arriving.pop() if arriving else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        text = message.get("body", b"")
        if message["type"] == "http.response.body" and (b"[DONE]" in text if stream else text):
            in_flight.append(service.in_flight)

    headers = [(b"content-type", b"application/json"), (b"host", b"127.0.0.1")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": headers}
    asyncio.run(make_app(service)(scope, receive, send))
    assert in_flight == [0]


def test_the_prompt_stands_before_the_answer(echoing: Running) -> None:
    assert complete(echoing, "abc", echo=True).choices[0].text == "abcabc"
    ids = echoing.engine.tokenizer.encode("ab")
    assert complete(echoing, [ids, [*ids, END]], echo=True).choices[1].text == "abab"
    nothing = complete(echoing, "abc", echo=True, max_tokens=0)
    assert nothing.choices[0].text == "abc" and nothing.choices[0].finish_reason == "length"
    assert nothing.usage is not None and nothing.usage.completion_tokens == 0


def test_probabilities_of_tokens(echoing: Running) -> None:
    answer = complete(echoing, "abc", logprobs=1, max_tokens=2)
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.model_dump() == {
        "tokens": ["a", "b"],
        "token_logprobs": [-0.25, -0.25],
        "top_logprobs": [{"a": -0.25}, {"b": -0.25}],
        "text_offset": [0, 1],
    }
    stream = echoing.post("/v1/completions", {"prompt": ["abc", "d"], "logprobs": 0, "stream": True})
    choices = [json.loads(data)["choices"][0] for _, data in events(stream.text)[:-1]]
    mine = [choice["logprobs"] for choice in choices if choice["index"] == 0]
    assert [token for part in mine for token in part["tokens"]] == ["a", "b", "c", ""]
    assert [offset for part in mine for offset in part["text_offset"]] == [0, 1, 2, 3]


def test_probabilities_of_a_prompt(echoing: Running) -> None:
    """What lm-evaluation-harness asks for, with OpenAI's client: nothing comes before the first token."""
    with openai.OpenAI(base_url=f"{echoing.url}/v1", api_key="none", max_retries=0) as client:
        ids = echoing.engine.tokenizer.encode("aé€")  # é has two tokens, € three
        answer = client.completions.create(
            model="any", prompt=ids, echo=True, logprobs=1, max_tokens=1, temperature=0, seed=1234
        )
        choice = answer.choices[0]
        assert choice.text == "aé€a" and choice.logprobs is not None
        assert choice.logprobs.text_offset == [0, 1, 1, 2, 2, 2, 3]
        assert choice.logprobs.token_logprobs == [None, -0.5, -0.5, -0.5, -0.5, -0.5, -0.25]
        assert choice.logprobs.tokens is not None and choice.logprobs.tokens[0] == choice.logprobs.tokens[-1] == "a"
        top = choice.logprobs.top_logprobs
        assert top is not None and top[0] is None and top[-1] == {"a": -0.25}
        assert all(max(of_token.values()) == -0.125 for of_token in top[1:-1])
        nothing = client.completions.create(model="any", prompt="abc", echo=True, logprobs=0, max_tokens=0)
        assert nothing.choices[0].text == "abc" and nothing.choices[0].finish_reason == "length"
        assert nothing.choices[0].logprobs is not None
        assert nothing.choices[0].logprobs.tokens == ["a", "b", "c"]
        assert nothing.choices[0].logprobs.top_logprobs == [None, {}, {}]
        assert nothing.usage is not None and nothing.usage.completion_tokens == 0


@pytest.mark.parametrize("max_tokens", [0, 2])
def test_probabilities_of_prompts_in_a_stream(max_tokens: int, echoing: Running) -> None:
    body = {"prompt": ["abc", "d"], "echo": True, "logprobs": 1, "stream": True, "max_tokens": max_tokens}
    stream = echoing.post("/v1/completions", body)
    choices = [json.loads(data)["choices"][0] for _, data in events(stream.text)[:-1]]
    for index, text in enumerate(("abc", "d")):
        mine = [choice for choice in choices if choice["index"] == index]
        answer = "" if not max_tokens else text[:2]
        assert "".join(choice["text"] for choice in mine) == text + answer
        tokens = [token for choice in mine for token in choice["logprobs"]["tokens"]]
        assert "".join(tokens) == text + answer
        offsets = [offset for choice in mine for offset in choice["logprobs"]["text_offset"]]
        assert offsets == [*range(len(tokens))]
        assert mine[0]["logprobs"]["token_logprobs"][0] is None and mine[-1]["finish_reason"] is not None


def test_a_stream_of_several(echoing: Running) -> None:
    answer = echoing.post(
        "/v1/completions",
        {"prompt": ["ab", "cde"], "stream": True, "echo": True, "stream_options": {"include_usage": True}},
    )
    found = events(answer.text)
    assert found[-1][1] == "[DONE]"
    *parts, last = [json.loads(data) for _, data in found[:-1]]
    assert last["choices"] == [] and last["usage"]["prompt_tokens"] == 5
    for index, text in enumerate(("abab", "cdecde")):
        mine = [choice for part in parts for choice in part["choices"] if choice["index"] == index]
        assert "".join(choice["text"] for choice in mine) == text
        assert [choice["finish_reason"] for choice in mine] == [None] * (len(mine) - 1) + ["stop"]
    assert len({(part["id"], part["created"]) for part in [*parts, last]}) == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 3]}, "prompt[1]"),
        ({"prompt": ["a", [True]]}, "prompt[1]"),
        ({"prompt": "a", "echo": "yes"}, "echo"),
        ({"prompt": "a", "max_tokens": -2}, "max_tokens"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "logprobs": 21, "echo": True}, "logprobs"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], param: str, echoing: Running) -> None:
    answer = echoing.post("/v1/completions", fields)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


@pytest.mark.parametrize("prompt", ["", [258], [-1], [1 << 70], ["abc", [3, 999]]])
def test_a_prompt_that_cannot_be_read(prompt: Any, echoing: Running) -> None:
    answer = echoing.post("/v1/completions", {"prompt": prompt})
    assert answer.status_code == 400, answer.text
    assert ("258" in answer.text or "257" in answer.text) or "no tokens" in answer.text or "999" in answer.text
