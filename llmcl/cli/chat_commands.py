"""The chat commands. One table drives parsing, /help and completion."""

from __future__ import annotations

import base64
import difflib
import glob
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from llmcl.checkpoint.files import is_unicode
from llmcl.cli.command import fit_for_terminal
from llmcl.cli.option_groups import Sampling, option_hints
from llmcl.cli.pictures import picture_and_text
from llmcl.engine.message_parts import text_of
from llmcl.errors import UsageError, counted, one_line
from llmcl.sampling_options import PARAMETERS

if TYPE_CHECKING:
    from llmcl.cli.chat_session import Session

MAX_FILE_BYTES = 1 << 26


@dataclass(frozen=True)
class ChatCommand:
    names: tuple[str, ...]  # the first name is used in messages
    argument: str  # as in /help: "" for none, [TEXT] if optional
    line: str  # description in /help
    run: Callable[[Session, str], None]

    def __call__(self, session: Session, argument: str) -> None:
        if argument and not self.argument:
            raise UsageError(f"{self.names[0]} takes nothing behind it, not {one_line(argument, 40)!r}")
        if not argument and self.argument and not self.argument.startswith("["):
            raise UsageError(f"{self.names[0]} lacks {self.argument}; type {self.names[0]} {self.argument}")
        self.run(session, argument)


def parse(message: str) -> tuple[ChatCommand, str] | None:
    """Returns the command in a message, with its argument; None for a message to the model.

    Raises UsageError if the first word begins with / and is not a command.
    """
    if not message.startswith("/"):
        return None
    word = message.split(maxsplit=1)[0]
    command = BY_NAME.get(word.lower())
    if command is None:
        nearest = difflib.get_close_matches(word.lower(), BY_NAME, n=1)
        hint = f"did you mean {nearest[0]}" if nearest else "/help lists them"
        raise UsageError(f"{one_line(word, 60)}: no such command; {hint}; to send it as a message, type a space first")
    return command, message[len(word) :].strip()


def to_send(message: str) -> str:
    """Returns the message for the model, without spaces that protect a leading /."""
    bare = message.lstrip(" ")
    return bare if bare.startswith("/") else message


def complete(before: str, word: str) -> list[str]:
    """Returns the completions for a word. before: the text in front."""
    if not before.strip():
        return [name + " " * bool(BY_NAME[name].argument) for name in BY_NAME if word and name.startswith(word)]
    command = BY_NAME.get(before.split()[0])
    if command is None or len(before.split()) > 1:
        return []
    if command.argument.startswith("[NAME VALUE"):
        return [f"{name} " for name in SETTINGS if name.startswith(word)]
    if command.argument.startswith("FILE"):
        return sorted(glob.glob(glob.escape(word) + "*"))
    return []


def help_text() -> str:
    """Lists the commands as text."""
    rows = [(f"{', '.join(command.names)} {command.argument}".rstrip(), command.line) for command in COMMANDS]
    width = max(len(left) for left, _ in rows)
    return "\n".join(
        [
            *(f"{left:<{width}}  {line}" for left, line in rows),
            'A message goes on after a backslash at the end of a line, and from """ to """. Pasted lines are one.',
            "A message that begins with / is sent if a space stands before it. Ctrl-C stops an answer, Ctrl-D leaves.",
        ]
    )


def _setting_parsers() -> dict[str, tuple[str, Callable[[str], Any]]]:
    """Returns, by name in /set, an option name of `LLM.stream` and its parser, both from the command line."""
    settings: dict[str, tuple[str, Callable[[str], Any]]] = {}
    for name, hint in option_hints(Sampling).items():
        if (parser := getattr(hint.__metadata__[0], "parser", None)) is not None:
            settings[PARAMETERS[name].setting if name in PARAMETERS else name.replace("_", "-")] = name, parser
    settings["stop"] = "stop", lambda text: () if text == "none" else (text,)
    return settings


SETTINGS = _setting_parsers()


def _help(session: Session, argument: str) -> None:
    session.note(help_text())


def _exit(session: Session, argument: str) -> None:
    session.over = True


def _reset(session: Session, argument: str) -> None:
    session.conversation.reset()
    session.pictures.clear()
    session.last = None
    session.note("the conversation starts anew")


def _system(session: Session, argument: str) -> None:
    if not argument:
        prompt = session.request["system_prompt"]
        session.note("no system prompt" if prompt is None else f"system prompt: {fit_for_terminal(prompt)}")
        return
    session.set_system_prompt(None if argument == "none" else argument)
    session.note("no system prompt from now on" if argument == "none" else "system prompt set")


def _temp(session: Session, argument: str) -> None:
    _set(session, f"temp {argument}".strip())


def _set(session: Session, argument: str) -> None:
    name, _, value = argument.partition(" ")
    key = name.replace("_", "-").lower()
    key = PARAMETERS[key].setting if key in PARAMETERS else key
    if name and key not in SETTINGS:
        nearest = difflib.get_close_matches(key, SETTINGS, n=1)
        hint = f"did you mean {nearest[0]}?" if nearest else f"expected one of {', '.join(SETTINGS)}"
        raise UsageError(f"/set {one_line(name, 40)}: no such setting; {hint}")
    if value.strip():
        option, parser = SETTINGS[key]
        try:
            parsed = None if key == "seed" and value.strip() == "none" else parser(value.strip())
        except typer.BadParameter as error:
            raise UsageError(f"/set {key}: {error.message}") from error
        session.request[option] = parsed
        session.given.add(option)
    for shown in [key] if name else SETTINGS:
        session.note(f"{shown}: {_shown_setting(session.request[SETTINGS[shown][0]])}")


