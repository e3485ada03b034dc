"""The server with a real model and the official clients: several at a time, cancelled and not."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import anthropic
import ollama
import openai
import pytest
from fake_server import FakeEngine, Running, byte_tokenizer, running, served, wait_for
from pydantic import BaseModel, Field

from llmcl.cli.serve import model_facts
from llmcl.engine.llm import LLM

QUESTIONS = ["Why is the sky blue?", "Name three primes.", "Who wrote Faust?", "What is a fish?"]


@pytest.fixture(scope="module")
def demo(smollm2: LLM) -> Iterator[Running]:
    """The demo model with weights in float32, three sequences at a time."""
    assert smollm2.tokenizer is not None
    with smollm2.engine(max_sequences=3, max_context=256) as engine:
        stand_in = FakeEngine(byte_tokenizer(), max_sequences=3)
        with running(stand_in, loaded=False) as server:
            model: Any = served(
                stand_in, name="smollm2", max_context=engine.max_context, vocab_size=smollm2.config.vocab_size
            )
            object.__setattr__(model, "engine", engine)
            object.__setattr__(model, "tokenizer", smollm2.tokenizer)
            object.__setattr__(model, "grammars", smollm2.grammars)
            server.service.ready(model)
            yield server


def ask(client: openai.OpenAI, question: str, **options: Any) -> str:
    stream = client.chat.completions.create(
        model="any",
        messages=[{"role": "user", "content": question}],
        max_tokens=12,
        temperature=0,
        stream=True,
        **options,
    )
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream)


@pytest.mark.slow
def test_clients_at_once_get_what_each_would_get_alone(demo: Running) -> None:
    with openai.OpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=5) as client:
        alone = [ask(client, question) for question in QUESTIONS]
        assert len(set(alone)) == len(QUESTIONS) and all(alone)
        with ThreadPoolExecutor(len(QUESTIONS)) as pool:
            assert [*pool.map(lambda question: ask(client, question), QUESTIONS)] == alone
        with anthropic.Anthropic(base_url=demo.url, api_key="none") as other:
            answer = other.messages.create(
                model="any",
                max_tokens=12,
                messages=[{"role": "user", "content": QUESTIONS[0]}],
                extra_body={"temperature": 0},
            )
            assert answer.content[0].type == "text" and answer.content[0].text == alone[0]
            assert answer.stop_reason == "max_tokens" and answer.usage.output_tokens == 12


@pytest.mark.slow
def test_a_header_that_changes_leaves_the_prefix_cache_as_it_is(demo: Running) -> None:
    """Of Claude Code: its first system block is another one with every request."""
    cached = []
    with anthropic.Anthropic(base_url=demo.url, api_key="none") as client:
        for n in range(3):
            answer = client.messages.create(
                model="any",
                max_tokens=1,
                system=[
                    {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2; cch={n}{n};"},
                    {"type": "text", "text": "You are an assistant who knows the sea. " * 12},
                ],
                messages=[{"role": "user", "content": f"{n}: name a fish."}],
            )
            assert answer.usage.cache_read_input_tokens is not None
            cached.append(answer.usage.cache_read_input_tokens)
            whole = answer.usage.input_tokens + cached[-1]
    assert cached[0] == 0 and cached[1] == cached[2] == 64 and whole > 64


@pytest.mark.slow
def test_a_greedy_token_is_the_most_likely(demo: Running) -> None:
    with openai.OpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.completions.create(model="any", prompt="The sky is", max_tokens=3, temperature=0, logprobs=2)
        found = answer.choices[0].logprobs
        assert found is not None and found.tokens is not None and found.top_logprobs is not None
        assert "".join(found.tokens) == answer.choices[0].text and len(found.tokens) == 3
        for token, value, top in zip(found.tokens, found.token_logprobs or [], found.top_logprobs, strict=True):
            assert -20 < value < 0 and max(top, key=lambda name: top[name]) == token and top[token] == value
        unlikely = {str(demo.service.served().tokenizer.encode(found.tokens[0])[0]): -100}
        other = client.completions.create(
            model="any", prompt="The sky is", max_tokens=1, temperature=0, logit_bias=unlikely
        )
        assert other.choices[0].text != found.tokens[0]


@pytest.mark.slow
def test_ollamas_client_gets_the_same_answer(demo: Running) -> None:
    """Whole, streamed and as a lone prompt, with the temperature 0 in place of the API's default."""
    with (
        openai.OpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=0) as client,
        ollama.Client(demo.url, trust_env=False) as other,
    ):
        expected = ask(client, QUESTIONS[0])
        options = {"temperature": 0, "num_predict": 12}
        said = [{"role": "user", "content": QUESTIONS[0]}]
        whole = other.chat("smollm2", said, options=options)
        assert whole.message.content == expected and whole.done_reason == "length" and whole.eval_count == 12
        streamed = [*other.chat("smollm2", said, options=options, stream=True)]
        assert "".join(chunk.message.content or "" for chunk in streamed) == expected
        assert other.generate("smollm2", QUESTIONS[0], options=options).response == expected
        last = streamed[-1]
        assert last.eval_duration and last.total_duration and 1 < last.eval_duration < last.total_duration
        schema = Fish.model_json_schema() | {"additionalProperties": False}
        fish = other.chat("smollm2", said, format=schema, options={"temperature": 0, "num_predict": 60})
        Fish.model_validate_json(fish.message.content or "")


