"""The process that renders chat templates: its limits hold, whatever a template does, and it serves all who ask."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import llmcl
from llmcl.errors import CheckpointError, LlmclError
from llmcl.tokenizer import chat_template, template_process

posix = pytest.mark.skipif(os.name != "posix", reason="signals and limits of POSIX")
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux limits an address space")

ENDLESS = "{% macro f(n) %}{% if n %}{{ f(n - 1) ~ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}"


@pytest.fixture(autouse=True)
def own_process() -> Iterator[None]:
    """With the limits that the test sets."""
    template_process.stop()
    yield
    template_process.stop()


def render(template: str, content: str = "Hi") -> str:
    messages = [{"role": "user", "content": content}]
    return chat_template.render(template, messages, add_generation_prompt=True, special_tokens={})


def pid() -> int:
    """The idle process's."""
    render("x")
    assert template_process._idle is not None
    return template_process._idle._process.pid


# ---- limits ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "attack",
    [
        ENDLESS,
        "{% set r = range(99999) %}" + "{% for a in r %}" * 3 + "{% endfor %}" * 3,
        "{{ range(99999) | map('string') | select('in', range(99999) | list | string) | list | length }}",
        "{{ ([range(99999) | list] * 99) | map('sum') | list | sum * range(99999) | map('string') | map('center', 999)"
        " | join | length }}",
        "{{ ([[1] * 999] * 9999) | sum(start=[]) | length }}",
        "{{ 9 ** 9999999 }}",  # a constant: it is folded while compiling
        "{% if 9 ** 9999999 > 1 %}{% endif %}",
        "{{ a }}" * 140000,  # slow to compile
    ],
)
def test_a_template_ends_in_time(attack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pid()  # started
    monkeypatch.setattr(template_process, "TIME_LIMIT_S", 0.3)
    start = time.monotonic()
    with pytest.raises(CheckpointError, match=r"chat template failed: it ran for more than 0.3 s\. .*--raw"):
        render(attack)
    assert time.monotonic() - start < 30
    monkeypatch.setattr(template_process, "TIME_LIMIT_S", 60.0)
    assert render("{{ messages[0].content }}") == "Hi"


@linux
@pytest.mark.parametrize(
    "attack",
    [
        "{{ 'x' | center(10 ** 9) }}",
        "{{ 'x'.ljust(10 ** 9) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ 'x' * 10 ** 9 }}",
        "{{ [[0]] * 10 ** 9 }}",
        "{{ 'x' * 2 ** 27 + 'x' * 2 ** 27 }}",
    ],
)
def test_a_template_stays_within_its_memory(attack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "MEMORY_LIMIT", 64 << 20)
    with pytest.raises(CheckpointError, match=r"chat template failed: it needs more than 64 MiB of memory\. .*--raw"):
        render(attack)
    assert render("{{ messages[0].content }}") == "Hi"


@linux
def test_what_jinja_computes_while_it_compiles_stays_within_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "MEMORY_LIMIT", 64 << 20)
    chat_template.check("{{ 'x' | center(10 ** 9) }}{{ '%1000000000d' % 1 }}{% if 'x' * 10 ** 9 %}{% endif %}")
    assert template_process._idle is not None
    status = Path(f"/proc/{template_process._idle._process.pid}/status").read_text()
    assert int(re.findall(r"VmPeak:\s+(\d+) kB", status)[0]) <= 64 << 10


@linux
def test_a_string_doubled_again_and_again_stays_within_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "MEMORY_LIMIT", 64 << 20)
    doubled = "{% set ns = namespace(s='x') %}{% for i in range(40) %}{% set ns.s = ns.s + ns.s %}{% endfor %}"
    with pytest.raises(CheckpointError, match="it needs more than 64 MiB of memory"):
        render(doubled)


def test_a_template_writes_a_text_of_limited_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "TEXT_LIMIT", 1000)
    assert len(render("{{ 'x' * 1000 }}")) == 1000
    with pytest.raises(CheckpointError, match="chat template failed: its text has more than 1000 bytes"):
        render("{{ 'x' * 1001 }}")
    assert render("{{ messages[0].content }}") == "Hi"


def test_the_memory_is_there_again_for_each_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "MEMORY_LIMIT", 64 << 20)
    kept = pid()
    for _ in range(5):
        assert render("{% set n = 20000000 %}{% set a = 'x' * n %}{{ messages[0].content }}") == "Hi"
    assert pid() == kept


@linux
def test_the_process_has_no_rights_and_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "secret")
    folder = Path("/proc") / str(pid())
    limits = (folder / "limits").read_text()
    for name, limit in (("open files", 0), ("address space", 512 << 20), ("file size", 0), ("core file size", 0)):
        line = next(line for line in limits.splitlines() if line.startswith(f"Max {name} "))
        assert line.split()[-3:-1] == [str(limit)] * 2, line
    assert b"SOME_TOKEN" not in (folder / "environ").read_bytes()


# ---- one process for all -----------------------------------------------------------------------------------------


def test_the_process_is_kept_and_threads_share_it() -> None:
    kept = pid()
    with ThreadPoolExecutor(8) as pool:
        asked = [f"{n}" * n for n in range(1, 100)]
        assert list(pool.map(lambda text: render("{{ messages[0].content }}", text), asked)) == asked
    assert pid() == kept


@posix
def test_a_process_that_was_killed_while_idle_is_replaced() -> None:
    for early in (True, False):
        if early:
            template_process.start()
            assert template_process._idle is not None
            killed = template_process._idle._process.pid
        else:
            killed = pid()
        os.kill(killed, signal.SIGKILL)
        assert render("{{ messages[0].content }}") == "Hi" and pid() != killed


