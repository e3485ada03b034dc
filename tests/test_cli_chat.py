"""`llmcl chat` in detail, on an engine that answers at once."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from echo_engine import Engine

from llmcl.cli.chat import read_message


def test_ctrl_c_in_chat_stops_the_answer_and_not_the_program(
    engine: Engine,
    invoke: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine.after = lambda n: signal.raise_signal(signal.SIGINT) if n == 1 else None
    messages = iter(["one two three", "four five \\", "six seven", "/help", "/nonsense"])
    monkeypatch.setattr("builtins.input", lambda prompt="": next(messages, None) or end_of_input())
    assert invoke("chat", "-m", "m") == 0
    out, errors = capsys.readouterr()
    assert out == "one two \nfour five \n"
    assert errors.count("stopped") == 2
    assert engine.request["prompt"] == "four five \nsix seven"
    assert "/reset" in errors and "/nonsense: no such command" in errors


def end_of_input() -> str:
    raise EOFError


def test_ctrl_c_at_an_empty_prompt_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(prompt: str = "") -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupt)
    monkeypatch.setitem(sys.modules, "readline", SimpleNamespace(get_line_buffer=lambda: ""))
    assert read_message() is None


def test_ctrl_c_throws_away_a_half_typed_line(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = iter(["begun \\", KeyboardInterrupt, "anew"])

    def type_next(prompt: str = "") -> str:
        item = next(typed)
        if item is KeyboardInterrupt:
            raise KeyboardInterrupt
        return str(item)

    monkeypatch.setattr("builtins.input", type_next)
    monkeypatch.setitem(sys.modules, "readline", SimpleNamespace(get_line_buffer=lambda: ""))
    assert read_message() == "anew"
