"""`llmcl chat` in a terminal of its own: pasted lines, what is typed during an answer, and the history."""

from __future__ import annotations

import os
import select
import sys
import time
from pathlib import Path

import pytest

if sys.platform == "win32":
    pytest.skip("no pseudo-terminals", allow_module_level=True)

import fcntl
import pty
import struct
import termios


@pytest.mark.parametrize("columns", [60, pytest.param(120, marks=pytest.mark.slow)])
def test_a_paste_is_one_message_and_typing_waits_for_the_prompt(columns: int, tmp_path: Path) -> None:
    process, terminal = pty.fork()
    if process == 0:
        os.environ |= {"XDG_STATE_HOME": str(tmp_path), "TERM": "xterm-256color"}
        os.execv(sys.executable, [sys.executable, *["-m", "llmcl", "chat", "-m", "smollm2", "-n", "30", "-c", "512"]])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    screen = b""

    def wait_for(text: bytes) -> bytes:
        nonlocal screen
        end = time.monotonic() + 120
        while text not in screen and time.monotonic() < end and select.select([terminal], [], [], 60)[0]:
            screen += os.read(terminal, 65536)
        assert text in screen, screen
        before, screen = screen.split(text, 1)
        return before

    try:
        wait_for(b"> ")
        os.write(terminal, b"\x1b[200~one\rtwo\x1b[201~\r")
        wait_for(b"\x1b[?2004l")  # the prompt is left
        time.sleep(0.2)
        os.write(terminal, b"/rest")
        answer = wait_for(b"> /rest")
        assert b"/rest" not in answer, "it is not shown in the answer"
        os.write(terminal, b"\r")
        wait_for(b"/rest: no such command; did you mean /reset")
        os.write(terminal, b"/exit\r")
        assert os.waitpid(process, 0)[1] == 0
    finally:
        os.close(terminal)
    history = tmp_path / "llmcl" / "chat_history"
    assert history.read_text().splitlines() == ['"one\\ntwo"', '"/rest"', '"/exit"']
