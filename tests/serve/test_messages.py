"""/v1/messages with Anthropic's own client and its types."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic.types import ErrorResponse, Message, MessageTokensCount, RawMessageStreamEvent
from fake_server import FakeEngine, Running, byte_tokenizer, events, running, strictly

USER: list[Any] = [{"role": "user", "content": "Hello"}]
KINDS = [
    "message_start",
    "content_block_start",
    "content_block_delta",
    "content_block_stop",
    "message_delta",
    "message_stop",
]


@pytest.fixture
def client(shared: Running) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=shared.url, api_key="none", max_retries=0) as client:
        yield client


def ask(server: Running, **fields: Any) -> Message:
    answer = server.post("/v1/messages", {"messages": USER, "max_tokens": 100, **fields})
    assert answer.status_code == 200, answer.text
    message: Message = strictly(Message, answer.json())
    return message


def test_the_client_gets_an_answer(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(model="any", max_tokens=100, messages=USER, system="Be brief.")
    assert answer.content[0].type == "text" and answer.content[0].text == "Hello"
    assert (answer.stop_reason, answer.stop_sequence, answer.usage.output_tokens) == ("end_turn", None, 6)
    assert answer._request_id is not None


def test_the_client_streams(client: anthropic.Anthropic) -> None:
    with client.messages.stream(model="any", max_tokens=3, messages=USER) as stream:
        assert "".join(stream.text_stream) == "Hel"
        final = stream.get_final_message()
    assert (final.stop_reason, final.usage.input_tokens, final.usage.output_tokens) == ("max_tokens", 23, 3)


def test_every_event_is_the_clients_own(shared: Running) -> None:
    answer = shared.post("/v1/messages", {"messages": USER, "max_tokens": 100, "stream": True})
    found = events(answer.text)
    for name, data in found:
        assert strictly(RawMessageStreamEvent, json.loads(data)).type == name
    assert list(dict.fromkeys(name for name, _ in found)) == KINDS


@pytest.mark.parametrize(
    ("stops", "text", "stop"),
    [
        (["lo w"], "Hel", "lo w"),
        (["world", "o w"], "Hell", "o w"),
        (["lo wo", "lo w"], "Hel", "lo w"),
        (["nowhere"], "Hello world", None),
    ],
)
def test_the_stop_sequence_is_named(stops: list[str], text: str, stop: str | None, shared: Running) -> None:
    answer = ask(shared, messages=[{"role": "user", "content": "Hello world"}], stop_sequences=stops)
    assert answer.content[0].type == "text" and answer.content[0].text == text
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn" if stop is None else "stop_sequence", stop)


def test_a_stop_string_that_the_cut_leaves_half_is_none(shared: Running) -> None:
    answer = ask(shared, stop_sequences=["lox"], max_tokens=5)
    assert (answer.stop_reason, answer.stop_sequence) == ("max_tokens", None)


def test_what_changes_with_every_request_does_not_change_the_prompt(server: Running) -> None:
    """Claude Code's first system block would spoil the prefix cache."""
    for n in range(2):
        billing = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2; cch={n};"}
        rest = {"type": "text", "text": "You are helpful.", "cache_control": {"type": "ephemeral"}}
        ask(server, system=[billing, rest])
    first, second = (prompt for prompt, _ in server.engine.asked)
    assert first == second == "[system]You are helpful.\n[user]Hello\n[assistant]"


def test_blocks_and_thoughts_of_earlier_turns(server: Running) -> None:
    said = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "c"}]},
        {"role": "user", "content": "d"},
    ]
    ask(server, messages=said, thinking={"type": "disabled"}, metadata={"user_id": "u"}, tools=[], unknown=1)
    assert server.engine.asked[0][0] == "[user]a\nb\n[assistant]c\n[user]d\n[assistant]"


SHOWS_THOUGHTS = (
    "{% for m in messages %}[{{ m.role }}]({{ m.reasoning_content }}){{ m.content }}{% for c in m.tool_calls or [] %}"
    "<{{ c.function.name }}>{% endfor %}{% endfor %} {{ enable_thinking }} {{ thinking }} {{ reasoning_effort }}"
)


def test_the_template_sees_thoughts_and_whether_to_think() -> None:
    """Agents send back what a model thought before a call, and turn thinking on and off."""
    engine = FakeEngine(byte_tokenizer(SHOWS_THOUGHTS))
    blocks = [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "c"},
        {"type": "tool_use", "id": "t", "name": "f", "input": {}},
    ]
    said = [*USER, {"role": "assistant", "content": blocks}, {"role": "user", "content": "d"}]
    text = "[user]()Hello[assistant](hm)c<f>[user]()d"
    with running(engine) as server:
        for fields, seen in (
            ({}, "  "),
            ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "True True "),
            ({"thinking": {"type": "disabled"}}, "False False "),
            ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}, "  low"),
        ):
            ask(server, messages=said, **fields)
            assert engine.asked[-1][0] == f"{text} {seen}"
            counted = server.post("/v1/messages/count_tokens", {"messages": said, **fields})
            assert counted.json()["input_tokens"] == len(f"{text} {seen}")


def test_tokens_are_counted(client: anthropic.Anthropic, shared: Running) -> None:
    counted = client.messages.count_tokens(model="any", messages=USER, system="Be brief.")
    assert counted.input_tokens == len("[system]Be brief.\n[user]Hello\n[assistant]")
    strictly(MessageTokensCount, shared.post("/v1/messages/count_tokens", {"messages": USER}).json())


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [*USER, {"role": "assistant", "content": [{"type": "tool_use", "name": "f"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].source.type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": 3}]}]},
            "messages[0].content[0].content",
        ),
        ({"system": 3}, "system"),
        ({"stop_sequences": [3]}, "stop_sequences"),
        ({"temperature": "hot"}, "temperature"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"thinking": {"type": "on"}}, "thinking.type"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], named: str, shared: Running) -> None:
    answer = shared.post("/v1/messages", {"messages": USER, "max_tokens": 100, **fields})
    assert answer.status_code == 400
    error = strictly(ErrorResponse, answer.json()).error
    assert error.type == "invalid_request_error" and error.message.startswith(f"{named}: ")


def test_errors_are_the_clients_own(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="2048"):
        client.messages.create(model="any", max_tokens=9, messages=[{"role": "user", "content": "x" * 2100}])
    engine = FakeEngine(byte_tokenizer())
    engine.fail = KeyError("k")
    with running(engine, api_keys=("key",)) as server:
        with (
            anthropic.Anthropic(base_url=server.url, api_key="other", max_retries=0) as stranger,
            pytest.raises(anthropic.AuthenticationError),
        ):
            stranger.messages.create(model="any", max_tokens=9, messages=USER)
        with anthropic.Anthropic(base_url=server.url, api_key="key", max_retries=0) as known:
            with pytest.raises(anthropic.InternalServerError, match="KeyError"):
                known.messages.create(model="any", max_tokens=9, messages=USER)
            with (
                known.messages.stream(model="any", max_tokens=9, messages=USER) as stream,
                pytest.raises(anthropic.APIStatusError, match="KeyError"),
            ):
                stream.get_final_message()