def _shown_setting(value: Any) -> str:
    if value is None:
        return "none (another one for each answer)"
    if isinstance(value, tuple):
        return ", ".join(map(repr, value)) or "none"
    return str(value)


def _regen(session: Session, argument: str) -> None:
    before = session.conversation.messages
    question = session.conversation.undo()
    if question is None:
        raise UsageError("there is no answer yet to make anew")
    if session.answer(question, another=True) is None:
        session.conversation.messages = before


def _undo(session: Session, argument: str) -> None:
    question = session.conversation.undo()
    if question is None:
        raise UsageError("there is nothing to undo")
    session.note(f"forgotten: {one_line(text_of(question), 60)}")


def _save(session: Session, argument: str) -> None:
    file = Path(argument).expanduser()
    data: dict[str, Any] = {"model": session.model_name, "messages": session.conversation.messages}
    try:
        if file.exists():
            _read_conversation(file)  # protects foreign files from being overwritten
        file.write_text(json.dumps(data, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"/save {one_line(file)}: cannot be written ({error.strerror})") from error
    session.note(f"{counted(len(data['messages']), 'message')} saved in {one_line(file)}")


def _load(session: Session, argument: str) -> None:
    file = Path(argument).expanduser()
    try:
        messages = _read_conversation(file)
    except OSError as error:
        raise UsageError(f"/load {one_line(file)}: cannot be read ({error.strerror})") from error
    session.conversation.reset()
    session.conversation.messages = messages
    session.last = None
    session.request["system_prompt"] = messages[0]["content"] if messages and messages[0]["role"] == "system" else None
    session.note(f"{counted(len(messages), 'message')} loaded from {one_line(file)}")


def _read_conversation(file: Path) -> list[dict[str, Any]]:
    """Returns the messages in a saved conversation. Raises UsageError for another file, and OSError."""
    wrong = f"{one_line(file)} is no saved conversation; expected JSON as /save writes it"
    if not file.is_file() or file.stat().st_size > MAX_FILE_BYTES:
        if not file.exists():
            file.stat()
        raise UsageError(wrong)
    try:
        data = json.loads(file.read_bytes())
        messages = data["messages"] if isinstance(data, dict) else data
        kept = [{"role": message["role"], "content": message["content"]} for message in messages]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(wrong) from error
    roles = [message["role"] for message in kept]
    turns = roles[1:] if roles[:1] == ["system"] else roles
    if turns != ["user", "assistant"] * (len(turns) // 2) or not all(
        _is_content(message["content"], message["role"] == "user") for message in kept
    ):
        raise UsageError(f"{wrong}: perhaps a system message, then user and assistant in turns")
    return kept


def _is_content(content: Any, may_have_pictures: bool) -> bool:
    if may_have_pictures and isinstance(content, list):
        kinds = {"text": "text", "image": "image"}
        return all(
            isinstance(part, dict)
            and part.keys() == {"type", kinds.get(part.get("type", ""), "")}
            and all(isinstance(value, str) and is_unicode(value) for value in part.values())
            for part in content
        )
    return isinstance(content, str) and is_unicode(content)


def _copy(session: Session, argument: str) -> None:
    messages = session.conversation.messages
    if not messages:
        raise UsageError("there is no answer yet to copy")
    terminal = next((stream for stream in (sys.stdout, sys.stderr) if stream.isatty()), None)
    if terminal is None:
        raise UsageError("/copy asks the terminal to copy, and the output goes to none")
    text = base64.b64encode(messages[-1]["content"].encode()).decode()
    print(f"\x1b]52;c;{text}\x07", end="", file=terminal, flush=True)
    session.note("the last answer was sent to the clipboard (if the terminal allows that: OSC 52)")


def _model(session: Session, argument: str) -> None:
    if argument:
        session.use_model(argument)
    else:
        session.note(f"model: {one_line(session.model_name)}")


def _image(session: Session, argument: str) -> None:
    path, text = picture_and_text(argument)
    session.add_picture(path)
    if text:
        session.answer(text)
    else:
        session.note(f"{one_line(path)} goes with the next message")


def _stats(session: Session, argument: str) -> None:
    if session.last is None:
        session.note("no answer yet")
        return
    session.note(session.last.report())
    if session.last_seed is not None:
        session.note(f"seed: {session.last_seed}")


COMMANDS = (
    ChatCommand(("/help", "/?"), "", "this list", _help),
    ChatCommand(("/reset", "/clear"), "", "forget the conversation", _reset),
    ChatCommand(("/regen",), "", "answer the last message anew", _regen),
    ChatCommand(("/undo",), "", "forget the last message and its answer", _undo),
    ChatCommand(("/image",), "FILE [TEXT]", "send a picture with TEXT, or with the next message", _image),
    ChatCommand(("/system",), "[TEXT]", "show or set the system prompt; none: without one", _system),
    ChatCommand(("/temp",), "[T]", "show or set the temperature", _temp),
    ChatCommand(("/set",), "[NAME VALUE]", "show or set how tokens are drawn, e.g. /set top-p 0.9", _set),
    ChatCommand(("/model",), "[NAME]", "show the model, or go on with another one", _model),
    ChatCommand(("/save",), "FILE", "write the conversation to a file", _save),
    ChatCommand(("/load",), "FILE", "go on with a conversation from a file", _load),
    ChatCommand(("/copy",), "", "copy the last answer to the clipboard", _copy),
    ChatCommand(("/stats",), "", "the timing report of the last answer", _stats),
    ChatCommand(("/exit", "/quit", "/bye"), "", "leave (so do Ctrl-D, and Ctrl-C twice on an empty line)", _exit),
)
BY_NAME = {name: command for command in COMMANDS for name in command.names}
