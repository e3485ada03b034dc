"""Typed chat input: multi-line messages, their history, and keys typed during an answer."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from llmcl.cli.text_files import stream_line, without_last_newline

MAX_ENTRIES = 1000
_MAX_ENTRY_CHARACTERS = 10_000
_QUOTES = '"""'


def history_file() -> Path:
    """Returns the file with messages from earlier sessions."""
    from platformdirs import user_state_path

    return user_state_path("llmcl", appauthor=False) / "chat_history"


class History:
    """The messages that the arrow keys bring back. Each line in the file is one message, as JSON.

    file: None keeps messages for this session only. An unreadable or unwritable file is ignored.
    """

    def __init__(self, file: Path | None):
        self._file = file
        self._readline = _readline()
        if file is None or self._readline is None:
            return
        with suppress(OSError):
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
            if len(lines) > MAX_ENTRIES:
                lines = lines[-MAX_ENTRIES:]
                self._write("\n".join(lines) + "\n", os.O_TRUNC)
            for line in lines:
                with suppress(ValueError):
                    if isinstance(message := json.loads(line), str):
                        self._readline.add_history(message)

    def add(self, message: str) -> None:
        if self._readline is None or not message.strip():
            return
        self._readline.add_history(message)
        if self._file is not None and len(message) <= _MAX_ENTRY_CHARACTERS:
            with suppress(OSError):
                self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._write(json.dumps(message) + "\n", os.O_APPEND)

    def _write(self, text: str, how: int) -> None:
        assert self._file is not None
        with open(os.open(self._file, os.O_WRONLY | os.O_CREAT | how, 0o600), "w", encoding="utf-8") as file:
            file.write(text)


def _readline() -> Any:
    """Returns the module `readline` if messages are typed and the platform has it; otherwise None."""
    if sys.stdin is None or not sys.stdin.isatty():
        return None
    with suppress(ImportError):
        import readline

        return readline
    return None


def prepare_typing(complete: Callable[[str, str], list[str]]) -> None:
    """Sets up line editing. complete: returns a word's completions, given the text before the word and the word."""
    readline = _readline()
    if readline is None:
        return

    def completer(word: str, state: int) -> str | None:
        matches = complete(readline.get_line_buffer()[: readline.get_begidx()], word)
        return matches[state] if state < len(matches) else None

    readline.set_auto_history(False)  # a multi-line message is one entry
    readline.set_completer(completer)
    readline.set_completer_delims(" \t\n")
    if "libedit" in (readline.__doc__ or ""):
        readline.parse_and_bind("bind ^I rl_complete")
        return
    for line in ("tab: complete", "set enable-bracketed-paste on", "set enable-active-region off"):
        readline.parse_and_bind(line)


@contextmanager
def typing_kept_apart() -> Iterator[None]:
    """Hides typed text meanwhile; the next prompt receives it. Ctrl-C still works."""
    try:
        import termios

        terminal = sys.stdin.fileno()
        before = termios.tcgetattr(terminal)
    except (ImportError, AttributeError, OSError, ValueError, termios.error):  # no terminal
        yield
        return
    hidden = [*before]
    hidden[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(terminal, termios.TCSADRAIN, hidden)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def read_message() -> str | None:
    '''Read one message; None at the end of input or after a second Ctrl-C on an empty line.

    A message goes on after a backslash at the end of a line, and from """ to """. Pasted lines are one message.
    '''
    lines: list[str] = []
    quoted = False  # between """ and """
    asked = False  # whether Ctrl-C has asked about leaving
    while True:
        try:
            line = _read_line("... " if lines or quoted else "> ")
        except EOFError:
            return "\n".join(lines) if lines else None
        except KeyboardInterrupt:
            _note("")
            nothing_typed = not lines and not quoted and not _typed_so_far()
            if nothing_typed and (asked or not sys.stdin.isatty()):
                return None
            if nothing_typed:
                _note("Ctrl-C once more leaves, as /exit does")
            asked, quoted = nothing_typed, False
            lines = []  # like a shell, Ctrl-C discards the typed text
            continue
        pasted = "\n" in line
        if not lines and not quoted and not pasted and (start := line.find(_QUOTES)) >= 0 and _opens(line[:start]):
            quoted = True
            before, line = line[:start], line[start + len(_QUOTES) :]
            if not line.strip():
                lines = [before] if before else []
                continue
            line = before + line
        if quoted:
            if line.rstrip().endswith(_QUOTES):
                last = line.rstrip().removesuffix(_QUOTES)
                return "\n".join([*lines, last] if last else lines)
            lines.append(line)
        elif not pasted and line.endswith("\\"):
            lines.append(line[:-1])
        else:
            return "\n".join([*lines, line])


def _opens(before: str) -> bool:
    """Returns whether quotes after this text open a message: nothing, or a command such as /system."""
    return not before.strip() or (before.startswith("/") and len(before.split()) == 1)


def _read_line(prompt: str) -> str:
    if sys.stdin is None:  # treated as empty: started without standard input (`<&-`)
        raise EOFError
    if not sys.stdin.isatty():
        line = stream_line(sys.stdin.buffer, "a line of standard input")
        if not line:
            raise EOFError
        return without_last_newline(line)
    if not sys.stdout.isatty():  # input() would write its prompt into the redirected text
        print(prompt, end="", file=sys.stderr, flush=True)
        return input()
    return input(prompt)


def _typed_so_far() -> str:
    readline = sys.modules.get("readline")
    return readline.get_line_buffer() if readline is not None else ""


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
