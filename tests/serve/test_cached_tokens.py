"""What usage says of prompts that were computed before, in each API; and that a changing header does not spoil them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic.types import Message
from fake_server import FakeEngine, Running, byte_tokenizer, events, running, strictly
from openai.types import Completion
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

USER: list[Any] = [{"role": "user", "content": "Hello"}]
N_PROMPT = len("[user]Hello\n[assistant]")


@pytest.fixture(scope="module")
def warm() -> Iterator[Running]:
    """A server whose engine has 16 tokens of each prompt."""
    engine = FakeEngine(byte_tokenizer(), max_sequences=8)
    engine.cached = 16
    with running(engine) as server:
        yield server


@pytest.mark.parametrize("n", [1, 3])
def test_chat_completions(n: int, warm: Running) -> None:
    usage = strictly(ChatCompletion, warm.chat(n=n).json()).usage
    assert usage is not None and usage.prompt_tokens_details is not None
    assert (usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens) == (N_PROMPT, 16)
    stream = events(warm.chat(n=n, stream=True, stream_options={"include_usage": True}).text)
    assert json.loads(stream[-2][1])["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}


def test_prompts_of_a_completion_are_added_up(warm: Running) -> None:
    answer = warm.post("/v1/completions", {"prompt": ["a" * 20, "b" * 30], "n": 2, "max_tokens": 3})
    usage = strictly(Completion, answer.json()).usage
    assert usage is not None and usage.prompt_tokens_details is not None
    assert (usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens) == (50, 32)


def test_responses(warm: Running) -> None:
    usage = strictly(Response, warm.post("/v1/responses", {"input": "Hello"}).json()).usage
    assert usage is not None and (usage.input_tokens, usage.input_tokens_details.cached_tokens) == (N_PROMPT, 16)


def test_messages_counts_them_apart(warm: Running) -> None:
    asked = {"messages": USER, "max_tokens": 9}
    usage = strictly(Message, warm.post("/v1/messages", asked).json()).usage
    assert (usage.input_tokens, usage.cache_read_input_tokens) == (N_PROMPT - 16, 16)
    with (
        anthropic.Anthropic(base_url=warm.url, api_key="none") as client,
        client.messages.stream(model="any", max_tokens=9, messages=USER) as stream,
    ):
        usage = stream.get_final_message().usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (N_PROMPT - 16, 16, 6)
