"""`llmcl chat` in detail, on an engine that answers at once."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from echo_engine import Engine

from llmcl.cli.answer import ShownAnswer
from llmcl.cli.chat_input import read_message


def test_ctrl_c_in_chat_stops_the_answer_and_not_the_program(
    engine: Engine,
    invoke: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine.after = lambda n: signal.raise_signal(signal.SIGINT) if n == 1 else None
    type_in(monkeypatch, "one two three", "four five \\", "six seven", "/help", "/nonsense")
    assert invoke("chat", "-m", "m") == 0
    out, errors = capsys.readouterr()
    assert out == "one two \nfour five \n"
    assert errors.count("stopped") == 2
    assert engine.request["prompt"] == "four five \nsix seven"
    assert "/reset" in errors and "/nonsense: no such command" in errors


def type_in(monkeypatch: pytest.MonkeyPatch, *items: str | type[BaseException]) -> None:
    """Has input() give these lines, or raise; then the input ends."""
    typed = iter(items)

    def type_next(prompt: str = "") -> str:
        item = next(typed, EOFError)
        if isinstance(item, str):
            return item
        raise item

    monkeypatch.setattr("builtins.input", type_next)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setitem(sys.modules, "readline", SimpleNamespace(get_line_buffer=lambda: ""))
    monkeypatch.setattr("llmcl.cli.chat_input._readline", lambda: None)


def test_ctrl_c_at_an_empty_prompt_hints_and_a_second_one_leaves(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    type_in(monkeypatch, KeyboardInterrupt, "hello", KeyboardInterrupt, KeyboardInterrupt, "never read")
    assert (read_message(), read_message()) == ("hello", None)
    assert capsys.readouterr().err.count("Ctrl-C once more leaves") == 2


def test_no_standard_input_is_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert read_message() is None


def test_ctrl_c_ends_the_reading_of_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(most: int) -> bytes:
        raise KeyboardInterrupt

    pipe = SimpleNamespace(isatty=lambda: False, buffer=SimpleNamespace(readline=interrupted))
    monkeypatch.setattr("sys.stdin", pipe)
    assert read_message() is None


def test_a_pipe_is_text_in_utf_8(
    engine: Engine, invoke: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever the locale is, and with the line endings of any system."""
    data = "\ufeffgr\u00fcn\r\nein \\\ntag\n".encode() + b"\nlast b\xe4r\nnever\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data), encoding="ascii"))
    assert invoke("chat", "-m", "m", "-q") == 2
    out, errors = capsys.readouterr()
    assert out == "gr\u00fcn \nein tag \n"
    assert errors == "error: a line of standard input: byte 6 is not UTF-8; expected text in UTF-8\n"


def test_a_pipe_without_a_last_newline_is_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"one\ntwo")))
    assert [read_message(), read_message(), read_message()] == ["one", "two", None]


def test_ctrl_c_throws_away_a_half_typed_line(monkeypatch: pytest.MonkeyPatch) -> None:
    type_in(monkeypatch, "begun \\", KeyboardInterrupt, "anew")
    assert read_message() == "anew"


def test_ctrl_c_right_after_an_answer_goes_back_to_the_prompt(
    engine: Engine, invoke: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(answer: ShownAnswer, max_tokens: int) -> str | None:
        if answer.n_tokens == 2:
            signal.raise_signal(signal.SIGINT)
        return None

    monkeypatch.setattr(ShownAnswer, "why_cut", interrupted)
    type_in(monkeypatch, "one two", "three")
    assert invoke("chat", "-m", "m") == 0
    assert capsys.readouterr().out == "one two \nthree \n"
