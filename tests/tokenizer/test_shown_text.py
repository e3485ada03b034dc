"""Answers in channels as people are shown them, and what of them a conversation keeps."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from echo_engine import stats
from made_tokenizers import byte_level_gguf, channel_tokenizer, from_gguf

from llmcl.engine.chat import Chat
from llmcl.engine.generation import AnswerOptions, Piece, PieceWriter
from llmcl.engine.leases import Leases
from llmcl.engine.prompts import is_chat
from llmcl.engine.stats import Recorder
from llmcl.tokenizer import Tokenizer
from llmcl.tokenizer.shown_text import ShownText, said

C, M, NEXT = "<|channel|>", "<|message|>", "<|end|><|start|>assistant"
THOUGHT = f"{C}analysis{M}Hm, \u00e9.{NEXT}"
# What a model writes, what is shown, and what was said.
ANSWERS = {
    "text": (f"{C}final{M}It is 4.<|return|>", "It is 4.", "It is 4."),
    "thought": (f"{THOUGHT}{C}final{M}It is 4.<|return|>", "<think>\nHm, \u00e9.\n</think>\n\nIt is 4.", "It is 4."),
    "two thoughts": (
        f"{THOUGHT}{THOUGHT}{C}final{M}Yes.",
        "<think>\nHm, \u00e9.\n\nHm, \u00e9.\n</think>\n\nYes.",
        "Yes.",
    ),
    "preamble": (f"{C}commentary{M}I look.{NEXT}{C}final{M}Yes.", "I look.\n\nYes.", "I look.\n\nYes."),
    "cut": (f"{C}analysis{M}Hm", "<think>\nHm", ""),
    "no channel": ("It is 4.", "It is 4.", "It is 4."),
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return channel_tokenizer()


def written(tokenizer: Tokenizer, text: str, **options: Any) -> Iterator[Piece]:
    ids = tokenizer.encode(text)
    writer = PieceWriter(tokenizer, AnswerOptions(**options), len(ids), Recorder(1), stats, shown=True)
    for token in ids:
        piece = writer.push(token)
        yield piece
        if piece.finish_reason is not None:
            return


@pytest.mark.parametrize("name", ANSWERS)
def test_what_is_shown_and_what_was_said(name: str, tokenizer: Tokenizer) -> None:
    answer, shown, content = ANSWERS[name]
    text = "".join(piece.text for piece in written(tokenizer, answer))
    assert (text, said(text)) == (shown, content)


def test_text_is_shown_as_it_comes(tokenizer: Tokenizer) -> None:
    pieces = [piece.text for piece in written(tokenizer, f"{THOUGHT}{C}final{M}It is 4.")]
    assert "<think>\nH" in pieces and pieces[-8:] == ["\n</think>\n\nI", *"t is 4."]


def test_a_stop_string_is_one_of_what_is_shown(tokenizer: Tokenizer) -> None:
    pieces = [*written(tokenizer, f"{THOUGHT}{C}final{M}It is 4. So", stop=" is")]
    assert "".join(piece.text for piece in pieces).endswith("</think>\n\nIt") and pieces[-1].finish_reason == "stop"


def test_answers_that_match_a_grammar_and_other_models_are_shown_as_they_are(tokenizer: Tokenizer) -> None:
    assert "".join(piece.text for piece in written(tokenizer, f"{C}final{M}Yes", regex=".*")) == "finalYes"
    assert ShownText.of(from_gguf(byte_level_gguf(), eos_token_ids=(1,))) is None


def test_what_goes_through_a_template_is_shown() -> None:
    assert is_chat("text", raw=False) and is_chat([{"role": "user", "content": "x"}], raw=False)
    assert not is_chat("text", raw=True) and not is_chat([1, 2], raw=False)


def test_a_conversation_keeps_what_was_said(tokenizer: Tokenizer) -> None:
    class Speaker:
        model_name = "channels"
        leases = Leases("channels")
        max_context = 64
        model = SimpleNamespace(cache=SimpleNamespace(sequence=object))

        def __init__(self) -> None:
            self.tokenizer = tokenizer
            self.asked: list[str] = []

        def encode(self, messages: list[dict[str, str]], *, most: int) -> list[int]:
            return tokenizer.encode(tokenizer.render_chat(messages), False)

        def stream(self, ids: list[int], *, begin: Callable[..., Any], **_: Any) -> Any:
            self.asked.append("".join(tokenizer.token(i) or "" for i in ids))

            def answer(asked: list[int], sequence: object) -> Generator[Piece, None, None]:
                yield from written(tokenizer, ANSWERS["thought"][0])

            return self.leases.begin(lambda: begin(answer))

        def reset(self, *, wait: bool) -> None:
            pass

    speaker = Speaker()
    chat = Chat(speaker)  # type: ignore[arg-type]
    assert "".join(piece.text for piece in chat.send("2+2?")) == ANSWERS["thought"][1]
    assert chat.messages[-1] == {"role": "assistant", "content": "It is 4."}
    list(chat.send("Sure?"))
    assert "analysis" not in speaker.asked[-1]
