"""/v1/chat/completions with OpenAI's own client and its types, and what other servers got wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from fake_server import FakeEngine, Running, byte_tokenizer, events, running, strictly
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.shared import ErrorObject

from llmcl.sampling_options import PARAMETERS
from llmcl.tokenizer import Tokenizer

USER: list[Any] = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def client(shared: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{shared.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def chunks(server: Running, text: str = "Hello", **fields: Any) -> list[ChatCompletionChunk]:
    """The chunks of a stream, each of the client's own type; the stream ends with [DONE]."""
    answer = server.chat(text, stream=True, **fields)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = events(answer.text)
    assert found[-1] == (None, "[DONE]") and all(name is None for name, _ in found)
    return [strictly(ChatCompletionChunk, json.loads(data)) for _, data in found[:-1]]


def text_of(found: list[ChatCompletionChunk], index: int = 0) -> str:
    return "".join(c.delta.content or "" for chunk in found for c in chunk.choices if c.index == index)


def reasons(found: list[ChatCompletionChunk], index: int = 0) -> list[str | None]:
    return [c.finish_reason for chunk in found for c in chunk.choices if c.index == index]


def refusal(server: Running, **fields: Any) -> ErrorObject:
    answer = server.post("/v1/chat/completions", {"messages": USER, **fields})
    assert answer.status_code == 400, answer.text
    error: ErrorObject = strictly(ErrorObject, answer.json()["error"])
    return error


# ---- answers ------------------------------------------------------------------------------------------


def test_the_client_gets_an_answer(client: openai.OpenAI, shared: Running) -> None:
    answer = client.chat.completions.create(model="any", messages=USER)
    assert answer.choices[0].message.content == "Hello" and answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.completion_tokens == 6  # the end-of-text token, too
    assert answer.usage.prompt_tokens == len("[user]Hello\n[assistant]") and answer.usage.total_tokens == 29
    assert answer.model == "fake" and answer._request_id is not None
    strictly(ChatCompletion, shared.chat().json())


def test_the_client_streams(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(model="any", messages=USER, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "Hello"
    with client.chat.completions.stream(model="any", messages=USER) as helped:
        assert helped.get_final_completion().choices[0].message.content == "Hello"


def test_a_stream_is_one_object_in_pieces(shared: Running) -> None:
    """`id` and `created` never change, the role comes once, and the last chunk alone has a reason."""
    found = chunks(shared)
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in found}) == 1
    assert [c.delta.role for chunk in found for c in chunk.choices].count("assistant") == 1
    assert found[0].choices[0].delta.role == "assistant"
    assert text_of(found) == "Hello"
    assert reasons(found) == [None] * (len(found) - 1) + ["stop"]
    assert all(chunk.usage is None for chunk in found)


def test_usage_comes_in_a_chunk_of_its_own(shared: Running) -> None:
    found = chunks(shared, stream_options={"include_usage": True})
    assert found[-1].choices == [] and found[-1].usage is not None and found[-1].usage.completion_tokens == 6
    assert all(chunk.usage is None and chunk.choices for chunk in found[:-1])
    assert "usage" in found[0].model_fields_set  # null, and not left out
    details = found[-1].usage.prompt_tokens_details
    assert details is not None and details.cached_tokens == 0
    assert "usage" not in chunks(shared)[0].model_fields_set


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_an_answer_is_cut(field: str, shared: Running) -> None:
    answer = strictly(ChatCompletion, shared.chat("Hello", **{field: 3}).json())
    assert answer.choices[0].message.content == "Hel" and answer.choices[0].finish_reason == "length"
    found = chunks(shared, **{field: 3})
    assert text_of(found) == "Hel" and reasons(found)[-1] == "length"


def test_the_newer_name_goes_first(shared: Running) -> None:
    assert shared.chat(max_tokens=5, max_completion_tokens=2).json()["usage"]["completion_tokens"] == 2


