"""The command line: as a user runs it on the demo model, and in detail on an engine that only echoes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import llmcl
from llmcl.cli import main
from llmcl.cli.chat import read_message
from llmcl.errors import UsageError
from llmcl.generation import Piece
from llmcl.stats import GenerationStats, summarize

ROOT = Path(__file__).resolve().parent.parent
MODEL = "smollm2"
QUESTION = "Why is the sky blue?"
STATS_FIELDS = {
    "prompt_tokens",
    "generated_tokens",
    "load_ms",
    "compile_ms",
    "ttft_ms",
    "prefill_tokens_per_s",
    "tbt_ms",
    "tpot_ms",
    "decode_tokens_per_s",
    "device_to_host_bytes_per_token",
    "host_to_device_bytes_per_token",
    "kernel_launches_per_token",
    "peak_device_bytes",
}
TBT_FIELDS = {"mean", "std", "min", "p50", "p90", "p95", "p99", "max", "stalls"}


# ---- as a user runs it --------------------------------------------------------------------------------


def environment(**variables: str) -> dict[str, str]:
    """The tests' environment without the options in it, and with Python's buffering as users have it:
    PYTHONUNBUFFERED would hide a piece that is not flushed and an error at the last flush."""
    left_out = [*option_variables(), "PYTHONUNBUFFERED"]
    return {name: value for name, value in os.environ.items() if name not in left_out} | variables


def option_variables() -> list[str]:
    kept = "LLMCL_CACHE_DIR", "LLMCL_SET_OCL_ICD_VENDORS"
    return [name for name in os.environ if name.startswith("LLMCL_") and name not in kept]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "llmcl.cli", *arguments]


def run(*arguments: str, stdin: str | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        capture_output=True,
        text=True,
        encoding="utf-8",
        cwd=ROOT,
        env=environment(**variables),
        timeout=120,
    )


def generate(*options: str, prompt: str = QUESTION, **variables: str) -> subprocess.CompletedProcess[str]:
    done = run("generate", "-m", MODEL, "-p", prompt, *options, **variables)
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def answer() -> dict[str, Any]:
    """The greedy answer in JSON, for comparison with everything that must say the same."""
    value = json.loads(generate("-n", "16", "--format", "json").stdout)
    assert isinstance(value, dict)
    return value


def test_json_has_the_documented_fields_and_consistent_values(answer: dict[str, Any]) -> None:
    assert set(answer) == {
        "text",
        "token_ids",
        "prompt_token_ids",
        "finish_reason",
        "model",
        "device",
        "stats",
    }
    assert set(answer["stats"]) == STATS_FIELDS
    assert set(answer["stats"]["tbt_ms"]) == TBT_FIELDS
    assert answer["finish_reason"] == "length"
    assert len(answer["token_ids"]) == answer["stats"]["generated_tokens"] == 16
    assert len(answer["prompt_token_ids"]) == answer["stats"]["prompt_tokens"]
    assert all(isinstance(i, int) for i in answer["token_ids"] + answer["prompt_token_ids"])
    assert answer["text"].strip()
    assert answer["device"]


def test_text_goes_to_stdout_and_everything_else_to_stderr(answer: dict[str, Any]) -> None:
    done = generate("-n", "16")
    assert done.stdout == answer["text"] + "\n"
    assert answer["device"] in done.stderr
    assert "TTFT" in done.stderr and "TBT" in done.stderr
    assert answer["text"] not in done.stderr


def test_quiet_leaves_standard_error_empty(answer: dict[str, Any]) -> None:
    done = generate("-n", "16", "-q")
    assert (done.stdout, done.stderr) == (answer["text"] + "\n", "")


def test_verbose_shows_what_compiling_took(answer: dict[str, Any], tmp_path: Path) -> None:
    """The first run compiles into an empty cache and says so, kernel by kernel and in its report; the second loads."""
    for compiles in (True, False):
        done = generate("-n", "1", "-v", LLMCL_CACHE_DIR=str(tmp_path))
        lines = done.stderr.splitlines()
        compiled = [line for line in lines if re.fullmatch(r"compiled attention_\w+ for .+ in \d+\.\d s", line)]
        loaded = [line for line in lines if re.fullmatch(r"loaded attention_\w+ for .+ from .+", line)]
        reported = [line for line in lines if re.match(r"compile +\d+ ms", line)]
        assert [bool(found) for found in (compiled, loaded, reported)] == [compiles, not compiles, compiles], lines
    assert "compiled" not in generate("-n", "1").stderr


def test_prompt_from_file_pipe_and_dash_gives_the_same_answer(answer: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "question.txt"
    file.write_text(QUESTION + "\n", encoding="utf-8")
    options = ("generate", "-m", MODEL, "-n", "16", "-q")
    for done in (
        run(*options, "-f", str(file)),
        run(*options, stdin=QUESTION + "\n"),
        run(*options, "-p", "-", stdin=QUESTION),
    ):
        assert done.returncode == 0, done.stderr
        assert done.stdout == answer["text"] + "\n"


def test_every_option_has_a_variable_and_the_command_line_goes_first(answer: dict[str, Any]) -> None:
    variables = {
        "LLMCL_MODEL": MODEL,
        "LLMCL_PROMPT": "Say no.",
        "LLMCL_MAX_TOKENS": "16",
        "LLMCL_FORMAT": "json",
    }
    done = run("generate", "-p", QUESTION, **variables)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["token_ids"] == answer["token_ids"]
    help_text = run("generate", "--help").stdout
    for name in (
        *(
            "MODEL",
            "PROMPT",
            "FILE",
            "MAX_TOKENS",
            "TEMP",
            "TOP_K",
            "TOP_P",
            "MIN_P",
            "REPEAT_PENALTY",
            "SEED",
            "STOP",
        ),
        *(
            "IGNORE_EOS",
            "RAW",
            "SYSTEM_PROMPT",
            "CTX_SIZE",
            "DEVICE",
            "DTYPE",
            "KV_DTYPE",
            "OFFLINE",
            "FORMAT",
            "QUIET",
        ),
    ):
        assert f"LLMCL_{name}" in help_text


def test_a_stop_string_ends_the_answer_before_it(answer: dict[str, Any]) -> None:
    stop = answer["text"][len(answer["text"]) // 2 :][:4]
    shown, _, _ = answer["text"].partition(stop)
    done = json.loads(generate("-n", "16", "--format", "json", "--stop", "never said", "--stop", stop).stdout)
    assert (done["text"], done["finish_reason"]) == (shown, "stop")
    assert generate("-n", "16", "-q", LLMCL_STOP=stop).stdout == shown + "\n"


def test_raw_and_system_prompt_change_the_prompt(answer: dict[str, Any]) -> None:
    raw = json.loads(generate("-n", "2", "--raw", "--format", "json").stdout)
    system = json.loads(generate("-n", "2", "--system-prompt", "Answer in French.", "--format", "json").stdout)
    lengths = [len(done["prompt_token_ids"]) for done in (raw, answer)]
    assert lengths[0] < lengths[1]
    assert system["prompt_token_ids"] != answer["prompt_token_ids"]


def test_a_seed_draws_the_same_tokens_again() -> None:
    options = ("-n", "16", "--temp", "1.5", "--top-k", "50", "--ignore-eos", "--format", "json")
    drawn = generate(*options)
    reported = drawn.stderr.split("seed: ")[1].split()[0]
    again = generate(*options, "--seed", reported)
    other = generate(*options, "--seed", str(int(reported) ^ 1))
    ids = [json.loads(done.stdout)["token_ids"] for done in (drawn, again, other)]
    assert ids[0] == ids[1] != ids[2]
    assert [len(i) for i in ids] == [16, 16, 16]


@pytest.fixture
def endless() -> Iterator[subprocess.Popen[bytes]]:
    """An answer under way, its first byte already read."""
    process = subprocess.Popen(
        command("generate", "-m", MODEL, "-p", QUESTION, "-n", "4000", "--ignore-eos"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        env=environment(),
    )
    assert process.stdout is not None
    assert process.stdout.read(1), process.communicate()[1].decode()
    yield process
    process.kill()
    process.communicate()


def test_ctrl_c_keeps_the_text_and_reports(endless: subprocess.Popen[bytes]) -> None:
    assert endless.stdout is not None
    endless.stdout.read(20)
    endless.send_signal(signal.SIGINT)
    rest, errors = endless.communicate(timeout=30)
    assert endless.returncode == 130
    assert rest.endswith(b"\n")
    assert b"TBT" in errors and b"Traceback" not in errors
    n_tokens = int(errors.split(b"interrupted after ")[1].split()[0])
    assert n_tokens < 500, "text that is not flushed at once would have come after thousands of tokens"


def test_a_closed_pipe_ends_quietly(endless: subprocess.Popen[bytes]) -> None:
    assert endless.stdout is not None and endless.stderr is not None
    endless.stdout.close()
    assert endless.wait(timeout=30) == 141
    errors = endless.stderr.read()
    assert b"Traceback" not in errors and b"BrokenPipe" not in errors and b"error" not in errors


@pytest.mark.parametrize("arguments", [("devices",), ("devices", "--format", "json")])
def test_a_pipe_closed_before_the_last_flush_ends_quietly(arguments: tuple[str, ...]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as closed_pipe:
        done = subprocess.run(
            command(*arguments), stdout=closed_pipe, stderr=subprocess.PIPE, cwd=ROOT, env=environment()
        )
    assert (done.returncode, done.stderr) == (141, b"")


def test_chat_from_a_pipe_remembers_until_reset() -> None:
    first, second = "Name one colour.", "Name another one."
    options = ("chat", "-m", MODEL, "-n", "12")
    talk = run(*options, stdin=f"{first}\n/stats\n{second}\n")
    forgetful = run(*options, "-q", stdin=f"{first}\n/reset\n{second}\n")
    alone = run(*options, "-q", stdin=f"{second}\n/exit\nnot read\n")
    for done in (talk, forgetful, alone):
        assert done.returncode == 0, done.stderr
    assert forgetful.stdout.endswith(alone.stdout)
    opening = forgetful.stdout[: -len(alone.stdout)]
    assert talk.stdout.startswith(opening)
    assert talk.stdout != forgetful.stdout
    assert "TTFT" in talk.stderr
    assert "not read" not in alone.stdout


def test_unknown_model_and_unknown_device() -> None:
    model = run("generate", "-m", "no-such-model", "-p", "x", "--offline")
    assert model.returncode in (6, 8) and "no-such-model" in model.stderr
    device = run("generate", "-m", MODEL, "-p", "x", "--device", "no-such-device")
    assert device.returncode == 3 and "no-such-device" in device.stderr
    for done in (model, device):
        assert done.stdout == "" and "error: " in done.stderr and "Traceback" not in done.stderr


def test_a_prompt_longer_than_the_context() -> None:
    done = run("generate", "-m", MODEL, "-c", "32", "-p", "word " * 100)
    assert (done.returncode, done.stdout) == (9, "")
    assert "32" in done.stderr and "--ctx-size" in done.stderr


def test_without_any_opencl_device_it_says_what_to_install(tmp_path: Path) -> None:
    nothing = str(tmp_path / "none.icd")  # a folder would leave the PoCL beside pyopencl's loader
    for arguments in (("generate", "-m", MODEL, "-p", "x"), ("devices",)):
        done = run(*arguments, OCL_ICD_VENDORS=nothing)
        assert (done.returncode, done.stdout) == (3, ""), done
        assert "error: " in done.stderr and "install" in done.stderr
        assert "Traceback" not in done.stderr


def test_devices_lists_and_explains() -> None:
    text = run("devices")
    assert text.returncode == 0, text.stderr
    assert all(len(line) <= 80 for line in text.stdout.splitlines())
    listed = json.loads(run("devices", "--format", "json").stdout)
    assert [device["index"] for device in listed["devices"]] == list(range(len(listed["devices"])))
    for device in listed["devices"]:
        assert device["name"] in " ".join(text.stdout.split())
        assert device["global_mem_bytes"] > 0 and device["max_alloc_bytes"] > 0 and device["compute_units"] > 0
    assert listed["selected"] in range(len(listed["devices"]))
    assert listed["reason"]


def test_debug_shows_the_traceback() -> None:
    done = run("generate", "-m", "no-such-model", "-p", "x", "--offline", LLMCL_DEBUG="1")
    assert "Traceback" in done.stderr and "error: " in done.stderr


def test_start_up_imports_no_engine() -> None:
    heavy = "numpy", "pyopencl", "rich", "huggingface_hub", "tokenizers", "jinja2", "gguf"
    code = f"import sys, llmcl.cli; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment())
    assert done.stdout.strip() == "[]", done.stderr


# ---- on an engine that answers at once ----------------------------------------------------------------


def stats(**changes: Any) -> GenerationStats:
    values: dict[str, Any] = dict.fromkeys(STATS_FIELDS, 1) | {"tbt_ms": summarize([20.0, 21.0])} | changes
    return GenerationStats(**values)


class Engine:
    """Stands in for LLM: echoes the prompt word by word and remembers how it was called."""

    model_name = "echo"
    max_context = 64
    load_ms = 1.0
    dtype = "float32"
    device = SimpleNamespace(name="Echo Device", entry=SimpleNamespace(label="Echo Device (Echo OpenCL)"))

    def __init__(self) -> None:
        self.loaded: dict[str, Any] = {}
        self.request: dict[str, Any] = {}
        self.after: Callable[[int], None] = lambda n: None
        self.closed_streams = 0
        self.streams: list[Iterator[Piece]] = []  # held, so that only close() can end one before its time
        self.stats = stats()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def stream(self, prompt: str, **request: Any) -> Iterator[Piece]:
        self.request = request | {"prompt": prompt}
        self.streams.append(self.pieces(prompt))
        return self.streams[-1]

    def pieces(self, prompt: str) -> Iterator[Piece]:
        words = prompt.split()
        try:
            for n, word in enumerate(words, start=1):
                last = n == len(words)
                yield Piece(
                    f"{word} ",
                    n,
                    20.0 if n > 1 else None,
                    "stop" if last else None,
                    self.stats if last else None,
                )
                self.after(n)
        finally:
            self.closed_streams += 1

    def generate(self, prompt: str, **request: Any) -> SimpleNamespace:
        pieces = list(self.stream(prompt, **request))
        return SimpleNamespace(
            text="".join(piece.text for piece in pieces),
            token_ids=[piece.token_id for piece in pieces],
            prompt_token_ids=[1],
            finish_reason="stop",
            stats=self.stats,
        )

    def chat(self) -> SimpleNamespace:
        return SimpleNamespace(send=self.stream, reset=lambda: None, messages=[])


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    engine = Engine()

    def load(model: str, **settings: Any) -> Engine:
        engine.loaded = settings | {"model": model}
        return engine

    monkeypatch.setattr(llmcl, "load", load)
    for name in option_variables():
        monkeypatch.delenv(name)
    return engine


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    def invoke(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["llmcl", *arguments])
        with pytest.raises(SystemExit) as exit:
            main()
        assert isinstance(exit.value.code, int)
        return exit.value.code

    return invoke


def test_options_reach_the_engine(engine: Engine, invoke: Callable[..., int]) -> None:
    options = "--temp 0.5 --top-k 3 --top-p 0.9 --min-p 0.1 --repeat-penalty 1.1 --seed 4"
    ending = "--stop a --stop bc --ignore-eos"
    loading = "-c 48 --device gpu --dtype float16 --kv-dtype float32 --offline"
    quantized = "--quantize q4_0 --activation-dtype float32"
    assert (
        invoke(
            "generate",
            "-m",
            "m",
            "-p",
            "x",
            "-n",
            "7",
            "--system-prompt",
            "s",
            *options.split(),
            *ending.split(),
            *loading.split(),
            *quantized.split(),
        )
        == 0
    )
    assert engine.request == {
        "prompt": "x",
        "max_tokens": 7,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.1,
        "repeat_penalty": 1.1,
        "seed": 4,
        "stop": ("a", "bc"),
        "ignore_eos": True,
        "raw": False,
        "system_prompt": "s",
    }
    assert (
        engine.loaded.items()
        >= {
            "model": "m",
            "max_context": 48,
            "device": "gpu",
            "dtype": "float16",
            "quantize": "q4_0",
            "activation_dtype": "float32",
            "kv_dtype": "float32",
            "offline": True,
        }.items()
    )


def test_defaults_are_greedy(engine: Engine, invoke: Callable[..., int]) -> None:
    assert invoke("generate", "-m", "m", "-p", "x") == 0
    neutral = {
        "max_tokens": 256,
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repeat_penalty": 1.0,
    }
    assert engine.request.items() >= (neutral | {"seed": None, "ignore_eos": False}).items()


@pytest.mark.parametrize(
    ("options", "named", "found", "expected"),
    [
        (["--temp", "-1"], "--temp", "-1", "0 or more"),
        (["--temp", "nan"], "--temp", "nan", "0 or more"),
        (["--temp", "hot"], "--temp", "hot", "0 or more"),
        (["--top-k", "-5"], "--top-k", "-5", "0 (off) to 2^31 - 1"),
        (["--top-p", "0"], "--top-p", "0", "above 0 and at most 1"),
        (["--top-p", "1.01"], "--top-p", "1.01", "above 0 and at most 1"),
        (["--min-p", "-0.1"], "--min-p", "-0.1", "from 0 (off) to 1"),
        (["--min-p", "1.1"], "--min-p", "1.1", "from 0 (off) to 1"),
        (["--repeat-penalty", "0"], "--repeat-penalty", "0", "above 0"),
        (["--seed", "-1"], "--seed", "-1", "0 to 2^64 - 1"),
        (["-n", "-1"], "--max-tokens", "-1", "1 or more"),
        (["-n", "2.5"], "--max-tokens", "2.5", "1 or more"),
        (["-c", "0"], "--ctx-size", "0", "1 or more"),
        (["--dtype", "int3"], "--dtype", "int3", "auto, float32, bfloat16, float16"),
        (["--kv-dtype", "int3"], "--kv-dtype", "int3", "auto, float32, float16, bfloat16, q8_0"),
        (["--format", "xml"], "--format", "xml", "text, json"),
        (["--stop", ""], "--stop", "''", "at least one character"),
        (["--raw", "--system-prompt", "s"], "--raw", "--system-prompt", "one of the two"),
        (["-f", "here.txt"], "--file", "here.txt", "one of the two"),
    ],
)
def test_bad_values_are_refused_by_name_before_loading(
    options: list[str],
    named: str,
    found: str,
    expected: str,
    engine: Engine,
    invoke: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert invoke("generate", "-m", "m", "-p", "x", *options) == 2
    out, errors = capsys.readouterr()
    assert out == "" and engine.loaded == {}
    for part in (named, found, expected):
        assert part in errors


def test_prompts_that_cannot_be_used(
    engine: Engine, invoke: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    latin = tmp_path / "latin.txt"
    latin.write_bytes("caf\u00e9".encode("latin-1"))
    for options, message in (
        (["-p", ""], "empty"),
        (["-f", str(tmp_path / "none.txt")], "none.txt: cannot be read"),
        (["-f", str(tmp_path)], "cannot be read"),
        (["-f", str(latin)], "byte 3 is not UTF-8"),
    ):
        assert invoke("generate", "-m", "m", *options) == 2
        assert message in capsys.readouterr().err
    assert engine.loaded == {}


def test_the_command_line_goes_before_the_other_options_variable(
    engine: Engine, invoke: Callable[..., int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("from the file", encoding="utf-8")
    monkeypatch.setenv("LLMCL_PROMPT", "from the variable")
    assert invoke("generate", "-m", "m", "-f", str(file)) == 0
    assert engine.request["prompt"] == "from the file"
    monkeypatch.delenv("LLMCL_PROMPT")
    monkeypatch.setenv("LLMCL_FILE", str(file))
    assert invoke("generate", "-m", "m", "-p", "from the option") == 0
    assert engine.request["prompt"] == "from the option"


def test_no_prompt_at_a_terminal(
    engine: Engine,
    invoke: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    assert invoke("generate", "-m", "m") == 2
    assert "-p/--prompt" in capsys.readouterr().err


def test_a_missing_model_is_named(
    engine: Engine, invoke: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke("generate", "-p", "x") == 2
    errors = capsys.readouterr().err
    assert "--model" in errors and "LLMCL_MODEL" in errors


def test_json_stays_valid_when_a_figure_is_undefined(
    engine: Engine, invoke: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    engine.stats = stats(tpot_ms=float("nan"), prefill_tokens_per_s=float("inf"))
    assert invoke("generate", "-m", "m", "-p", 'quote " \u00e9 \U0001f600', "--format", "json") == 0

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    value = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert value["text"] == 'quote " \u00e9 \U0001f600 '
    assert value["stats"]["tpot_ms"] is None and value["stats"]["prefill_tokens_per_s"] is None


def test_ctrl_c_lets_the_token_in_work_finish(
    engine: Engine, invoke: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    engine.after = lambda n: signal.raise_signal(signal.SIGINT) if n == 2 else None
    before = signal.getsignal(signal.SIGINT)
    assert invoke("generate", "-m", "m", "-p", "one two three four") == 130
    out, errors = capsys.readouterr()
    assert out == "one two three \n"
    assert "interrupted after 3 tokens" in errors and "p50 20" in errors
    assert engine.closed_streams == 1
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_ends_at_once(
    engine: Engine, invoke: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    def twice(n: int) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    engine.after = twice
    assert invoke("generate", "-m", "m", "-p", "one two three") == 130
    assert capsys.readouterr().out == "one "
    assert engine.closed_streams == 1


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


def test_errors_of_ours_and_defects(
    engine: Engine,
    invoke: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def raising(error: Exception) -> Callable[..., Any]:
        def load(model: str, **settings: Any) -> Any:
            raise error

        return load

    monkeypatch.setattr(llmcl, "load", raising(UsageError("the thing is wrong: do that")))
    assert invoke("generate", "-m", "m", "-p", "x") == 2
    assert capsys.readouterr().err == "error: the thing is wrong: do that\n"
    monkeypatch.setattr(llmcl, "load", raising(KeyError("gone")))
    assert invoke("generate", "-m", "m", "-p", "x") == 1
    errors = capsys.readouterr().err
    assert "error: unexpected KeyError: 'gone'" in errors and "LLMCL_DEBUG=1" in errors and "Traceback" not in errors


def test_help_is_complete(invoke: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke("generate", "--help") == 0
    text = capsys.readouterr().out
    for heading in ("Model:", "Prompt:", "Sampling:", "Device:", "Output:", "Metrics"):
        assert heading in text
    for word in ("TTFT", "TBT", "TPOT", "--repeat-penalty", "greedy", "standard error"):
        assert word in text


def test_version(invoke: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke("--version") == 0
    name, version = capsys.readouterr().out.split()
    assert name == "llmcl" and version[0].isdigit()
