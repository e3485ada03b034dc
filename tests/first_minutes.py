"""Types what a new user types in the first minutes, in a terminal of its own and with an empty home.

    python tests/first_minutes.py

Each command runs in a pseudo-terminal. Its exit code and its screen are checked.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import shlex
import subprocess
import sys
import tempfile
import termios
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

TIMEOUT_S = 120
NO_DEFECT = re.compile(r"This is a defect|Traceback")


@dataclass(frozen=True)
class Typed:
    """A command line, and what must come of it."""

    command: str
    code: int
    screen: str  # a regular expression that the screen has
    keys: tuple[tuple[str, str], ...] = ()  # what is typed once the screen has a text: (text, keys)
    most_lines: int | None = None


SMALL = "-n 4 -c 128"
COMMANDS = [
    Typed("llmcl", 2, r"Commands:"),
    Typed("llmcl --help", 0, r"generate .*Stream"),
    Typed("llmcl -h", 0, r"Exit codes"),
    Typed("llmcl help", 0, r"Commands:"),
    Typed("llmcl help run", 0, r"Usage: llmcl run"),
    Typed("llmcl help rnu", 2, r"Did you mean 'run'", most_lines=2),
    Typed("llmcl version", 0, r"^llmcl \d"),
    Typed("llmcl --version", 0, r"^llmcl \d"),
    Typed("llmcl generat", 2, r"No such command 'generat'\. Did you mean 'generate'\?", most_lines=2),
    Typed("llmcl benhc", 2, r"Did you mean 'bench'", most_lines=2),
    Typed("llmcl xyzzy", 2, r"No such command 'xyzzy'\.", most_lines=2),
    Typed("llmcl --verison", 2, r"--version", most_lines=2),
    Typed("llmcl run", 2, r"Missing argument", most_lines=2),
    Typed("llmcl generate", 2, r"Missing option.*LLMCL_MODEL", most_lines=2),
    Typed("llmcl generate -m smollm2", 2, r"no prompt: give -p", most_lines=1),
    Typed("llmcl generate -m smollm2 -p", 2, r"requires an argument", most_lines=2),
    Typed("llmcl generate -m smollm2 -p x --temp warm", 2, r"'warm' given, expected a number", most_lines=2),
    Typed("llmcl generate -m smollm2 -p x --tmep 1", 2, r"--temp", most_lines=2),
    Typed("llmcl generate -m smollm2 -p x --dtype int3", 2, r"expected one of auto", most_lines=2),
    Typed("llmcl generate -m smollm2 -p x -t 0", 2, r"expected a whole number", most_lines=2),
    Typed("llmcl run smollm hello", 6, r"Did you mean smollm2\?"),
    Typed("llmcl run SmolLM2 hello", 6, r"Did you mean smollm2\?"),
    Typed("llmcl run ./no.gguf hello", 6, r"there is no such file"),
    Typed("llmcl generate -m org/name:Q4_K_M -p x --offline", 8, r"org/name is not .*in the cache"),
    Typed("llmcl generate -hf org/name -p x --offline", 8, r"org/name is not .*in the cache"),
    Typed("llmcl run https://huggingface.co/org/name x --offline", 8, r"the model org/name is not"),
    Typed("llmcl list", 0, r"no model is downloaded"),
    Typed("llmcl ls", 2, r"No such command 'ls'", most_lines=2),
    Typed("llmcl rm org/name", 2, r"org/name is not downloaded; there are: none", most_lines=1),
    Typed("llmcl pull", 2, r"Missing argument", most_lines=2),
    Typed("llmcl pull smollm2", 0, r"smollm2: \d.* MB in "),
    Typed("llmcl show smollm2", 0, r"parameters +135 million"),
    Typed("llmcl models", 0, r"llama-3\.1-8b +8\.0 B"),
    Typed("llmcl devices", 0, r"cpu|CPU"),
    Typed("llmcl chat", 2, r"no model: give -m", most_lines=1),
    Typed(f"llmcl run smollm2 'Name a sea.' {SMALL}", 0, r"TTFT"),
    Typed(f"llmcl run smollm2 {SMALL}", 0, r"commands", (("> ", "/exit\n"),)),
    Typed(f"llmcl run smollm2 {SMALL}", 0, r"commands", (("> ", "\x04"),)),
    Typed(f"llmcl chat -m smollm2 {SMALL}", 0, r"/reset", (("> ", "/help\n"), ("/reset", "/exit\n"))),
    Typed(f"LLMCL_MODEL=smollm2 llmcl generate -p hi -q {SMALL}", 0, r"\w"),
    Typed(f"echo 'Name a sea.' | llmcl run smollm2 -q {SMALL}", 0, r"\w"),
    Typed(f"echo 'Name a sea.' | LLMCL_PROMPT= llmcl generate -m smollm2 -q {SMALL}", 0, r"\w"),
    Typed("llmcl generate -m smollm2 -p hi -c 128 --n-predict 4 --temperature 0.8 -s 1 -q", 0, r"\w"),
    Typed("llmcl generate -m smollm2 -p hi -c 128 -n 2 -t 1 -ngl 99 -q", 0, r"-ngl has no effect"),
    Typed(f"llmcl generate -m smollm2 -p hi --repetition-penalty 1.1 --kv-dtype F16 -q {SMALL}", 0, r"\w"),
    Typed(f"llmcl generate -m smollm2 -p hi {SMALL} --format json -q | head -c 1", 0, r"^\{"),
    Typed("llmcl generate -m smollm2 -p 'Count.' -n 900 --ignore-eos", 130, r"device:", (("device:", "\x03"),)),
    Typed("llmcl bench -m smollm2 -p 16 -n 4 -g 0 -r 1", 0, r"pp16[^\n]*\n[^\n]*tg4"),
]


def screen_of(typed: Typed, environment: dict[str, str], folder: Path) -> tuple[int, str]:
    """Runs a command in a new terminal. Returns its exit code and what it wrote there."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        ["/bin/sh", "-c", f"exec {typed.command}" if re.match(r"llmcl\b[^|]*$", typed.command) else typed.command],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=environment,
        cwd=folder,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(slave)
    keys, screen, end = list(typed.keys), b"", time.monotonic() + TIMEOUT_S
    seen_from = 0
    while time.monotonic() < end:
        if select.select([master], [], [], 0.1)[0]:
            try:
                data = os.read(master, 65536)
            except OSError:  # the last one who had the terminal open is gone
                break
            if not data:
                break
            screen += data
        if keys and keys[0][0].encode() in screen[seen_from:]:
            seen_from = len(screen)
            os.write(master, keys.pop(0)[1].encode())
    else:
        process.kill()
    code = process.wait()
    os.close(master)
    return code, screen.decode(errors="replace").replace("\r\n", "\n")