def test_without_a_limit_the_context_is_one(server: Running) -> None:
    server.chat()
    assert server.engine.asked[0][1]["max_tokens"] == 2048


@pytest.mark.parametrize("stop", ["lo w", ["zzz", "lo w"], ["lo w", "lo"], ["o wor", "lo w", "x", "y"]])
def test_stop_strings_never_leak(stop: Any, shared: Running) -> None:
    """Each token is a character here, so every stop string is spread over several."""
    whole = strictly(ChatCompletion, shared.chat("Hello world", stop=stop).json())
    assert whole.choices[0].message.content == "Hel" and whole.choices[0].finish_reason == "stop"
    found = chunks(shared, "Hello world", stop=stop)
    assert text_of(found) == "Hel" and reasons(found)[-1] == "stop"


def test_a_half_stop_string_at_the_end_is_text(shared: Running) -> None:
    found = chunks(shared, "Hello wo", stop=["world"])
    assert text_of(found) == "Hello wo" and reasons(found)[-1] == "stop"


def test_no_chunk_has_half_an_emoji(shared: Running) -> None:
    said = "ab🙂é日c"
    found = chunks(shared, said)
    assert text_of(found) == said
    assert not any("\ufffd" in (c.delta.content or "") for chunk in found for c in chunk.choices)
    cut = chunks(shared, said, max_tokens=3)  # within the emoji: the last chunk has what there is
    assert text_of(cut) == "ab\ufffd" and reasons(cut)[-1] == "length"


def test_several_answers(server: Running) -> None:
    answer = strictly(ChatCompletion, server.chat(n=3, seed=7, temperature=0.5).json())
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [options["seed"] for _, options in server.engine.asked] == [7, 8, 9]
    assert answer.usage is not None and answer.usage.completion_tokens == 18 and answer.usage.prompt_tokens == 23
    found = chunks(server, n=3)
    for index in range(3):
        assert text_of(found, index) == "Hello"
        assert [reason for reason in reasons(found, index) if reason] == ["stop"]


# ---- what clients send --------------------------------------------------------------------------------


def test_parameters_reach_the_engine(server: Running) -> None:
    server.chat(temperature=0, top_p=0.5, top_k=4, min_p=0.1, repeat_penalty=1.2, seed=3, stop="x", max_tokens=9)
    expected = {"temperature": 0.0, "top_p": 0.5, "top_k": 4, "min_p": 0.1, "repeat_penalty": 1.2, "seed": 3}
    others = {name: each.default for name, each in PARAMETERS.items() if name not in expected}
    assert others.items() >= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repeat_window": 64}.items()
    assert server.engine.asked[0][1] == {**expected, **others, "stop": ("x",), "max_tokens": 9}
    server.chat(top_k=-1, seed=-1, repetition_penalty=1.1, repeat_last_n=16)
    options = server.engine.asked[1][1]
    assert (options["temperature"], options["top_p"], options["top_k"], options["seed"]) == (1.0, 1.0, 0, None)
    assert (options["repeat_penalty"], options["repeat_window"]) == (1.1, 16)
    server.chat(presence_penalty=0.5, frequency_penalty=-2)
    options = server.engine.asked[2][1]
    assert (options["presence_penalty"], options["frequency_penalty"]) == (0.5, -2)


def test_llama_servers_samplers_reach_the_engine(server: Running) -> None:
    samplers = {"typical_p": 0.9, "xtc_probability": 0.5, "xtc_threshold": 0.05, "dynatemp_range": 0.3}
    samplers |= {"dynatemp_exponent": 1.5, "mirostat": 2, "mirostat_tau": 4.0, "mirostat_eta": 0.2}
    server.chat(**samplers, top_n_sigma=-1)
    assert server.engine.asked[0][1].items() >= (samplers | {"top_n_sigma": 0.0}).items()
    assert server.chat(mirostat=1).status_code == 400  # Mirostat 1


