"""Text between a prefix and a suffix: `suffix`, and /infill. The prompts are those that each model's page shows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ollama
import openai
import pytest
from fake_server import FakeEngine, Running, byte_tokenizer, events, running, served

from llmcl.tokenizer import Tokenizer

QWEN = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")
PREFIX, SUFFIX = "def print_hello_world():\n    ", "\n    print('Hello world!')"  # of StarCoder's page
# Families, the tokens of their tokenizers, and their prompt.
PROMPTS = {
    "Qwen2.5-Coder": (QWEN, ("<|fim_prefix|>", PREFIX, "<|fim_suffix|>", SUFFIX, "<|fim_middle|>")),
    "StarCoder": (
        ("<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>", "<filename>", "<reponame>"),
        ("<fim_prefix>", PREFIX, "<fim_suffix>", SUFFIX, "<fim_middle>"),
    ),
    "DeepSeek-Coder": (
        ("<｜fim▁hole｜>", "<｜fim▁begin｜>", "<｜fim▁end｜>"),
        ("<｜fim▁begin｜>", PREFIX, "<｜fim▁hole｜>", SUFFIX, "<｜fim▁end｜>"),
    ),
    "Code Llama": (("▁<PRE>", "▁<MID>", "▁<SUF>", "▁<EOT>"), ("▁<PRE>", PREFIX, "▁<SUF>", SUFFIX, "▁<MID>")),
    "Seed-Coder": (
        ("<[fim-suffix]>", "<[fim-prefix]>", "<[fim-middle]>"),
        ("<[fim-suffix]>", SUFFIX, "<[fim-prefix]>", PREFIX, "<[fim-middle]>"),
    ),
    "Codestral": (("[PREFIX]", "[MIDDLE]", "[SUFFIX]"), ("[SUFFIX]", SUFFIX, "[PREFIX]", PREFIX)),
}


class InfillEngine(FakeEngine):
    """Keeps the ids of each prompt."""

    def __init__(self, tokenizer: Tokenizer):
        super().__init__(tokenizer)
        self.prompts: list[list[int]] = []
        self.reply = lambda text: "pass"

    def stream(self, prompt: Sequence[int], **options: Any) -> Any:
        self.prompts.append([*prompt])
        return super().stream(prompt, **options)


@contextmanager
def infilling(tokens: Sequence[str], **changes: Any) -> Iterator[tuple[Running, InfillEngine]]:
    """The tokens are no special ones, as in Qwen's tokenizer.json, so texts of prompts show them."""
    engine = InfillEngine(byte_tokenizer(added=tokens))
    with running(engine, loaded=False) as server:
        server.service.ready(served(engine, **changes))
        yield server, engine


@pytest.fixture(scope="module")
def qwen() -> Iterator[tuple[Running, InfillEngine]]:
    with infilling(QWEN) as pair:
        yield pair


@pytest.mark.parametrize(("tokens", "parts"), PROMPTS.values(), ids=PROMPTS)
def test_each_familys_prompt(tokens: Sequence[str], parts: Sequence[str]) -> None:
    with infilling(tokens) as (server, engine):
        asked = {"prompt": PREFIX, "suffix": SUFFIX, "max_tokens": 9}
        assert server.post("/v1/completions", asked).json()["choices"][0]["text"] == "pass"
        assert engine.asked[-1][0] == "".join(parts)
        assert server.post("/infill", {"input_prefix": PREFIX, "input_suffix": SUFFIX}).json()["content"] == "pass"
        assert engine.asked[-1][0].endswith("".join(parts))


