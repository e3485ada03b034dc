"""`llmcl chat --server` against a server of this process: a conversation, times, and what goes wrong."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from fake_server import FakeEngine, Running, byte_tokenizer, running, wait_for
from made_tokenizers import channel_tokenizer

from llmcl.errors import ContextLengthError, ServerError, UsageError
from llmcl.serve.client import ServerChat


@pytest.fixture
def chat(server: Running) -> ServerChat:
    return ServerChat(server.url)


def say(chat: ServerChat, text: str, **options: Any) -> str:
    return "".join(piece.text for piece in chat.send(text, **options))


def test_a_conversation_goes_on(server: Running, chat: ServerChat) -> None:
    assert say(chat, "Hello", system_prompt="Be brief.") == "Hello" and say(chat, "a🙂b", max_tokens=1) == "a"
    prompts = [prompt for prompt, _ in server.engine.asked]
    assert prompts == [
        "[system]Be brief.\n[user]Hello\n[assistant]",
        "[system]Be brief.\n[user]Hello\n[assistant]Hello\n[user]a🙂b\n[assistant]",
    ]
    chat.reset()
    assert chat.messages == [] and say(chat, "new") == "new" and server.engine.asked[2][0] == "[user]new\n[assistant]"


def test_parameters_arrive(server: Running, chat: ServerChat) -> None:
    options: dict[str, Any] = {"temperature": 0.0, "top_k": 3, "repeat_penalty": 1.5, "presence_penalty": 0.5}
    assert say(chat, "one two", stop=("two",), **options) == "one "
    _, asked = server.engine.asked[0]
    assert asked.items() >= {**options, "stop": ("two",)}.items()


def test_the_last_piece_has_the_statistics(server: Running, chat: ServerChat) -> None:
    server.engine.cached = 16
    server.engine.delay_s = 0.02  # far longer than a busy machine holds two pieces up
    *pieces, last = chat.send("Hello")
    assert [piece.tbt_ms is None for piece in pieces] == [True, False, False, False, False]
    stats = last.stats
    assert last.finish_reason == "stop" and stats is not None and stats.generated_tokens == 6
    assert (stats.prompt_tokens, stats.cached_tokens) == (23, 16)
    assert stats.ttft_ms is not None and stats.ttft_ms >= 2 and (stats.tbt_ms["p50"] or 0) >= 1


def test_thoughts_are_shown_and_not_kept() -> None:
    engine = FakeEngine(channel_tokenizer())
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    engine.reply = lambda text: f"{thought}<|channel|>final<|message|>It is 4."
    with running(engine) as server:
        chat = ServerChat(server.url)
        assert say(chat, "2+2?") == "<think>\nHm.\n</think>\n\nIt is 4."
        assert chat.messages[-1] == {"role": "assistant", "content": "It is 4."}


def test_an_answer_without_text(server: Running, chat: ServerChat) -> None:
    server.engine.reply = lambda text: ""
    (piece,) = chat.send("Hello")
    assert piece.text == "" and piece.finish_reason == "stop" and piece.stats is not None
    assert chat.messages == [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": ""}]


def test_who_stops_frees_the_place_and_keeps_what_was_said(server: Running, chat: ServerChat) -> None:
    server.engine.hold_after = 2
    stream = chat.send("Hello")
    assert next(stream).text + next(stream).text == "He"
    stream.close()
    wait_for(lambda: not server.engine.open)
    assert chat.messages[-1] == {"role": "assistant", "content": "He"}


def test_a_key() -> None:
    with running(api_keys=("key",)) as server:
        assert say(ServerChat(server.url + "/v1/", "key"), "Hello") == "Hello"
        with pytest.raises(ServerError, match=r"status 401: no valid API key.* \(--api-key\)"):
            say(ServerChat(server.url), "Hello")


def test_what_the_server_refuses(server: Running, chat: ServerChat) -> None:
    with pytest.raises(ContextLengthError, match="2048"):
        say(chat, "x" * 2100)
    assert chat.messages == []
    server.engine.fail = KeyError("k")
    with pytest.raises(ServerError, match="unexpected KeyError"):
        say(chat, "Hello")
    server.service.stop()
    with pytest.raises(ServerError, match="stopping; try again later"):
        say(chat, "Hello")


def test_nobody_there() -> None:
    with socket.socket() as held:  # so that nobody else listens there
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        with pytest.raises(ServerError, match=f"http://127.0.0.1:{port} cannot be used .*does a server run there"):
            say(ServerChat(f"http://127.0.0.1:{port}"), "Hello")


@pytest.mark.parametrize("url", ["", "localhost:8080", "ftp://a", "http://", "http://a:b", "http://a?b"])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(UsageError, match=r"--server .*such as http://127\.0\.0\.1:8080"):
        ServerChat(url)


# ---- the command --------------------------------------------------------------------------------------


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Has input() give these lines."""

    def type_in(*lines: str) -> None:
        left: Iterator[str] = iter(lines)

        def type_next(prompt: str = "") -> str:
            try:
                return next(left)
            except StopIteration:
                raise EOFError from None

        monkeypatch.setattr("builtins.input", type_next)
        monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
        monkeypatch.setitem(sys.modules, "readline", SimpleNamespace(get_line_buffer=lambda: ""))
        monkeypatch.setattr("llmcl.cli.chat_input._readline", lambda: None)

    return type_in


def test_the_command(
    server: Running, typed: Callable[..., None], invoke: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    server.engine.cached = 3
    typed("one two", "x" * 2100, "/stats", "/reset", "again")
    assert invoke("chat", "--server", server.url, "-n", "4", "--temp", "0.5", "--seed", "1") == 0
    out, errors = capsys.readouterr()
    assert out == "one \nagai\n"
    assert errors.count("TTFT") == 3 and errors.count("TBT p50") == 2 and ", 4 tokens\n" in errors
    assert "stopped at the limit of 4 tokens" in errors and "3 of them cached" in errors
    assert "error: This model's maximum context length is" in errors and "(/reset starts anew)" in errors
    assert [prompt for prompt, _ in server.engine.asked] == ["[user]one two\n[assistant]", "[user]again\n[assistant]"]
    assert server.engine.asked[0][1]["temperature"] == 0.5


def test_the_command_goes_on_after_a_failure(
    typed: Callable[..., None], invoke: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FakeEngine(byte_tokenizer())
    with running(engine, api_keys=("key",)) as server:
        typed("Hello", "again")
        assert invoke("chat", "--server", server.url, "-q") == 0
        assert capsys.readouterr().err.count("(--api-key)") == 2
        typed("Hello")
        assert invoke("chat", "--server", server.url, "--api-key", "key", "-q") == 0
        out, errors = capsys.readouterr()
        assert out == "Hello\n" and "error" not in errors and "TTFT" not in errors


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ((), "give -m/--model, or --server URL"),
        (("--server", "nowhere"), "--server 'nowhere'"),
    ],
)
def test_bad_options(
    options: tuple[str, ...],
    named: str,
    typed: Callable[..., None],
    invoke: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    typed("Hello")
    assert invoke("chat", *options) == 2
    assert named in capsys.readouterr().err