def test_llama_servers_dry_reaches_the_engine(server: Running) -> None:
    dry = {"dry_multiplier": 0.8, "dry_base": 1.5, "dry_allowed_length": 3, "dry_penalty_last_n": -1}
    server.chat(**dry, dry_sequence_breakers=["\n", "Bob:"])
    assert server.engine.asked[0][1].items() >= (dry | {"dry_sequence_breakers": ("\n", "Bob:")}).items()
    server.chat(**dry, dry_sequence_breakers=[])
    assert server.engine.asked[1][1]["dry_sequence_breakers"] == ()
    for wrong in {"dry_base": 0.5}, {"dry_penalty_last_n": -2}, {"dry_sequence_breakers": "\n"}:
        answer = server.chat(**wrong)
        assert answer.status_code == 400 and answer.json()["error"]["param"] in wrong


def test_biases_reach_the_engine(server: Running) -> None:
    server.chat(logit_bias={"5": -100, "7": 2.5})
    assert server.engine.asked[0][1]["logit_bias"] == {5: -100.0, 7: 2.5}


def test_probabilities_of_tokens(shared: Running) -> None:
    """Each token's once, also of those whose text is held back or incomplete, whole and in a stream."""
    whole = strictly(ChatCompletion, shared.chat("a🙂", logprobs=True, top_logprobs=2, stop="x").json())
    assert whole.choices[0].logprobs is not None and whole.choices[0].logprobs.content is not None
    entries = whole.choices[0].logprobs.content
    assert [entry.token for entry in entries] == ["a", *["\ufffd"] * 4, ""]  # the last one ends the text
    assert [byte for entry in entries for byte in entry.bytes or []] == [*"a🙂".encode()]
    assert entries[0].logprob == -0.25
    assert [[top.logprob for top in entry.top_logprobs] for entry in entries] == [[-0.25, -1.25]] * 6
    found = chunks(shared, "a🙂", logprobs=True, top_logprobs=2, stop="x")
    streamed = [c.logprobs.content for chunk in found for c in chunk.choices if c.logprobs is not None]
    assert [entry for part in streamed for entry in part or []] == entries and text_of(found) == "a🙂"


def test_null_means_absent(server: Running) -> None:
    names = (
        "model stop max_tokens max_completion_tokens temperature top_p top_k min_p seed n stream stream_options tools "
        "tool_choice response_format logprobs top_logprobs logit_bias presence_penalty frequency_penalty user"
    )
    given = server.chat(**dict.fromkeys(names.split()))
    assert given.status_code == 200, given.text
    server.chat()
    assert server.engine.asked[0] == server.engine.asked[1]


def test_unknown_fields_are_ignored(shared: Running) -> None:
    unknown = {
        "prompt_cache_key": "x",
        "store": False,
        "metadata": {"a": "b"},
        "reasoning": {"effort": "low"},
        "x": [1],
    }
    nothing: dict[str, Any] = {"tools": [], "logit_bias": {}, "logprobs": False, "presence_penalty": 0}
    assert shared.chat(**unknown, **nothing, response_format={"type": "text"}).status_code == 200


@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}], ids=["text", "object"])
def test_messages_of_every_kind(arguments: Any, server: Running) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
        {"role": "user", "content": "so?"},
    ]
    answer = server.post("/v1/chat/completions", {"messages": messages})
    assert answer.json()["choices"][0]["message"]["content"] == "so?"
    assert server.engine.asked[0][0] == (
        '[system]Be brief.\n[user]one\ntwo\n[assistant]<f{"a": 1}>\n[tool]42\n[user]so?\n[assistant]'
    )