def test_openais_and_ollamas_clients(qwen: tuple[Running, InfillEngine]) -> None:
    server, engine = qwen
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        answer = client.completions.create(model="any", prompt=[PREFIX, "x"], suffix=SUFFIX, max_tokens=9)
        assert [choice.text for choice in answer.choices] == ["pass", "pass"]
        assert {text.partition("<|fim_suffix|>")[0] for text, _ in engine.asked[-2:]} == {
            f"<|fim_prefix|>{PREFIX}",
            "<|fim_prefix|>x",
        }
        stream = client.completions.create(model="any", prompt=PREFIX, suffix=SUFFIX, max_tokens=9, stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == "pass"
        assert client.completions.create(model="any", prompt=PREFIX, suffix="", max_tokens=9).choices[0].text
        assert engine.asked[-1][0] == PREFIX
    with ollama.Client(server.url, trust_env=False) as other:
        assert other.generate("fake", "def compute_gcd(a, b):", suffix="    return result").response == "pass"
        expected = "<|fim_prefix|>def compute_gcd(a, b):<|fim_suffix|>    return result<|fim_middle|>"
        assert engine.asked[-1][0] == expected
        assert "insert" in (other.show("fake").capabilities or ())


def test_other_files_come_before(qwen: tuple[Running, InfillEngine]) -> None:
    """As llama-server's README has it; `prompt` goes on from the prefix, as its code has it."""
    server, engine = qwen
    extra = [{"filename": "library.py", "text": "class Book:\n"}, {"text": "x = 1\n"}]
    asked = {"input_prefix": PREFIX, "input_suffix": SUFFIX, "input_extra": extra, "prompt": "print("}
    assert server.post("/infill", asked).status_code == 200
    assert engine.asked[-1][0] == (
        "<|repo_name|>myproject\n<|file_sep|>library.py\nclass Book:\n<|file_sep|>tmp\nx = 1\n<|file_sep|>filename\n"
        f"<|fim_prefix|>{PREFIX}print(<|fim_suffix|>{SUFFIX}<|fim_middle|>"
    )
    with infilling(PROMPTS["DeepSeek-Coder"][0]) as (server, engine):
        server.post("/infill", asked)
        snippets = "\n\n--- snippet ---\n\nclass Book:\n\n\n--- snippet ---\n\nx = 1\n"
        assert engine.asked[-1][0].startswith(f"{snippets}<｜fim▁begin｜>{PREFIX}")


def test_answers_are_llama_servers(qwen: tuple[Running, InfillEngine]) -> None:
    server, engine = qwen
    asked = {"input_prefix": PREFIX, "input_suffix": SUFFIX, "n_predict": 3}
    whole = server.post("/infill", asked).json()
    assert (whole["content"], whole["stop"], whole["stop_type"]) == ("pas", True, "limit")
    assert whole["tokens_predicted"] == 3 and whole["tokens_evaluated"] == len(engine.prompts[-1])
    timings = whole["timings"]
    assert timings["prompt_n"] == whole["tokens_evaluated"] and timings["predicted_n"] == 3
    assert timings["predicted_ms"] > 0 and timings["predicted_per_second"] > 0 and timings["prompt_ms"] >= 0
    streamed = [json.loads(data) for _, data in events(server.post("/infill", asked | {"stream": True}).text)]
    assert [chunk["content"] for chunk in streamed] == ["p", "a", "s", ""]
    assert [chunk["stop"] for chunk in streamed] == [False, False, False, True]
    assert streamed[-1]["timings"]["predicted_n"] == 3
    stopped = server.post("/infill", asked | {"stop": ["as"]}).json()
    assert (stopped["content"], stopped["stop_type"], stopped["stopping_word"]) == ("p", "word", "as")
    assert server.post("/infill", asked | {"n_predict": -1}).json()["stop_type"] == "eos"
    read = server.post("/infill", asked | {"n_predict": 0}).json()  # llama.vscode: only to have the prompt read
    assert read["content"] == "" and engine.asked[-1][1]["max_tokens"] == 1


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_limit_of_time(stream: bool) -> None:
    """llama-server's: milliseconds since the first token, and only once a line has ended."""
    with infilling(QWEN) as (server, engine):
        engine.delay_s, engine.read = 0.02, (7, 7)
        asked = {"input_prefix": PREFIX, "input_suffix": SUFFIX, "stream": stream}

        def ended(reply: str, ms: int) -> dict[str, Any]:
            engine.reply = lambda text: reply
            answer = server.post("/infill", asked | {"t_max_predict_ms": ms})
            chunks = [json.loads(data) for _, data in events(answer.text)] if stream else [answer.json()]
            last: dict[str, Any] = chunks[-1]
            return last | {"content": "".join(chunk["content"] for chunk in chunks)}

        late = ended("x" * 10 + "\n" + "y" * 100, 100)
        assert late["content"].startswith("x" * 10 + "\n") and "y" * 50 not in late["content"]
        assert late["stop_type"] == "limit" and late["timings"]["cache_n"] == 7
        assert late["tokens_predicted"] == len(late["content"])
        assert ended("x" * 20, 100)["stop_type"] == "eos"
        assert ended("x\n" + "y" * 10, 0)["content"] == "x\n" + "y" * 10
        engine.reply = lambda text: "pass"


def test_defaults_are_llama_servers(qwen: tuple[Running, InfillEngine]) -> None:
    server, engine = qwen
    server.post("/infill", {"input_prefix": "a", "input_suffix": "b", "top_k": None})
    options = engine.asked[-1][1]
    assert (options["temperature"], options["top_k"], options["top_p"], options["min_p"]) == (0.8, 40, 0.95, 0.05)


@pytest.mark.parametrize("end", ["<|fim_pad|>", "<|file_sep|>", "<|repo_name|>"])
def test_the_models_own_ends_end_it(end: str, qwen: tuple[Running, InfillEngine]) -> None:
    server, engine = qwen
    engine.reply = lambda text: f"pass{end}other.py"
    try:
        for stream in False, True:
            answer = server.post("/infill", {"input_prefix": PREFIX, "input_suffix": SUFFIX, "stream": stream})
            chunks = [json.loads(data) for _, data in events(answer.text)] if stream else [answer.json()]
            assert "".join(chunk["content"] for chunk in chunks) == "pass"
            assert (chunks[-1]["stop_type"], chunks[-1]["stopping_word"]) == ("eos", "")
        choice = server.post("/v1/completions", {"prompt": "a", "suffix": "b"}).json()["choices"][0]
        assert choice["text"] == "pass" and choice["finish_reason"] == "stop"
        assert engine.tokenizer.id_of(end) in engine.asked[-1][1]["stop_token_ids"]
    finally:
        engine.reply = lambda text: "pass"


def test_code_that_quotes_the_tokens(qwen: tuple[Running, InfillEngine]) -> None:
    server, engine = qwen
    prefix, suffix = 'marks = ["<|fim_prefix|>", "<|fim_middle|>', '", "<|file_sep|><|fim_suffix|>"]'
    for path, asked in (
        ("/v1/completions", {"prompt": prefix, "suffix": suffix}),
        ("/infill", {"input_prefix": prefix, "input_suffix": suffix}),
    ):
        assert server.post(path, asked).status_code == 200
        assert engine.asked[-1][0].endswith(f"<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>")
        counts = [engine.prompts[-1].count(engine.tokenizer.id_of(token) or -1) for token in QWEN[:3]]
        assert counts == [1, 1, 1]


@pytest.mark.parametrize(
    ("n_prefix", "n_suffix", "n_extra", "expected"),
    [
        (500, 500, 500, (72, 23, 0)),
        (10, 500, 500, (10, 85, 0)),
        (500, 10, 0, (85, 10, 0)),
        (30, 10, 500, (30, 10, 55)),
        (30, 10, 20, (30, 10, 20)),
    ],
)
def test_what_is_too_long_is_cut(n_prefix: int, n_suffix: int, n_extra: int, expected: tuple[int, int, int]) -> None:
    """What is far from the gap: of 100 tokens three are the model's own, and a quarter is the suffix's."""
    with infilling(PROMPTS["DeepSeek-Coder"][0], max_context=128) as (server, engine):
        asked = {"input_prefix": "X" * n_prefix + "A", "input_suffix": "B" + "Y" * n_suffix, "n_predict": 28}
        assert server.post("/infill", asked | {"input_extra": [{"text": "E" * n_extra}]}).status_code == 200
        text = engine.asked[-1][0]
        assert (text.count("X"), text.count("Y"), text.count("E")) == expected
        assert "A<｜fim▁hole｜>B" in text and len(engine.prompts[-1]) <= 100


# ---- models that cannot ---------------------------------------------------------------------------------


def test_a_model_without_the_tokens(shared: Running) -> None:
    missing = "Infill is not supported by this model: prefix token is missing. suffix token is missing. middle token"
    answer = shared.post("/infill", {"input_prefix": "a", "input_suffix": "b"})
    assert answer.status_code == 501 and answer.json()["error"]["message"].startswith(missing)
    with openai.OpenAI(base_url=f"{shared.url}/v1", api_key="none") as client:
        with pytest.raises(openai.BadRequestError, match=missing) as refused:
            client.completions.create(model="any", prompt="a", suffix="b")
        assert refused.value.param == "suffix" and refused.value.code == "unsupported_parameter"
    with ollama.Client(shared.url, trust_env=False) as other, pytest.raises(ollama.ResponseError, match=missing):
        other.generate("fake", "a", suffix="b")


@pytest.mark.parametrize(
    ("path", "asked", "param"),
    [
        ("/infill", {"input_prefix": "a"}, "input_suffix"),
        ("/infill", {"input_suffix": "a"}, "input_prefix"),
        ("/infill", {"input_prefix": "a", "input_suffix": "b", "input_extra": "c"}, "input_extra"),
        ("/infill", {"input_prefix": "a", "input_suffix": "b", "temperature": "hot"}, "temperature"),
        ("/v1/completions", {"prompt": [5, 6], "suffix": "b"}, "prompt"),
        ("/v1/completions", {"prompt": "a", "suffix": "b", "echo": True}, "echo"),
        ("/v1/completions", {"prompt": "a", "suffix": 1}, "suffix"),
    ],
)
def test_wrong_fields(path: str, asked: dict[str, Any], param: str, qwen: tuple[Running, InfillEngine]) -> None:
    answer = qwen[0].post(path, asked)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param
