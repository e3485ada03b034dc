"""Types what a new user types in the first minutes, in a terminal of its own and with an empty home.

    python tests/first_minutes.py [GROUP...]

Each command runs in a pseudo-terminal. Its exit code and its screen are checked. The hub is tests/fake_hub.py.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import shlex
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fake_hub import FakeHub

from llmcl.checkpoint import resolve

TIMEOUT_S = 120
DEFECT = re.compile(r"This is a defect|Traceback")
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07")
SMALL = "-n 4 -c 128"


@dataclass(frozen=True)
class Typed:
    """A command line, and what must come of it."""

    command: str
    code: int
    screen: str  # a regular expression that the screen has
    keys: tuple[tuple[str, str], ...] = ()  # what is typed once the screen has a text: (text, keys)
    most_lines: int | None = None


def chat(options: str, *keys: tuple[str, str], screen: str, code: int = 0) -> Typed:
    """A chat, in which `keys` are typed and the last one leaves it."""
    return Typed(f"llmcl chat -m smollm2 -n 4 {options}".rstrip(), code, screen, keys)


# The commands of a group run two at a time, those of a tuple one after the other.
START: list[Typed] = [
    Typed("llmcl", 2, r"Commands:"),
    Typed("llmcl --help", 0, r"generate .*Stream"),
    Typed("llmcl generat", 2, r"No such command 'generat'\. Did you mean 'generate'\?", most_lines=2),
    Typed("llmcl run", 2, r"Missing argument", most_lines=2),
    Typed("llmcl run smollm hello", 6, r"Did you mean smollm2\?"),
    Typed("llmcl devices", 0, r"cpu|CPU"),
]
USAGE: list[Typed] = [
    Typed("llmcl -h", 0, r"Exit codes"),
    Typed("llmcl help", 0, r"Commands:"),
    Typed("llmcl help run", 0, r"Usage: llmcl run"),
    Typed("llmcl help rnu", 2, r"Did you mean 'run'", most_lines=2),
    Typed("llmcl version", 0, r"^llmcl \d"),
    Typed("llmcl --version", 0, r"^llmcl \d"),
    Typed("llmcl benhc", 2, r"Did you mean 'bench'", most_lines=2),
    Typed("llmcl xyzzy", 2, r"No such command 'xyzzy'\.", most_lines=2),
    Typed("llmcl ls", 2, r"No such command 'ls'", most_lines=2),
    Typed("llmcl --verison", 2, r"--version", most_lines=2),
    Typed("llmcl pull", 2, r"Missing argument", most_lines=2),
    Typed("llmcl warm", 2, r"Missing option.*LLMCL_MODEL", most_lines=2),
    Typed("llmcl generate", 2, r"Missing option.*LLMCL_MODEL", most_lines=2),
    Typed("llmcl chat", 2, r"no model: give -m", most_lines=1),
    Typed("llmcl chat -m smollm2 --on-full stop", 2, r"expected one of error, drop", most_lines=2),
    Typed("llmcl generate -m smollm2", 2, r"no prompt: give -p", most_lines=1),
    Typed("llmcl generate -m smollm2 -p", 2, r"requires an argument", most_lines=2),
    Typed("llmcl generate -m smollm2 -p x --temp warm", 2, r"'warm' given, expected a number", most_lines=2),
    Typed("llmcl generate -m smollm2 -p x --tmep 1", 2, r"--temp", most_lines=2),
    Typed("llmcl generate -m smollm2 -p x --dtype int3", 2, r"expected one of auto", most_lines=2),
    Typed("llmcl generate -m smollm2 -p x -t 0", 2, r"expected a whole number", most_lines=2),
    Typed("llmcl run SmolLM2 hello", 6, r"Did you mean smollm2\?"),
    Typed("llmcl run ./no.gguf hello", 6, r"there is no such file"),
    Typed("mkdir folder && llmcl run folder hello", 6, r"folder: .*config\.json"),
    Typed(": > empty.gguf && llmcl run empty.gguf hello", 6, r"empty\.gguf: .*empty"),
    Typed("llmcl models", 0, r"llama-3\.1-8b +8\.0 B"),
]
HUB: list[tuple[Typed, ...]] = [
    (
        Typed("llmcl list", 0, r"no model is downloaded"),
        Typed("llmcl rm org/name", 2, r"org/name is not downloaded; there are: none", most_lines=1),
        Typed("llmcl pull org/smol:Q4_K_M", 0, r"org/smol:Q4_K_M: \d.* MB in "),
        Typed("llmcl pull org/split:Q8_0", 0, r"org/split:Q8_0: "),
        Typed("llmcl list", 0, r"org/smol:smol-Q4_K_M\.gguf +GGUF Q4_K_M.*org/split:"),
        Typed("llmcl show https://huggingface.co/org/smol/blob/main/smol-Q4_K_M.gguf", 0, r"parameters +135 million"),
        Typed(f"llmcl generate -hf org/smol:q4_k_m -p hi --offline {SMALL}", 0, r"TTFT"),
        Typed("llmcl rm org/split -y", 0, r"1 model deleted"),
        Typed("llmcl rm org/smol", 0, r"1 model deleted", (("[y/N]", "y\r"),)),
        Typed("llmcl list", 0, r"no model is downloaded"),
    ),
    (
        Typed("llmcl pull org/nothing", 8, r"has no model org/nothing"),
        Typed("llmcl pull org/smol:Q5_K_M", 8, r"no GGUF file of 'Q5_K_M'; it has: Q4_K_M"),
        Typed("llmcl pull smollm2", 0, r"smollm2: \d.* MB in "),
        Typed("llmcl show smollm2", 0, r"parameters +135 million"),
        Typed("llmcl generate -m org/name:Q4_K_M -p x --offline", 8, r"org/name is not .*in the cache"),
        Typed("llmcl run https://huggingface.co/org/name x --offline", 8, r"the model org/name is not"),
    ),
]
FIRST = Typed(f"llmcl run smollm2 'Name a sea.' {SMALL}", 0, r"TTFT.*TBT")  # compiles for the others
ANSWERS: list[Typed] = [
    Typed(f"llmcl run smollm2 {SMALL}", 0, r"commands", (("> ", "/exit\r"),)),
    Typed(f"llmcl run smollm2 {SMALL}", 0, r"commands", (("> ", "\x04"),)),
    Typed(f"LLMCL_MODEL=smollm2 llmcl generate -p hi -q {SMALL}", 0, r"\w"),
    Typed(f"LLMCL_MODEL=smollm2 llmcl chat {SMALL}", 0, r"commands", (("> ", "/bye\r"),)),
    Typed(f"echo 'Name a sea.' | llmcl run smollm2 -q {SMALL}", 0, r"\w"),
    Typed("echo abc | LLMCL_PROMPT='one two three' llmcl generate -m smollm2 --raw --format json -n 2 -c 64 -q", 0,
          r'"prompt_token_ids": \[\d+(, \d+)?\]'),
    Typed("llmcl generate -m smollm2 -p hi -c 128 --n-predict 4 --temperature 0.8 -s 1 -q", 0, r"\w"),
    Typed("llmcl generate -m smollm2 -p hi -c 128 -n 2 -t 1 -ngl 99 -q", 0, r"-ngl has no effect"),
    Typed(f"llmcl generate -m smollm2 -p hi --repetition-penalty 1.1 --kv-dtype F16 {SMALL}", 0, r"TTFT"),
    Typed(f"llmcl generate -m smollm2 -p hi --quantize Q4_0 {SMALL}", 0, r"q4_0.*TTFT"),
    Typed(f"llmcl generate -m smollm2 -p hi {SMALL} --format json -q | head -c 1", 0, r"^\{"),
    Typed("llmcl generate -m smollm2 -p 'Count.' -n 900 --ignore-eos", 130, r"device:", (("device:", "\x03"),)),
    Typed("llmcl bench -m smollm2 -p 16 -n 4 -g 0 -r 1", 0, r"pp16[^\n]*\n[^\n]*tg4"),
    Typed("llmcl warm -m smollm2 -c 128 --max-sequences 1", 0, r"programs?, \d+ compiled"),
    chat(
        "-c 256",
        ("> ", "/help\r"),
        ("/reset", "/temp 0.2\r"),
        ("temp: 0.2", "/set top-k 5\r"),
        ("top-k: 5", "/system Be brief.\r"),
        ("system prompt set", "/rgen\r"),
        ("did you mean /regen", "/model\r"),
        ("model: smollm2", "/exit\r"),
        screen="no such command",
    ),
    chat(
        "-c 256",
        ("> ", "Name a sea.\r"),
        ("> ", "/stats\r"),
        ("seed:", "/save talk.json\r"),
        ("2 messages saved", "/undo\r"),
        ("forgotten: Name a sea.", "/load talk.json\r"),
        ("2 messages loaded", "/copy\r"),
        ("clipboard", "/exit\r"),
        screen="TTFT",
    ),
    chat("-c 96 --on-full drop -q", ("> ", "one\r"), ("> ", "two\r"), ("> ", "/exit\r"), screen="two"),
    chat("-c 8 --on-full error", ("> ", "one two three\r"), ("error: ", "/exit\r"), screen="context"),
]  # fmt: skip
GROUPS = {"start": START, "usage": USAGE, "hub": HUB, "answers": ANSWERS}


def in_order(group: Iterable[Typed | tuple[Typed, ...]]) -> Iterator[tuple[Typed, ...]]:
    """Yields the commands of a group, with those that follow each other in one tuple."""
    for entry in group:
        yield entry if isinstance(entry, tuple) else (entry,)


N_COMMANDS = 1 + sum(len(commands) for group in GROUPS.values() for commands in in_order(group))


def screen_of(typed: Typed, environment: dict[str, str], folder: Path) -> tuple[int, str, float]:
    """Runs a command in a new terminal. Returns its exit code, what it wrote there, and its seconds of CPU."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 200, 0, 0))
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
    seen_to = 0
    while time.monotonic() < end:
        if select.select([master], [], [], 0.1)[0]:
            try:
                data = os.read(master, 65536)
            except OSError:  # the last one who had the terminal open is gone
                break
            if not data:
                break
            screen += data
        if keys and (at := screen.find(keys[0][0].encode(), seen_to)) >= 0:
            seen_to = at + len(keys[0][0])
            os.write(master, keys.pop(0)[1].encode())
    else:
        process.kill()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    os.close(master)
    text = ESCAPE.sub("", screen.decode(errors="replace")).replace("\r\n", "\n")
    return process.returncode, text, used.ru_utime + used.ru_stime


