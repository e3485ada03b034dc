"""A budget of thoughts: at its end the server ends them, and the answer begins."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from fake_server import TEMPLATE, FakeEngine, Running, byte_tokenizer, events, running, strictly
from made_tokenizers import channel_tokenizer
from openai.types.responses import Response

USER: list[Any] = [{"role": "user", "content": "Hello"}]
OPENS = TEMPLATE + "{% if add_generation_prompt %}<think>\n{% endif %}"
MAY = TEMPLATE + "{# <think> #}"  # the model opens a thought itself
CLOSING = "\n</think>\n\n"
NAMES = ["thinking_budget_tokens", "reasoning_budget", "thinking_token_budget", "thinking_budget"]


def thinker(template: str = OPENS, opening: str = "") -> FakeEngine:
    """It thinks as long as nobody ends that."""
    engine = FakeEngine(byte_tokenizer(template))
    engine.reply = lambda text: "It is 4." if "</think>" in text else opening + "0123456789" * 20
    return engine


@pytest.fixture(scope="module")
def thinking() -> Any:
    with running(thinker()) as server:
        yield server


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_thinks_no_longer(name: str, stream: bool, thinking: Running) -> None:
    answer = thinking.chat(**{name: 12}, stream=stream, max_tokens=300, stream_options={"include_usage": True})
    if stream:
        chunks = [json.loads(data) for _, data in events(answer.text)[:-1]]
        deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
        thoughts = "".join(delta.get("reasoning_content") or "" for delta in deltas)
        text, usage = "".join(delta.get("content") or "" for delta in deltas), chunks[-1]["usage"]
    else:
        body = answer.json()
        message, usage = body["choices"][0]["message"], body["usage"]
        thoughts, text = message["reasoning_content"], message["content"]
    assert (thoughts, text) == ("012345678901", "It is 4.")
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 12}
    assert usage["completion_tokens"] == 12 + len(CLOSING) + len("It is 4.") + 1
    before, options = thinking.engine.asked[-1]
    assert before.endswith("[assistant]<think>\n012345678901" + CLOSING)
    assert options["max_tokens"] == 300 - 12 - len(CLOSING)


def test_other_apis(thinking: Running) -> None:
    asked = {"messages": USER, "max_tokens": 300, "thinking": {"type": "enabled", "budget_tokens": 7}}
    body = strictly(Message, thinking.post("/v1/messages", asked).json())
    assert [block.type for block in body.content] == ["thinking", "text"] and body.stop_reason == "end_turn"
    assert body.content[0].thinking == "0123456" and body.content[1].text == "It is 4."  # type: ignore[union-attr]
    told = [json.loads(data) for _, data in events(thinking.post("/v1/messages", asked | {"stream": True}).text)]
    assert [strictly(RawMessageStreamEvent, event).type for event in told][-1] == "message_stop"
    response = strictly(Response, thinking.post("/v1/responses", {"input": "Hello", "reasoning_budget": 7}).json())
    assert [item.type for item in response.output] == ["reasoning", "message"] and response.output_text == "It is 4."


def test_no_budget_is_no_limit(thinking: Running) -> None:
    for fields in ({}, {"reasoning_budget": -1}, {"reasoning_budget": None}, {"thinking_budget": 300}):
        assert thinking.chat(**fields).json()["choices"][0]["message"]["content"] == ""
    assert thinking.chat(reasoning_budget=-2).json()["error"]["param"] == "reasoning_budget"


def test_without_any_the_prompt_ends_the_thoughts(thinking: Running) -> None:
    message = thinking.chat(reasoning_budget=0).json()["choices"][0]["message"]
    assert message["content"] == "It is 4." and "reasoning_content" not in message
    assert thinking.engine.asked[-1][0].endswith("<think>\n" + CLOSING)


def test_a_thought_that_the_model_opens() -> None:
    with running(thinker(MAY, "<think>\n")) as server:
        message = server.chat(reasoning_budget=5).json()["choices"][0]["message"]
        assert message["content"] == "It is 4." and message["reasoning_content"] == "012"


def test_an_answer_that_has_no_room_for_more_is_cut(thinking: Running) -> None:
    """Also where the end of thoughts alone would fill it."""
    for most in (5, 12 + len(CLOSING)):
        choice = thinking.chat(reasoning_budget=12, max_tokens=most).json()["choices"][0]
        assert choice["finish_reason"] == "length" and choice["message"]["content"] == ""
        assert len(choice["message"]["reasoning_content"]) == most
    choice = thinking.chat(reasoning_budget=12, max_tokens=12 + len(CLOSING) + 2).json()["choices"][0]
    assert choice["finish_reason"] == "length" and choice["message"]["content"] == "It"


def test_each_of_several_answers_has_its_own(thinking: Running) -> None:
    choices = thinking.chat(reasoning_budget=12, n=3, seed=5).json()["choices"]
    assert [choice["message"]["content"] for choice in choices] == ["It is 4."] * 3


def test_what_follows_is_to_match_without_thoughts(thinking: Running) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    for fields in ({"json_schema": schema}, {"tools": tools, "tool_choice": "required"}):
        assert thinking.chat(reasoning_budget=12, **fields).status_code == 200
        (_, first), (_, rest) = thinking.engine.asked[-2:]
        assert "thought" in first["grammar"] and "thought" not in rest["grammar"]
        assert not {"schema", "regex"} & {*rest}


@pytest.mark.parametrize(
    ("effort", "n_thoughts"), [("minimal", 10), ("low", 20), ("medium", 50), ("high", 80), (None, 100), ("other", 100)]
)
def test_an_effort_is_a_share_where_the_template_does_not_read_it(
    effort: str | None, n_thoughts: int, thinking: Running
) -> None:
    message = thinking.chat(reasoning_effort=effort, max_tokens=100).json()["choices"][0]["message"]
    assert len(message["reasoning_content"]) == n_thoughts


def test_an_effort_that_the_template_reads_is_no_limit() -> None:
    with running(thinker("{% if reasoning_effort == 'high' %}Think.{% endif %}" + OPENS)) as server:
        message = server.chat(reasoning_effort="low", max_tokens=100).json()["choices"][0]["message"]
        assert not message["content"]


def test_times_and_cached_tokens() -> None:
    """The second request of an answer is none of its own: one time to the first token, and what was cached at first."""
    engine = thinker()
    engine.read, engine.cached = (3, 10), 99
    with running(engine) as one:
        usage = one.chat(reasoning_budget=12).json()["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": 3}
        assert one.metric("llmcl_ttft_seconds_count") == 1 and one.metric("llmcl_tbt_seconds_count") == 12 + 8


def test_channels() -> None:
    template = "<|channel|><|message|>{{ messages[-1].content }}<|start|>assistant"
    tokenizer = channel_tokenizer()
    tokenizer.use_chat_template(template)
    engine = FakeEngine(tokenizer)
    engine.reply = lambda text: (
        "It is 4." if "final" in text else "<|channel|>analysis<|message|>" + "0123456789" * 20 + "<|end|>"
    )
    with running(engine) as server:
        message = server.chat(reasoning_budget=12).json()["choices"][0]["message"]
        assert message["content"] == "It is 4." and len(message["reasoning_content"]) in (11, 12)