def test_facts_of_the_model(smollm2: LLM) -> None:
    """Of SmolLM2-135M, as its page at Hugging Face has them."""
    facts = model_facts(smollm2, "smollm2")
    assert (facts.family, facts.parameter_size, facts.embedding_size) == ("llama", "134.52M", 576)
    assert 0.5 < facts.n_bytes / facts.n_parameters < 4.1


class Fish(BaseModel):
    color: Literal["red", "green", "blue"]
    legs: int = Field(ge=0, le=9)


@pytest.mark.slow
def test_answers_match_a_schema_and_tools_are_called(demo: Running) -> None:
    """Beside others, whole and streamed."""
    with openai.OpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=5) as client:
        said: list[Any] = [{"role": "user", "content": "Describe a fish, as JSON."}]
        plain = ask(client, QUESTIONS[0])
        with ThreadPoolExecutor(3) as pool:
            parsed = pool.submit(
                client.chat.completions.parse, model="any", messages=said, response_format=Fish, max_tokens=60
            )
            other = pool.submit(ask, client, QUESTIONS[0])
            called = pool.submit(
                client.chat.completions.create,
                model="any",
                messages=said,
                tools=[openai.pydantic_function_tool(Fish)],
                tool_choice="required",
                parallel_tool_calls=False,
                max_tokens=60,
            )
            fish = parsed.result().choices[0].message.parsed
            choice = called.result().choices[0]
            assert other.result() == plain
        assert isinstance(fish, Fish)
        assert choice.finish_reason == "tool_calls" and choice.message.tool_calls is not None
        (call,) = choice.message.tool_calls
        assert call.type == "function" and call.function.name == "Fish"
        assert Fish.model_validate_json(call.function.arguments)


@pytest.mark.slow
def test_a_client_that_leaves_frees_its_place(demo: Running) -> None:
    before, options = demo.metric("llamacpp:tokens_predicted_total"), {"max_tokens": 200, "stream": True}
    with openai.OpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=0) as client:
        streams = [
            client.completions.create(
                model="any", prompt=f"{n} Once upon a time", extra_body={"ignore_eos": True}, **options
            )
            for n in range(3)
        ]
        for stream in streams:
            next(iter(stream))
        for stream in streams:
            stream.close()
        wait_for(lambda: demo.service.in_flight == 0)
        assert demo.metric("llamacpp:tokens_predicted_total") - before < 3 * 200
        answer = client.completions.create(model="any", prompt="The sky is", max_tokens=2, temperature=0)
        assert answer.choices[0].text


@pytest.mark.slow
def test_a_prompt_is_scored(demo: Running) -> None:
    """As lm-evaluation-harness does: a context and how it may go on, which is greedy or not."""
    tokenizer: Any = demo.service.served().tokenizer
    context, following = tokenizer.encode("The capital of France is"), tokenizer.encode(" Paris")
    prompts = [[*context, *following], [*context, *tokenizer.encode(" blue")]]
    with openai.OpenAI(base_url=f"{demo.url}/v1", api_key="none") as client:
        answer = client.completions.create(model="any", prompt=prompts, echo=True, logprobs=1, max_tokens=1, seed=1)
        sums = []
        for choice, prompt in zip(answer.choices, prompts, strict=True):
            logprobs: Any = choice.logprobs
            assert choice.text.startswith(tokenizer.decode(prompt)) and len(logprobs.tokens) == len(prompt) + 1
            texts = zip(logprobs.text_offset, [*logprobs.text_offset[1:], len(choice.text)], strict=True)
            assert [choice.text[a:b] for a, b in texts] == logprobs.tokens
            of_following = slice(len(context), -1)
            sums.append(sum(logprobs.token_logprobs[of_following]))
            best = [max(of_token.values()) for of_token in logprobs.top_logprobs[of_following]]
            assert all(value <= top for value, top in zip(logprobs.token_logprobs[of_following], best, strict=True))
    assert sums[0] > sums[1] + 1  # the right answer is the likelier one