def problem(typed: Typed, code: int, screen: str) -> str | None:
    """Says what is wrong with the result of a command; None if nothing is."""
    if code != typed.code:
        return f"exit code {code}, expected {typed.code}"
    if not re.search(typed.screen, screen, re.MULTILINE | re.DOTALL):
        return f"the screen lacks {typed.screen!r}"
    if DEFECT.search(screen):
        return "the screen speaks of a defect"
    lines = screen.strip("\n").count("\n") + 1
    if typed.most_lines is not None and lines > typed.most_lines:
        return f"{lines} lines, expected {typed.most_lines} at most"
    return None


@contextmanager
def hub() -> Iterator[str]:
    """Yields the address of a hub: the demo model under another name, and a split file."""
    demo = resolve("smollm2", True, None).read_bytes()
    parts = {f"Q8_0/m-Q8_0-0000{at}-of-00002.gguf": b"GGUF" + bytes([at]) for at in (1, 2)}
    server = FakeHub({"org/smol": {"smol-Q4_K_M.gguf": demo}, "org/split": parts})
    try:
        yield server.url
    finally:
        server.stop()


def type_all(home: Path, groups: Iterable[str] = GROUPS, say: Callable[[str], None] = print) -> list[str]:
    """Types every command of the groups, and says what came of it. Returns the problems."""
    programs = home / "bin"
    programs.mkdir()
    (programs / "llmcl").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m llmcl "$@"\n')
    (programs / "llmcl").chmod(0o755)
    # Nor does a new user ask for Mesa's software renderer, which costs each start 0.2 s, and 4 s to ask what it is.
    foreign = "LLMCL_", "HF_", "XDG_", "RUSTICL_"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    environment = kept | {"HOME": str(home), "TERM": "xterm", "PATH": f"{programs}:{os.environ['PATH']}"}
    environment |= {f"XDG_{name}_HOME": str(home / name.lower()) for name in ("CACHE", "CONFIG", "DATA", "STATE")}
    environment |= {name: os.environ[name] for name in ("LLMCL_DEVICE",) if name in os.environ}
    problems: list[str] = []

    def try_in_order(commands: tuple[Typed, ...]) -> None:
        for typed in commands:
            start = time.monotonic()
            code, screen, cpu_s = screen_of(typed, environment, home)
            wrong = problem(typed, code, screen)
            say(f"{time.monotonic() - start:5.1f} s ({cpu_s:4.1f} of CPU)  {typed.command}: {wrong or 'right'}")
            if wrong is not None:
                problems.append(f"{typed.command}: {wrong}\n{screen[-1500:]}")

    with hub() as endpoint, ThreadPoolExecutor(2) as pool:
        environment["HF_ENDPOINT"] = endpoint
        wanted = [commands for name in groups for commands in in_order(GROUPS[name])]
        if {"hub", "answers"} & set(groups):
            try_in_order((FIRST,))
        for done in [pool.submit(try_in_order, commands) for commands in wanted]:
            done.result()
    return problems


def main() -> int:
    start, groups = time.monotonic(), sys.argv[1:] or [*GROUPS]
    with tempfile.TemporaryDirectory() as home:
        problems = type_all(Path(home), groups, say=lambda line: print(line, flush=True))
    print("", *problems, sep="\n\n")
    print(f"{', '.join(groups)}: {time.monotonic() - start:.0f} s, {len(problems)} problems")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
