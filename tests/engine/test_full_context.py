"""A conversation that fills its context: an error, or its oldest turns are dropped. No model, a byte a token."""

from __future__ import annotations

from collections.abc import Callable, Generator
from types import SimpleNamespace
from typing import Any

import pytest
from fake_server import byte_tokenizer, running

from llmcl.engine.chat import Chat
from llmcl.engine.conversation import Conversation
from llmcl.engine.generation import Piece
from llmcl.engine.leases import Leases
from llmcl.errors import ContextLengthError, UsageError
from llmcl.serve.client import ServerChat


class Speaker:
    """Answers every question with "yes"."""

    model_name, max_context = "bytes", 200
    model = SimpleNamespace(cache=SimpleNamespace(sequence=object))

    def __init__(self) -> None:
        self.tokenizer = byte_tokenizer()
        self.encode = self.tokenizer.encode_chat
        self.leases = Leases("bytes")
        self.asked: list[list[int]] = []

    def stream(self, ids: list[int], *, begin: Callable[..., Any], **_: Any) -> Any:
        def answer(asked: list[int], sequence: object) -> Generator[Piece, None, None]:
            if len(asked) > self.max_context:
                raise ContextLengthError("too long")
            self.asked.append(asked)
            yield Piece("yes", 5, None, "stop", None)

        return self.leases.begin(lambda: begin(answer))

    def reset(self, *, wait: bool) -> None:
        pass


def test_an_error_unless_turns_may_be_dropped() -> None:
    chat = Chat(Speaker())  # type: ignore[arg-type]
    with pytest.raises(ContextLengthError):
        for _ in range(20):
            list(chat.send("x" * 20, max_tokens=8))
    assert len(chat.messages) % 2 == 0 and len(chat.messages) < 20
    with pytest.raises(UsageError, match="on_full is 'shift'; expected one of error, drop"):
        Chat(Speaker(), on_full="shift")  # type: ignore[arg-type]


def test_the_oldest_turns_go_and_the_system_prompt_stays() -> None:
    speaker = Speaker()
    chat = Chat(speaker, on_full="drop")  # type: ignore[arg-type]
    drops = []
    for turn in range(20):
        list(chat.send(f"{turn:02d}" + "x" * 20, max_tokens=60, system_prompt="Be brief."))
        drops.append(chat.dropped)
        assert chat.messages[0] == {"role": "system", "content": "Be brief."}
        assert chat.messages[-2]["content"].startswith(f"{turn:02d}")
        assert chat.messages[1]["role"] == "user" and chat.messages[2]["role"] == "assistant"
    assert all(len(ids) <= 150 for ids in speaker.asked), "a quarter is left for the answer"
    assert any(drops) and drops.count(0) > len(drops) // 3, "several turns at once, not one each time"


def test_one_message_longer_than_the_context_is_an_error_and_changes_nothing() -> None:
    chat = Chat(Speaker(), on_full="drop")  # type: ignore[arg-type]
    list(chat.send("short", max_tokens=8))
    before = list(chat.messages)
    with pytest.raises(ContextLengthError):
        list(chat.send("x" * 300, max_tokens=8))
    assert chat.messages == before
    list(chat.send("x" * 170, max_tokens=8))  # less than a quarter is left, and nothing else can go
    assert chat.dropped == 1 and len(chat.messages) == 2


def test_a_fork_drops_too() -> None:
    speaker = Speaker()
    speaker.model = SimpleNamespace(cache=SimpleNamespace(sequence=object, fork=lambda sequence: sequence))
    assert Chat(speaker, on_full="drop").fork().on_full == "drop"  # type: ignore[arg-type]


def test_a_conversation_with_a_server_drops_until_the_server_takes_it() -> None:
    with running() as server:
        chat = ServerChat(server.url, on_full="drop")
        for turn in range(8):
            list(chat.send(f"{turn}" + "x" * 600, system_prompt="Be brief."))
            assert chat.messages[0]["role"] == "system" and chat.messages[-2]["content"].startswith(f"{turn}")
        assert len(chat.messages) < 9
        with pytest.raises(ContextLengthError):
            list(chat.send("x" * 4000))
        assert chat.dropped == 0 and len(chat.messages) > 1


def test_undo_and_another_system_prompt() -> None:
    talk = Conversation()
    assert talk.undo() is None
    talk.set_system_prompt("a")
    assert talk.messages == []
    turn = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    talk.messages = [{"role": "system", "content": "old"}, *turn, *turn]
    talk.set_system_prompt("new")
    assert talk.messages == [{"role": "system", "content": "new"}, *turn, *turn]
    assert talk.undo() == "q" and talk.messages == [{"role": "system", "content": "new"}, *turn]
    talk.set_system_prompt(None)
    assert talk.messages == turn and talk.undo() == "q" and talk.messages == []