@posix
def test_a_process_that_ends_while_it_renders_is_named() -> None:
    process = template_process._Process()
    try:
        assert process.ask(b'{"template": "x", "variables": {}}') == ("T", "x")
        threading.Timer(0.2, process._process.send_signal, (signal.SIGSEGV,)).start()
        with pytest.raises(template_process.LimitError, match=f"its process ended with signal {int(signal.SIGSEGV)}"):
            process.ask(json.dumps({"template": ENDLESS, "variables": {}}).encode())
    finally:
        process.stop()


@posix
def test_ctrl_c_returns_at_once_and_answers_stay_in_step() -> None:
    pid()
    main = threading.main_thread().ident
    assert main is not None
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGINT)).start()
        render(ENDLESS)
    assert time.monotonic() - start < 30
    assert render("{{ messages[0].content }}", "next") == "next"


FORKS = """
import os
from llmcl.tokenizer import chat_template, template_process
def render(text):
    message = {"role": "user", "content": text}
    return chat_template.render("{{ messages[0].content }}", [message], add_generation_prompt=True, special_tokens={})
assert render("a") == "a"
ours = template_process._idle._process.pid
child = os.fork()
if child == 0:
    os._exit(0 if render("b") == "b" and template_process._idle._process.pid != ours else 1)
assert os.waitpid(child, 0)[1] == 0
assert render("c") == "c" and template_process._idle._process.pid == ours
"""

IS_KILLED = """
import os, signal, sys, threading
from llmcl.tokenizer import chat_template, template_process
template_process.TIME_LIMIT_S = 0.5
template_process.start()
template_process.TIME_LIMIT_S = 60.0
process = template_process._idle._process
print(process.pid, flush=True)
chat_template.check("x")
threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGKILL)).start()
chat_template.render(sys.argv[1], [{"role": "user", "content": ""}], add_generation_prompt=True, special_tokens={})
"""


@posix
def test_a_fork_gets_a_process_of_its_own() -> None:
    subprocess.run([sys.executable, "-c", FORKS], check=True, timeout=60)


@linux
def test_a_template_does_not_outlive_its_program() -> None:
    program = subprocess.run([sys.executable, "-c", IS_KILLED, ENDLESS], stdout=subprocess.PIPE, timeout=60)
    assert program.returncode == -signal.SIGKILL
    renderer = Path("/proc") / program.stdout.decode().strip()

    def runs() -> bool:
        try:
            return (renderer / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    end = time.monotonic() + 60
    while runs() and time.monotonic() < end:
        time.sleep(0.05)
    assert not runs()


def test_it_starts_before_the_model_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        llmcl.load(str(tmp_path / "none.gguf"))
    assert template_process._idle is not None


def test_importing_llmcl_starts_no_process() -> None:
    script = (
        "import sys, llmcl, llmcl.cli, llmcl.tokenizer; assert 'llmcl.tokenizer.template_process' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


# ---- where something is not as it should be ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import os; os._exit(3)", "cannot be started: its process ended with exit code 3.*raw, --raw"),
        ("print('!')", "cannot be started: its process ended with exit code 0"),
        ("import time; time.sleep(9)", "cannot be started: no answer in 0.5 s"),
    ],
)
def test_a_process_that_does_not_start_is_named(program: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "START_LIMIT_S", 0.5 if "sleep" in program else 60.0)
    monkeypatch.setattr(template_process, "_PROGRAM", program)
    template_process.start()
    with pytest.raises(LlmclError, match=message):
        render("x")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"T" + (1 << 60).to_bytes(8, "big"), "its text has more than 67108864 bytes"),
        (b"T" + (2).to_bytes(8, "big") + b"\xff\xff", "its process sent no text"),
        (b"T\0\0", "its process ended with exit code 0"),
        (b"?" + (1).to_bytes(8, "big") + b"\x1b", r"failed: \\x1b"),
    ],
)
def test_what_comes_from_the_process_is_not_trusted(
    answer: bytes, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_process, "_PROGRAM", f"import sys; sys.stdout.buffer.write({b'+' + answer!r})")
    with pytest.raises(CheckpointError, match=message):
        render("x")


def test_where_no_process_can_be_started_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text("no program")
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(LlmclError, match=r"cannot be started: .*python.*Give the prompt as it is.*--raw"):
        render("x")


def test_a_program_that_embeds_python_uses_the_interpreter_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/opt/editor")
    assert render("{{ messages[0].content }}") == "Hi"
    template_process.stop()
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    with pytest.raises(LlmclError, match=r"cannot be started: /opt/editor embeds Python.*--raw"):
        render("x")


# ---- the clock -----------------------------------------------------------------------------------------------------


def test_an_earlier_limit_wakes_the_clock() -> None:
    late = threading.Event()
    watch = template_process._Watch(late.set)
    with watch.limit(60):
        pass
    with watch.limit(0.05):
        assert late.wait(30) and watch.is_late


def test_limits_that_are_kept_end_nothing() -> None:
    late = threading.Event()
    watch = template_process._Watch(late.set)
    for _ in range(100):
        with watch.limit(0.5):  # longer than a busy machine stops a thread
            pass
    assert not late.wait(0.7) and not watch.is_late
    (thread,) = [thread for thread in threading.enumerate() if thread is watch._thread]
    watch.end()
    thread.join(30)
    assert not thread.is_alive()
