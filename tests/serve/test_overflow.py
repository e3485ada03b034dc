"""A prompt that is longer than the context, in the words by which agents know that they have to shorten it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from fake_server import Running, events

from llmcl.serve.served import Served

# The expressions that agents match the text of an error with, case aside, from their sources in November 2026.
# Codex looks at the code of a response that failed; aider gets LiteLLM's ContextWindowExceededError.
AGENTS = {
    "pi": ("prompt is too long", r"maximum context length is \d+ tokens", "reduce the length of the messages"),
    "opencode": ("prompt is too long", r"maximum context length is \d+ tokens", "context[_ ]length[_ ]exceeded"),
    "Claude Code": (r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)",),
    "LiteLLM": ("prompt is too long", "this model's maximum context length is"),
    "OpenHands": ("prompt is too long", "contextwindowexceedederror", "this model's maximum context length is"),
    "CrewAI": ("maximum context length", "context length exceeded", "too many tokens"),
}
OPENAI = [name for name in AGENTS if name != "Claude Code"]
ANTHROPIC = [name for name in AGENTS if name != "CrewAI"]
PROMPTS = {"exact": "x" * 2100, "counted": "x" * 300_000, "enormous": "x" * 3_000_000}


def asked(path: str, text: str) -> dict[str, Any]:
    name = {"/v1/completions": "prompt", "/v1/responses": "input"}.get(path)
    return {"max_tokens": 5} | ({name: text} if name else {"messages": [{"role": "user", "content": text}]})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", PROMPTS.values(), ids=PROMPTS)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_agents_that_ask_as_openais_clients(path: str, text: str, stream: bool, shared: Running) -> None:
    answer = shared.post(path, asked(path, text) | {"stream": stream})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["code"] == "context_length_exceeded"
    for name in OPENAI:
        assert any(re.search(phrase, error["message"], re.IGNORECASE) for phrase in AGENTS[name]), name
    assert error["message"].startswith("This model's maximum context length is 2048 tokens. However, your prompt has ")
    assert answer.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", PROMPTS.values(), ids=PROMPTS)
def test_agents_that_ask_as_anthropics_clients(text: str, stream: bool, shared: Running) -> None:
    answer = shared.post("/v1/messages", asked("/v1/messages", text) | {"stream": stream})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["type"] == "invalid_request_error"
    for name in ANTHROPIC:
        if name != "Claude Code" or len(text) < 1_000_000:  # nobody counts the tokens of enormous ones
            assert any(re.search(phrase, error["message"], re.IGNORECASE) for phrase in AGENTS[name]), name


def test_claude_code_reads_by_how_much(shared: Running) -> None:
    message = shared.post("/v1/messages", asked("/v1/messages", "x" * 2100)).json()["error"]["message"]
    assert message == "prompt is too long: 2118 tokens > 2048 maximum"  # with "[user]", a line break, "[assistant]"


def test_many_messages_are_as_many_tokens_at_least(shared: Running) -> None:
    said = [{"role": "user", "content": ""}] * 2049
    message = shared.post("/v1/messages", {"messages": said, "max_tokens": 1}).json()["error"]["message"]
    assert message == "prompt is too long: at least 2049 tokens > 2048 maximum"


def test_codex_reads_the_code_of_a_response_that_failed(shared: Running) -> None:
    """It gives up at a 400, and shortens a conversation at this event. What it does not stream stays a 400."""
    asked_for = {"input": "x" * 2100, "stream": True}
    for path in "/v1/responses", "/responses":
        answer = shared.post(path, asked_for, originator="codex_cli_rs")
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        received = [(name, json.loads(data)) for name, data in events(answer.text)]
        assert [name for name, _ in received] == ["response.created", "response.in_progress", "response.failed"]
        failed = received[-1][1]["response"]
        assert failed["status"] == "failed" and failed["error"]["code"] == "context_length_exceeded"
        assert failed["error"]["message"].startswith("This model's maximum context length is 2048 tokens.")
    assert shared.post("/v1/responses", asked_for | {"stream": False}, originator="codex_cli_rs").status_code == 400
    assert shared.post("/v1/responses", asked_for).status_code == 400
    assert shared.post("/v1/responses", {"input": [], "stream": True}, originator="codex_cli_rs").status_code == 400


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_fills_the_context(stream: bool, server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine stops there; that is another end than the limit of the request."""
    answer = server.engine._answer
    monkeypatch.setattr(server.engine, "_answer", lambda *args, **options: answer(*args, **options | {"max_tokens": 3}))
    text = server.post("/v1/messages", asked("/v1/messages", "Hello") | {"stream": stream}).text
    assert '"stop_reason": "model_context_window_exceeded"' in text
    limited = asked("/v1/messages", "Hello") | {"max_tokens": 3, "stream": stream}
    assert '"stop_reason": "max_tokens"' in server.post("/v1/messages", limited).text
    assert '"finish_reason": "length"' in server.chat("Hello", stream=stream).text
    text = server.post("/v1/responses", asked("/v1/responses", "Hello") | {"stream": stream}).text
    assert '"status": "incomplete"' in text and '{"reason": "max_output_tokens"}' in text


def test_a_template_that_makes_too_much_of_a_conversation(shared: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no size is known the words are still there."""
    from llmcl.errors import ContextLengthError

    def too_long(*args: object, **options: object) -> None:
        raise ContextLengthError("the conversation has 50 MiB, which its chat template cannot make a text of")

    monkeypatch.setattr(Served, "encode_chat", too_long)
    for path in ("/v1/messages", "/v1/chat/completions"):
        error = shared.post(path, asked(path, "Hi")).json()["error"]
        assert "prompt is too long: " in error["message"] and "50 MiB" in error["message"]
