"""The commands of `llmcl chat`, on an engine that answers at once."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from echo_engine import Engine

from llmcl.cli import chat_commands as commands
from llmcl.cli.chat_input import History, read_message
from llmcl.errors import UsageError

Talk = Callable[..., tuple[str, str]]


@pytest.fixture
def talk(
    engine: Engine, invoke: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Talk:
    """Has `llmcl chat` read these lines. Returns standard output and standard error."""

    def talk(*lines: str, options: tuple[str, ...] = ()) -> tuple[str, str]:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("\n".join([*lines, ""]).encode())))
        assert invoke("chat", "-m", "m", *options) == 0
        out, errors = capsys.readouterr()
        return out, errors

    return talk


def requests(engine: Engine, name: str) -> list[Any]:
    return [request[name] for request in engine.conversation.requests]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("/rest", "/rest: no such command; did you mean /reset"),
        ("/etc/passwd is what?", "/etc/passwd: no such command; /help lists them; to send it as a message"),
        ("/", "/: no such command"),
        ("//x", "//x: no such command"),
        ("/reset now", "/reset takes nothing behind it, not 'now'"),
        ("/save", "/save lacks FILE"),
        ("/temp hot", "/set temp: 'hot' given, expected a number, 0 or more"),
        ("/set tempp 1", "/set tempp: no such setting; did you mean temp?"),
        ("/load /no/such/file", "cannot be read (No such file"),
        ("/undo", "nothing to undo"),
        ("/regen", "no answer yet"),
    ],
)
def test_a_slash_begins_a_command_or_an_error(talk: Talk, engine: Engine, line: str, expected: str) -> None:
    out, errors = talk(line)
    assert out == "" and expected in errors and engine.conversation.requests == []


def test_a_space_sends_what_begins_with_a_slash(talk: Talk, engine: Engine) -> None:
    talk(" /etc/passwd is what?")
    assert requests(engine, "prompt") == ["/etc/passwd is what?"]


def test_each_answer_has_a_new_seed_unless_one_is_given(talk: Talk, engine: Engine) -> None:
    talk("a", "a", "/reset", "a")
    assert len(set(requests(engine, "seed"))) == 3
    talk("a", "a", "/regen", options=("--seed", "7"))
    first, second, anew = requests(engine, "seed")
    assert (first, second) == (7, 7) and anew != 7
    talk("a", options=("--temp", "0"))
    assert requests(engine, "seed") == [None]


def test_sampling_is_what_the_user_says_else_the_model_else_a_chats(talk: Talk, engine: Engine) -> None:
    names = "temperature", "top_p", "top_k"
    talk("a")
    assert [requests(engine, name) for name in names] == [[0.7], [0.95], [40]]
    engine.sampling_defaults = {"temperature": 0.6, "top_k": 20}
    talk("a", "/temp 0.1", "/set top_p 0.5", "a", options=("--top-k", "3"))
    assert [requests(engine, name) for name in names] == [[0.6, 0.1], [0.95, 0.5], [3, 3]]


def test_system_undo_and_regen(talk: Talk, engine: Engine) -> None:
    talk("one", "/system Be brief.", "two", "/undo", "/regen", "/system none")
    assert requests(engine, "prompt") == ["one", "two", "one"]
    assert requests(engine, "system_prompt") == [None, "Be brief.", "Be brief."]
    assert engine.conversation.messages == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "one "},
    ]


def test_save_and_load(talk: Talk, engine: Engine, tmp_path: Path) -> None:
    file, other = tmp_path / "talk.json", tmp_path / "other"
    other.write_text("precious")
    _, errors = talk("one", f"/save {file}", f"/save {other}", f"/load {other}")
    assert errors.count("is no saved conversation") == 2 and other.read_text() == "precious"
    saved = json.loads(file.read_text())["messages"]
    talk(f"/load {file}", "two", f"/save {file}")
    assert engine.conversation.messages[: len(saved)] == saved and len(engine.conversation.messages) == 4
    for wrong in ([{"role": "user"}], [{"role": "user", "content": 5}], [{"role": "assistant", "content": "x"}], 5):
        file.write_text(json.dumps(wrong))
        assert "is no saved conversation" in talk(f"/load {file}")[1]


def test_another_model_goes_on_with_the_conversation(talk: Talk, engine: Engine) -> None:
    _, errors = talk("one", "/model other", "two", "/model", "/stats")
    assert engine.loaded["model"] == "other" and "model: echo" in errors and "seed: " in errors
    assert [message["content"] for message in engine.conversation.messages] == ["one", "one ", "two", "two "]


def test_one_table_drives_help_and_completion() -> None:
    text = commands.help_text()
    for name in commands.BY_NAME:
        assert name in text and any(found.strip() == name for found in commands.complete("", name))
    assert commands.complete("", "/re") == ["/reset", "/regen"] and commands.complete("", "hello") == []
    assert (
        commands.complete("/set ", "top-") == ["top-k ", "top-p ", "top-nsigma "]
        and commands.complete("x ", "/re") == []
    )
    assert commands.parse("/HELP") is not None and commands.parse("hello /help") is None


def test_messages_of_several_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    text = b'"""one\n  two\n"""\n"""three"""\n/system """\na\nb"""\nplain """x\n'
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text)))
    messages = [read_message() for _ in range(5)]
    assert messages == ["one\n  two", "three", "/system \na\nb", 'plain """x', None]


def test_history_is_private_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries: list[str] = []
    readline = SimpleNamespace(add_history=entries.append)
    monkeypatch.setattr("llmcl.cli.chat_input._readline", lambda: readline)
    file = tmp_path / "state" / "chat_history"
    history = History(file)
    for n in range(1005):
        history.add(f"a\n{n}")
    assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700
    entries.clear()
    History(file)
    assert len(entries) == 1000 and entries[-1] == "a\n1004"
    assert len(file.read_text().splitlines()) == 1000
    entries.clear()
    History(None).add("kept out")
    assert "kept out" not in file.read_text()


def test_a_word_that_is_no_setting_names_the_settings() -> None:
    with pytest.raises(UsageError, match="expected one of max-tokens, temp"):
        commands._set(None, "zzz 1")  # type: ignore[arg-type]
