"""Ollama's API, by the Python client that Ollama publishes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import ollama
import pytest
from fake_server import END, TEMPLATE, FakeEngine, Running, byte_tokenizer, running, served, wait_for
from ollama import ChatResponse, GenerateResponse

from llmcl.serve.model_facts import ModelFacts

USER = [{"role": "user", "content": "Why is the sky blue?"}]
SAID = USER[0]["content"]
CALLING = TEMPLATE + "{# tools <tool_call> #}"
CALLS = (
    'I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Z\\u00fcrich"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
)
# api.md of ollama/ollama, "Generate request (With options)", without `typical_p`.
OPTIONS = {
    "num_keep": 5, "seed": 42, "num_predict": 100, "draft_num_predict": 4, "top_k": 20, "top_p": 0.9, "min_p": 0.0,
    "repeat_last_n": 33, "temperature": 0.8, "repeat_penalty": 1.2, "presence_penalty": 1.5, "frequency_penalty": 1.0,
    "penalize_newline": True, "stop": ["\n", "user:"], "numa": False, "num_ctx": 1024, "num_batch": 2, "num_gpu": 1,
    "main_gpu": 0, "use_mmap": True, "num_thread": 8,
}  # fmt: skip


def client_of(server: Running, **options: Any) -> ollama.Client:
    return ollama.Client(server.url, trust_env=False, **options)


@pytest.fixture
def client(shared: Running) -> Iterator[ollama.Client]:
    with client_of(shared) as client:
        yield client


def refusal(server: Running, path: str, fields: dict[str, Any], status: int = 400) -> str:
    answer = server.post(path, fields)
    assert answer.status_code == status and [*answer.json()] == ["error"], answer.text
    message: str = answer.json()["error"]
    return message


# ---- answers --------------------------------------------------------------------------------------------


def check_ending(last: ChatResponse | GenerateResponse, n_prompt: int, n_tokens: int) -> None:
    assert last.done and last.model == "fake:latest" and last.created_at is not None
    assert (last.prompt_eval_count, last.eval_count, last.load_duration) == (n_prompt, n_tokens, 0)
    assert last.prompt_eval_duration is not None and last.prompt_eval_duration > 0 and last.total_duration is not None
    # By the fake engine's clock, which may be ahead of the real one, 1.5 ms are between two tokens.
    assert last.eval_duration == min(round((n_tokens - 1) * 1.5e6), last.total_duration - 1)
    assert last.total_duration == last.prompt_eval_duration + last.eval_duration


def test_a_chat(client: ollama.Client) -> None:
    whole = client.chat("fake", USER)
    assert whole.message.content == SAID and whole.message.role == "assistant" and whole.done_reason == "stop"
    n_prompt = len(f"[user]{SAID}\n[assistant]")
    check_ending(whole, n_prompt, len(SAID) + 1)
    chunks = [*client.chat("fake", USER, stream=True, options={"num_predict": 3})]
    assert [chunk.message.content for chunk in chunks] == ["W", "h", "y", ""]
    assert [chunk.done for chunk in chunks] == [False, False, False, True] and chunks[-1].done_reason == "length"
    check_ending(chunks[-1], n_prompt, 3)


def test_a_stream_is_lines_of_json(shared: Running) -> None:
    for path, fields in (("/api/chat", {"messages": USER}), ("/api/generate", {"prompt": SAID})):
        answer = shared.post(path, {"model": "fake", **fields})  # streams unless told otherwise
        assert answer.headers["content-type"] == "application/x-ndjson" and answer.text.endswith("\n")
        assert [json.loads(line)["done"] for line in answer.text.splitlines()].count(True) == 1
        assert shared.post(path, {"stream": False, **fields}).headers["content-type"] == "application/json"


def test_a_prompt_is_a_users_message(client: ollama.Client, shared: Running) -> None:
    whole = client.generate("fake", SAID, system="Be brief.")
    assert whole.response == SAID and whole.done_reason == "stop"
    assert shared.engine.asked[-1][0] == f"[system]Be brief.\n[user]{SAID}\n[assistant]"
    check_ending(whole, len(shared.engine.asked[-1][0]), len(SAID) + 1)
    assert "".join(chunk.response or "" for chunk in client.generate("fake", SAID, stream=True)) == SAID


def test_a_raw_prompt_is_left_as_it_is(client: ollama.Client, shared: Running) -> None:
    """As in api.md, "Request (Raw Mode)"."""
    prompt = "[INST] why is the sky blue? [/INST]"
    assert client.generate("fake", prompt, raw=True).context is None
    assert shared.engine.asked[-1][0] == prompt
    message = refusal(shared, "/api/generate", {"prompt": prompt, "raw": True, "system": "Be brief."})
    assert "raw" in message and "system" in message


def test_a_model_without_a_template_goes_on_from_the_prompt() -> None:
    with running(FakeEngine(byte_tokenizer(None))) as server, client_of(server) as client:
        client.generate("fake", "def compute_gcd(a, b):")
        assert server.engine.asked[-1][0] == "def compute_gcd(a, b):"


def test_a_context_continues(client: ollama.Client, shared: Running) -> None:
    first = client.generate("fake", "Hi")
    assert first.context is not None and first.context[-1] == END
    client.generate("fake", "And?", context=first.context)
    assert shared.engine.asked[-1][0] == "[user]Hi\n[assistant]Hi[user]And?\n[assistant]"
    assert "context" in refusal(shared, "/api/generate", {"prompt": "Hi", "context": [258]})


def test_an_answer_goes_on_from_the_last_message(client: ollama.Client, shared: Running) -> None:
    client.chat("fake", [*USER, {"role": "assistant", "content": "The sky"}])
    assert shared.engine.asked[-1][0].endswith("[assistant]The sky")


@pytest.mark.parametrize("keep_alive", [None, 0, "5m"])
def test_nothing_to_answer_is_a_model_to_load(keep_alive: Any, client: ollama.Client) -> None:
    for answer in client.generate("fake", keep_alive=keep_alive), client.chat("fake", keep_alive=keep_alive):
        assert answer.done and answer.done_reason == "load"
    (chunk,) = client.generate("fake", stream=True)
    assert chunk.done and chunk.response == ""


def test_log_probabilities(client: ollama.Client) -> None:
    whole = client.chat("fake", USER, logprobs=True, top_logprobs=2, options={"num_predict": 3})
    assert whole.logprobs is not None and "".join(entry.token for entry in whole.logprobs) == "Why"
    assert all(entry.logprob == -0.25 and len(entry.top_logprobs or ()) == 2 for entry in whole.logprobs)
    chunks = client.generate("fake", SAID, logprobs=True, stream=True, options={"num_predict": 3})
    assert ["".join(entry.token for entry in chunk.logprobs or ()) for chunk in chunks] == ["W", "h", "y", ""]


# ---- options --------------------------------------------------------------------------------------------


def test_options_reach_the_engine(client: ollama.Client, shared: Running) -> None:
    client.generate("fake", "Hi", options=OPTIONS)
    asked = shared.engine.asked[-1][1]
    same = ("seed", "top_k", "top_p", "min_p", "temperature", "repeat_penalty", "presence_penalty", "frequency_penalty")
    assert {name: asked[name] for name in same} == {name: OPTIONS[name] for name in same}
    assert asked["max_tokens"] == 100 and asked["stop"] == ("\n", "user:")


def test_defaults_are_those_of_the_api(client: ollama.Client, shared: Running) -> None:
    """modelfile.mdx, "Valid Parameters and Values"."""
    for options in {}, {"num_predict": -1, "temperature": None}, {"num_predict": 0}, {"num_predict": -2}:
        client.chat("fake", USER, options=options)
        asked = shared.engine.asked[-1][1]
        assert (asked["temperature"], asked["top_k"], asked["top_p"], asked["min_p"]) == (0.8, 40, 0.9, 0.0)
        assert asked["repeat_penalty"] == 1.0 and asked["seed"] is None and asked["max_tokens"] == 2048


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"temperature": "hot"}, "options.temperature"),
        ({"num_predict": 1.5}, "options.num_predict"),
        ({"tfs_z": 0.5}, "options.tfs_z"),
        ("hot", "options"),
    ],
)
def test_wrong_options(options: Any, name: str, shared: Running) -> None:
    for path, fields in (("/api/chat", {"messages": USER}), ("/api/generate", {"prompt": "Hi"})):
        assert refusal(shared, path, {**fields, "options": options}).startswith(name + ":")
    options = {"mirostat": 2, "typical_p": 0.9, "tfs_z": 1, "dry_multiplier": 0.8, "dry_sequence_breakers": ["x"]}
    assert shared.post("/api/chat", {"messages": USER, "options": options}).status_code == 200


# ---- format, tools, thoughts ----------------------------------------------------------------------------


def test_formats(client: ollama.Client, shared: Running) -> None:
    """The schema of api.md, "Request (Structured outputs)"."""
    properties = {"age": {"type": "integer"}, "available": {"type": "boolean"}}
    schema = {"type": "object", "properties": properties, "required": ["age", "available"]}
    for format, expected in (("json", {"type": "object"}), (schema, schema), ("", None)):
        client.generate("fake", "Hi", format=format)  # type: ignore[arg-type]
        assert shared.engine.asked[-1][1].get("schema") == expected
        client.chat("fake", USER, format=format)  # type: ignore[arg-type]
        assert shared.engine.asked[-1][1].get("schema") == expected
    for wrong in "xml", ["json"], {"type": "nothing"}:
        assert refusal(shared, "/api/chat", {"messages": USER, "format": wrong}).startswith("format")


def weather(city: str) -> str:
    """Get the weather in a given city

    Args:
        city: The city to get the weather for
    """
    return f"Rain in {city}"


def clock() -> str:
    """Tell the time"""
    return "noon"


@pytest.fixture(scope="module")
def calling() -> Iterator[Running]:
    engine = FakeEngine(byte_tokenizer(CALLING))
    engine.reply = lambda text: CALLS
    with running(engine) as server:
        yield server


def test_tools_are_called(calling: Running) -> None:
    expected = [("weather", {"city": "Zürich"}), ("clock", {})]
    with client_of(calling) as client:
        whole = client.chat("fake", USER, tools=[weather, clock])
        chunks = [*client.chat("fake", USER, tools=[weather, clock], stream=True)]
        cut = client.chat("fake", USER, tools=[weather, clock], options={"num_predict": 60})
    assert whole.message.content == "I look." and whole.done_reason == "stop"
    assert [(c.function.name, c.function.arguments) for c in whole.message.tool_calls or ()] == expected
    calls = [call for chunk in chunks for call in chunk.message.tool_calls or ()]
    assert [(call.function.name, call.function.arguments) for call in calls] == expected
    assert "".join(chunk.message.content or "" for chunk in chunks) == "I look."
    assert cut.done_reason == "length" and not cut.message.tool_calls  # no call with half its arguments


def test_results_find_their_calls(calling: Running) -> None:
    """Neither has an id. The messages are as in api.md, "Chat request (With history, with tools)"."""
    called = [{"function": {"name": name, "arguments": {"city": name}}} for name in ("weather", "clock", "weather")]
    messages = [
        *USER,
        {"role": "assistant", "content": "", "tool_calls": called},
        {"role": "tool", "content": "noon", "tool_name": "clock"},
        {"role": "tool", "content": "rain"},
        {"role": "tool", "content": "snow", "tool_name": "weather"},
    ]
    template = (
        "{% for m in messages %}{{ m.role }}"
        "{% for c in m.tool_calls or [] %}<{{ c.id }} {{ c.function.name }} {{ c.function.arguments | tojson }}>"
        "{% endfor %}"
        "{% if m.role == 'tool' %}({{ m.tool_call_id }} {{ m.name }} {{ m.content }}){% endif %}{% endfor %}"
    )
    with running(FakeEngine(byte_tokenizer(template))) as server, client_of(server) as client:
        client.chat("fake", messages)
        assert server.engine.asked[-1][0] == (
            'userassistant<000010000 weather {"city": "weather"}><000010001 clock {"city": "clock"}>'
            '<000010002 weather {"city": "weather"}>'
            "tool(000010001 clock noon)tool(000010000 weather rain)tool(000010002 weather snow)"
        )


def test_thoughts() -> None:
    engine = FakeEngine(byte_tokenizer(TEMPLATE + "{% if add_generation_prompt %}<think>\n{% endif %}"))
    engine.reply = lambda text: "Two and two.</think>4"
    with running(engine) as server, client_of(server) as client:
        whole = client.chat("fake", USER, think=True)
        assert (whole.message.thinking, whole.message.content) == ("Two and two.", "4")
        chunks = [*client.generate("fake", SAID, think="low", stream=True)]
        assert "".join(chunk.thinking or "" for chunk in chunks) == "Two and two."
        assert "".join(chunk.response or "" for chunk in chunks) == "4"
        assert "thinking" in (client.show("fake").capabilities or ())
        assert "think" in refusal(server, "/api/chat", {"messages": USER, "think": "somewhat"})


@pytest.mark.parametrize(("think", "shown"), [(None, "-"), (True, "True"), (False, "False"), ("high", "True high")])
def test_whether_to_think_reaches_the_template(think: Any, shown: str) -> None:
    template = "{{ enable_thinking if enable_thinking is defined else '-' }} {{ reasoning_effort or '' }}{# <think> #}"
    with running(FakeEngine(byte_tokenizer(template))) as server, client_of(server) as client:
        client.chat("fake", USER, think=think)
        assert server.engine.asked[-1][0].strip() == shown


def test_earlier_thoughts_reach_the_template() -> None:
    template = "{% for m in messages %}{{ m.reasoning_content or '' }}{% endfor %}"
    with running(FakeEngine(byte_tokenizer(template))) as server, client_of(server) as client:
        client.chat("fake", [{"role": "assistant", "content": "4", "thinking": "Two and two."}, *USER])
        assert server.engine.asked[-1][0] == "Two and two."


def test_a_model_that_does_not_think(client: ollama.Client) -> None:
    assert client.chat("fake", USER, think=False).message.content == SAID
    for think in True, "low":
        with pytest.raises(ollama.ResponseError, match="does not support thinking") as refused:
            client.chat("fake", USER, think=think)  # type: ignore[call-overload]
        assert refused.value.status_code == 400


# ---- models ---------------------------------------------------------------------------------------------


def test_models() -> None:
    engine = FakeEngine(byte_tokenizer())
    facts = ModelFacts("llama", 134_515_008, 576, "q8_0", 150_000_000, is_gguf=True)
    with running(engine, loaded=False) as server, client_of(server) as client:
        with pytest.raises(ollama.ResponseError, match="not ready") as refused:
            client.list()
        assert refused.value.status_code == 503
        server.service.ready(served(engine, name="SmolLM2", facts=facts))
        (listed,) = client.list().models
        assert listed.model == "SmolLM2:latest" and listed.size == 150_000_000 and listed.modified_at is not None
        assert listed.digest is not None and len(listed.digest) == 64 and listed.details is not None
        assert (listed.details.family, listed.details.format) == ("llama", "gguf")
        assert (listed.details.parameter_size, listed.details.quantization_level) == ("134.52M", "Q8_0")
        (loaded,) = client.ps().models
        assert loaded.name == listed.model and loaded.digest == listed.digest and loaded.context_length == 2048
        assert loaded.expires_at is not None and loaded.expires_at.year > 2200 and loaded.size_vram == loaded.size
        for name in "SmolLM2", "smollm2:latest":
            shown = client.show(name)
            assert shown.details == listed.details and shown.template == engine.tokenizer.chat_template
            assert shown.capabilities == ["completion"] and shown.modelinfo is not None
            assert (
                shown.modelinfo["general.architecture"] == "llama" and shown.modelinfo["llama.context_length"] == 2048
            )
            assert client.pull(name).status == "success"
        assert [progress.status for progress in client.pull("smollm2", stream=True)][-1] == "success"
        for call in client.show, client.pull:
            with pytest.raises(ollama.ResponseError, match="'llama3' not found; the model here is SmolLM2") as refused:
                call("llama3")
            assert refused.value.status_code == 404
        assert "llmcl pull" in refused.value.error
        assert refusal(server, "/api/show", {}) == "model is required"


def test_a_name_with_a_tag_has_no_second_one() -> None:
    engine = FakeEngine(byte_tokenizer())
    with running(engine, loaded=False) as server, client_of(server) as client:
        server.service.ready(served(engine, name="org/model:Q4_K_M"))
        assert client.list().models[0].model == "org/model:Q4_K_M" == client.chat("any", USER).model


def test_version(shared: Running) -> None:
    major, minor, _ = map(int, shared.http.get("/api/version").json()["version"].split("."))
    assert (major, minor) >= (0, 6)  # what Copilot asks for


@pytest.mark.parametrize("path", ["/api/embed", "/api/embeddings"])
def test_embeddings_are_not_made(path: str, shared: Running) -> None:
    assert "no embeddings" in refusal(shared, path, {"model": "fake", "input": "x"}, 501)


# ---- errors, keys, silence ------------------------------------------------------------------------------


def test_errors_are_the_clients_own(client: ollama.Client, shared: Running) -> None:
    with pytest.raises(ollama.ResponseError, match="fake takes no images") as refused:
        client.chat("fake", [{**USER[0], "images": ["aGVsbG8="]}])
    assert refused.value.status_code == 400
    for fields in {"images": ["aGVsbG8="]}, {"template": "{{ .Prompt }}"}:
        assert refusal(shared, "/api/generate", {"prompt": "Hi", **fields}).startswith(next(iter(fields)))
    with pytest.raises(ollama.ResponseError, match="maximum context length is 2048 tokens"):
        client.generate("fake", "x" * 3000)
    with pytest.raises(ollama.ResponseError, match="Not Found"):
        client.delete("fake")


def test_an_error_within_a_stream(server: Running) -> None:
    server.engine.fail = KeyError("k")
    with client_of(server) as client:
        stream = client.chat("fake", USER, stream=True)
        assert next(stream).message.content == "W"
        with pytest.raises(ollama.ResponseError, match="unexpected KeyError"):
            next(stream)


def test_keys_and_origins() -> None:
    with running(api_keys=("key",)) as server:
        with client_of(server) as stranger, pytest.raises(ollama.ResponseError, match="no valid API key"):
            stranger.list()
        with client_of(server, headers={"Authorization": "Bearer key"}) as client:
            assert client.chat("fake", USER).message.content == SAID
    with running() as server:
        for path in "/api/chat", "/api/generate", "/api/pull":
            answer = server.post(path, {"model": "fake", "messages": USER}, origin="https://example.org")
            assert answer.status_code == 403 and "origin" in answer.json()["error"]


def test_a_silent_stream_shows_that_it_lives() -> None:
    engine = FakeEngine(byte_tokenizer())
    engine.delay_s, engine.reply = 0.15, lambda text: "abc"
    with running(engine, ping_s=0.05) as server, client_of(server) as client:
        texts = [chunk.message.content for chunk in client.chat("fake", USER, stream=True)]
    assert "".join(text or "" for text in texts) == "abc" and texts.count("") > 3


def test_a_client_that_leaves_frees_its_place(server: Running) -> None:
    server.engine.hold_after = 2
    with client_of(server) as client:
        stream = client.generate("fake", SAID, stream=True)
        assert next(stream).response == "W"
        stream.close()  # type: ignore[attr-defined]
        wait_for(lambda: not server.engine.open)