def problem(typed: Typed, code: int, screen: str) -> str | None:
    """Says what is wrong with the result of a command; None if nothing is."""
    if code != typed.code:
        return f"exit code {code}, expected {typed.code}"
    if not re.search(typed.screen, screen, re.MULTILINE | re.DOTALL):
        return f"the screen lacks {typed.screen!r}"
    if NO_DEFECT.search(screen):
        return "the screen speaks of a defect"
    lines = screen.strip("\n").count("\n") + 1
    if typed.most_lines is not None and lines > typed.most_lines:
        return f"{lines} lines, expected {typed.most_lines} at most"
    return None


def type_all(home: Path) -> list[str]:
    """Types every command, two at a time. Returns the problems."""
    programs = home / "bin"
    programs.mkdir()
    (programs / "llmcl").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m llmcl "$@"\n')
    (programs / "llmcl").chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LLMCL_", "HF_", "XDG_"))}
    environment = kept | {"HOME": str(home), "TERM": "xterm", "COLUMNS": "200", "HF_HUB_OFFLINE": "1"}
    environment |= {f"XDG_{name}_HOME": str(home / name.lower()) for name in ("CACHE", "CONFIG", "DATA", "STATE")}
    environment |= {"LLMCL_CACHE_DIR": str(home / "kernels"), "PATH": f"{programs}:{os.environ['PATH']}"}
    environment |= {name: os.environ[name] for name in ("LLMCL_DEVICE",) if name in os.environ}

    def tried(typed: Typed) -> str | None:
        code, screen = screen_of(typed, environment, home)
        wrong = problem(typed, code, screen)
        return wrong and f"{typed.command}: {wrong}\n{screen[-1500:]}"

    first = next(typed for typed in COMMANDS if "Name a sea" in typed.command)  # compiles for the others
    others = [typed for typed in COMMANDS if typed is not first]
    with ThreadPoolExecutor(2) as pool:
        return [wrong for wrong in (tried(first), *pool.map(tried, others)) if wrong]


def main() -> int:
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as home:
        problems = type_all(Path(home))
    print("\n\n".join(problems))
    print(f"{len(COMMANDS)} commands in {time.monotonic() - start:.0f} s, {len(problems)} with problems")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