@pytest.mark.parametrize(
    ("template", "seen"),
    [
        (
            "{% for m in messages %}{{ m.content }}({{ m.reasoning_content }}{{ m.thinking }}){% endfor %}",
            "Hello()(hm)",
        ),
        ("{% for m in messages %}{% set message = m %}{{ message.thinking }}{% endfor %}", "hm"),
    ],
)
def test_thoughts_of_earlier_answers_go_to_the_template(template: str, seen: str) -> None:
    """gpt-oss' has another name for them, and takes them where there is no content beside calls."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    said = {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]}
    with running(FakeEngine(byte_tokenizer(template))) as server:
        assert server.post("/v1/chat/completions", {"messages": [*USER, said]}).status_code == 200
        assert server.engine.asked[-1][0] == seen


def test_top_p_0_leaves_the_likeliest(server: Running) -> None:
    assert server.chat(top_p=0).status_code == 200
    assert 0 < server.engine.asked[-1][1]["top_p"] < 1e-9


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": "Hello"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        ({"messages": [*USER, "x"]}, "messages[1]"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].image_url"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]}, "messages[0].content[0].text"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"model": 3}, "model"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 1e-40}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "16"}, "max_tokens"),
        ({"max_completion_tokens": -2}, "max_completion_tokens"),
        ({"seed": 1 << 64}, "seed"),
        ({"n": 0}, "n"),
        ({"n": 7}, "n"),
        ({"stop": 3}, "stop"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"stop_token_ids": [258]}, "stop_token_ids"),
        ({"ignore_eos": "yes"}, "ignore_eos"),
        ({"stop": ["a", 1]}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": True}, "stream_options"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"response_format": "json"}, "response_format"),
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"logit_bias": {"258": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"5": "up"}}, "logit_bias.5"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"reasoning_effort": 3}, "reasoning_effort"),
        ({"chat_template_kwargs": ["enable_thinking"]}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs"),
    ],
    ids=lambda value: value if isinstance(value, str) else json.dumps(value)[:40],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], param: str, shared: Running) -> None:
    error = refusal(shared, **fields)
    assert error.param == param and error.type == "invalid_request_error" and param in error.message


@pytest.mark.parametrize(
    "fields",
    [
        {"functions": [{"name": "f"}]},
        {"modalities": ["audio"]},
    ],
    ids=lambda value: json.dumps(value)[:30],
)
def test_what_is_missing_is_refused_and_not_ignored(fields: dict[str, Any], shared: Running) -> None:
    error = refusal(shared, **fields)
    assert (
        error.code == "unsupported_parameter" and error.param == next(iter(fields)) and "not supported" in error.message
    )


VARIABLES = "{{ messages[0].content }} {{ name | default('nobody') }}{% if enable_thinking is false %} quick{% endif %}"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/apply-template"])
def test_the_template_sees_what_else_is_given(path: str) -> None:
    engine = FakeEngine(byte_tokenizer(VARIABLES))
    with running(engine) as server:
        for more, expected in (
            ({}, "Hi nobody"),
            ({"chat_template_kwargs": None}, "Hi nobody"),
            ({"chat_template_kwargs": {"enable_thinking": False}}, "Hi nobody quick"),
            ({"chat_template_kwargs": {"enable_thinking": True, "name": "Ann"}}, "Hi Ann"),
            *((({"reasoning_effort": "none"}, "Hi nobody quick"),) if "chat" in path else ()),
        ):
            body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], **more}
            answer = server.post(path, body).json()
            assert (engine.asked[-1][0] if "chat" in path else answer["prompt"]) == expected


def test_a_template_that_fails_with_what_is_given_is_a_400() -> None:
    with running(FakeEngine(byte_tokenizer("{{ 1 + n | default(1) }}"))) as server:
        assert server.chat().status_code == 200
        error = refusal(server, chat_template_kwargs={"n": "one"})
        assert "TypeError" in error.message and "--raw" not in error.message and "/v1/completions" in error.message


def test_what_the_template_refuses_is_a_400() -> None:
    template = "{% for m in messages %}{{ raise_exception('not ' + m.role) if m.role != 'user' }}{% endfor %}"
    with running(FakeEngine(byte_tokenizer(template))) as server:
        error = refusal(server, messages=[*USER, {"role": "system", "content": "late"}])
        assert "not system" in error.message


@pytest.mark.parametrize("template", [None, "{{ 1 + 'one' }}", "{% if %}", "{{ raise_exception('no.') }}", "{# #}"])
def test_refusals_of_a_template_say_what_a_client_can_do(template: str | None) -> None:
    with running(FakeEngine(byte_tokenizer(template))) as server:
        body = {"messages": [{"role": "user", "content": "Hi"}], "input": "Hi", "max_tokens": 1}
        for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/apply-template"):
            message = server.post(path, body).json()["error"]["message"]
            assert message.endswith(" Send other messages, or the whole text of the prompt to /v1/completions."), (
                message
            )
            assert "raw" not in message and "chat_template" not in message


def test_a_prompt_beyond_the_context(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="2048") as refused:
        client.chat.completions.create(model="any", messages=[{"role": "user", "content": "x" * 2100}], stream=True)
    assert refused.value.code == "context_length_exceeded"


def test_a_prompt_far_beyond_the_context_is_refused_before_it_is_encoded(shared: Running) -> None:
    """Ten megabytes took half a minute; a count of their tokens is still to be had."""
    said = [{"role": "user", "content": "x" * 300_000}]
    for path, field in (("/v1/chat/completions", {"messages": said}), ("/v1/completions", {"prompt": "x" * 300_000})):
        answer = shared.post(path, {"model": "any", **field})
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"
        assert "at least " in answer.json()["error"]["message"]
    counted = shared.post("/v1/messages/count_tokens", {"model": "any", "messages": said, "max_tokens": 1})
    assert counted.json()["input_tokens"] >= 300_000


def test_more_messages_than_the_context_has_tokens_are_refused_before_the_template(
    shared: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """300 000 took it two seconds, in which it serves no one else."""
    monkeypatch.setattr(Tokenizer, "render_chat", lambda *args: pytest.fail("they were rendered"))
    many = [{"role": "user", "content": "x"}] * 2049
    for path, field in (("chat/completions", "messages"), ("responses", "input"), ("messages", "messages")):
        answer = shared.post(f"/v1/{path}", {"model": "any", field: many, "max_tokens": 1})
        assert answer.status_code == 400, answer.text
        assert "at least 2049 tokens" in answer.json()["error"]["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'{"messages": NaN}', b'"x"', b"\xff", b"[" * 100_000])
def test_what_is_no_json_object_is_a_400(body: bytes, shared: Running) -> None:
    answer = shared.http.post("/v1/chat/completions", content=body)
    assert answer.status_code == 400, answer.text
    strictly(ErrorObject, answer.json()["error"])


def test_half_a_surrogate_pair_is_a_400(shared: Running) -> None:
    answer = shared.http.post(
        "/v1/chat/completions", content=rb'{"messages": [{"role": "user", "content": "\ud800"}], "stop": "\ud800"}'
    )
    assert answer.status_code == 400 and "surrogate" in answer.json()["error"]["message"]


# ---- failures -----------------------------------------------------------------------------------------


def test_an_engine_that_fails(capfd: pytest.CaptureFixture[str]) -> None:
    from llmcl.errors import DeviceError

    engine = FakeEngine(byte_tokenizer())
    with running(engine) as server:
        for error, status, shown in (
            (DeviceError("the device is gone"), 503, "device is gone"),
            (KeyError("k"), 500, "KeyError"),
        ):
            engine.fail = error
            answer = server.chat()
            assert answer.status_code == status and shown in answer.json()["error"]["message"]
            with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
                stream = client.chat.completions.create(model="any", messages=USER, stream=True)
                with pytest.raises(openai.APIError, match=shown):
                    list(stream)
    assert "Traceback" not in capfd.readouterr().err
