"""The command line as a user runs it, on the demo model.

What only a process shows (its two streams, signals, pipes, what it imports) runs in one; the rest runs in this process
with the model loaded once.
"""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import option_variables, random_weights, save_folder, small_config
from programs import ROOT, Run

import llmcl
from llmcl.engine.llm import LLM
from llmcl.engine.stats import Recorder

MODEL = "smollm2"
QUESTION = "Why is the sky blue?"


def environment(**variables: str) -> dict[str, str]:
    """The tests' environment without the options in it, and with Python's buffering as users have it:
    PYTHONUNBUFFERED would hide a piece that is not flushed and an error at the last flush. Mesa's software renderer,
    which the tests ask for, costs each start 0.2 s."""
    left_out = [*option_variables(), "PYTHONUNBUFFERED", "RUSTICL_ENABLE"]
    return {name: value for name, value in os.environ.items() if name not in left_out} | variables


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "llmcl", *arguments]


def run(*arguments: str, stdin: str | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
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


@pytest.fixture(scope="module")
def answer() -> dict[str, Any]:
    """The greedy answer in JSON, of a process, for comparison with everything that must say the same."""
    done = run("generate", "-m", MODEL, "-p", QUESTION, "-n", "16", "--format", "json")
    assert done.returncode == 0, done.stderr
    value = json.loads(done.stdout)
    assert isinstance(value, dict)
    return value


@pytest.fixture(scope="module")
def demo() -> Iterator[LLM]:
    """The demo model as the command line loads it."""
    with llmcl.load(MODEL) as llm:
        yield llm


@pytest.fixture
def generate(run_here: Run, demo: LLM, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`llmcl generate` in this process, with the model loaded before."""
    monkeypatch.setattr(llmcl, "load", lambda model, **settings: demo)
    monkeypatch.setattr(LLM, "close", lambda llm: None)

    def generate(*options: str, prompt: str = QUESTION, **variables: str) -> subprocess.CompletedProcess[str]:
        done = run_here("llmcl", "generate", "-m", MODEL, "-p", prompt, *options, **variables)
        assert done.returncode == 0, done.stderr
        return done

    return generate


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
    figures = Recorder(1).finish().to_dict()  # whose names are in engine/test_stats.py
    assert answer["stats"].keys() == figures.keys() and answer["stats"]["tbt_ms"].keys() == figures["tbt_ms"].keys()
    assert answer["finish_reason"] == "length"
    assert len(answer["token_ids"]) == answer["stats"]["generated_tokens"] == 16
    assert len(answer["prompt_token_ids"]) == answer["stats"]["prompt_tokens"]
    assert all(isinstance(i, int) for i in answer["token_ids"] + answer["prompt_token_ids"])
    assert answer["text"].strip()
    assert answer["device"]


def test_text_goes_to_stdout_and_everything_else_to_stderr(answer: dict[str, Any], generate: Run) -> None:
    done = generate("-n", "16")
    assert done.stdout == answer["text"] + "\n"
    assert answer["device"] in done.stderr
    assert "TTFT" in done.stderr and "TBT" in done.stderr
    assert answer["text"] not in done.stderr


@pytest.mark.slow
def test_quiet_leaves_standard_error_empty_and_a_pipe_is_a_prompt(answer: dict[str, Any]) -> None:
    done = run("generate", "-m", MODEL, "-n", "16", "-q", stdin=QUESTION + "\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, answer["text"] + "\n", "")


@pytest.mark.slow
def test_verbose_shows_what_compiling_took(run_here: Run, tmp_path: Path) -> None:
    """The first run compiles into an empty cache and says so, kernel by kernel and in its report; the second loads."""
    model = str(save_folder(tmp_path / "small", small_config(), random_weights(small_config(), seed=1)))
    ask = "generate", "-m", model, "-p", QUESTION, "-n", "1"
    for compiles in (True, False):
        done = run(*ask, "-v", LLMCL_CACHE_DIR=str(tmp_path / "cache"))
        lines = done.stderr.splitlines()
        compiled = [line for line in lines if re.fullmatch(r"compiled attention_\w+ for .+ in \d+\.\d s", line)]
        loaded = [line for line in lines if re.fullmatch(r"loaded attention_\w+ for .+ from .+", line)]
        reported = [line for line in lines if re.match(r"compile +\d+ ms", line)]
        assert [bool(found) for found in (compiled, reported)] == [compiles, compiles], lines
        assert compiles or loaded, lines  # the first run loads what its child processes compiled
    assert "compiled" not in run_here("llmcl", *ask).stderr


@pytest.mark.usefixtures("generate")
def test_prompt_from_file_pipe_and_dash_gives_the_same_answer(
    answer: dict[str, Any], run_here: Run, tmp_path: Path
) -> None:
    file = tmp_path / "question.txt"
    file.write_text(QUESTION + "\n", encoding="utf-8")
    options = ("generate", "-m", MODEL, "-n", "16", "-q")
    for done in (
        run_here("llmcl", *options, "-f", str(file)),
        run_here("llmcl", *options, stdin=QUESTION + "\n"),
        run_here("llmcl", *options, "-p", "-", stdin=QUESTION),
    ):
        assert done.returncode == 0, done.stderr
        assert done.stdout == answer["text"] + "\n"


@pytest.mark.usefixtures("generate")
def test_every_option_has_a_variable_and_the_command_line_goes_first(answer: dict[str, Any], run_here: Run) -> None:
    variables = {
        "LLMCL_MODEL": MODEL,
        "LLMCL_PROMPT": "Say no.",
        "LLMCL_MAX_TOKENS": "16",
        "LLMCL_FORMAT": "json",
    }
    done = run_here("llmcl", "generate", "-p", QUESTION, **variables)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["token_ids"] == answer["token_ids"]
    help_text = run_here("llmcl", "generate", "--help").stdout
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


def test_a_stop_string_ends_the_answer_before_it(answer: dict[str, Any], generate: Run) -> None:
    stop = answer["text"][len(answer["text"]) // 2 :][:4]
    shown, _, _ = answer["text"].partition(stop)
    done = json.loads(generate("-n", "16", "--format", "json", "--stop", "never said", "--stop", stop).stdout)
    assert (done["text"], done["finish_reason"]) == (shown, "stop")
    assert generate("-n", "16", "-q", LLMCL_STOP=stop).stdout == shown + "\n"


def test_raw_and_system_prompt_change_the_prompt(answer: dict[str, Any], generate: Run) -> None:
    raw = json.loads(generate("-n", "2", "--raw", "--format", "json").stdout)
    system = json.loads(generate("-n", "2", "--system-prompt", "Answer in French.", "--format", "json").stdout)
    lengths = [len(done["prompt_token_ids"]) for done in (raw, answer)]
    assert lengths[0] < lengths[1]
    assert system["prompt_token_ids"] != answer["prompt_token_ids"]


def test_a_seed_draws_the_same_tokens_again(generate: Run) -> None:
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
    rest, errors = endless.communicate(timeout=60)
    assert endless.returncode == 130
    assert rest.endswith(b"\n")
    assert b"TBT" in errors and b"Traceback" not in errors
    n_tokens = int(errors.split(b"stopped   after ")[1].split()[0])
    assert n_tokens < 1500, "text that is not flushed at once would have come after thousands of tokens"


@pytest.mark.slow
def test_a_closed_pipe_ends_quietly(endless: subprocess.Popen[bytes]) -> None:
    assert endless.stdout is not None and endless.stderr is not None
    endless.stdout.close()
    assert endless.wait(timeout=60) == 141
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


@pytest.mark.usefixtures("generate")
def test_chat_from_a_pipe_remembers_until_reset(run_here: Run) -> None:
    first, second = "Name one colour.", "Name another one."
    options = ("chat", "-m", MODEL, "-n", "12", "--temp", "0")
    talk = run_here("llmcl", *options, stdin=f"{first}\n/stats\n{second}\n")
    forgetful = run_here("llmcl", *options, "-q", stdin=f"{first}\n/reset\n{second}\n")
    alone = run_here("llmcl", *options, "-q", stdin=f"{second}\n/exit\nnot read\n")
    for done in (talk, forgetful, alone):
        assert done.returncode == 0, done.stderr
    assert forgetful.stdout.endswith(alone.stdout)
    opening = forgetful.stdout[: -len(alone.stdout)]
    assert talk.stdout.startswith(opening)
    assert talk.stdout != forgetful.stdout
    assert "TTFT" in talk.stderr
    assert "not read" not in alone.stdout


def test_unknown_model_and_unknown_device(run_here: Run) -> None:
    model = run_here("llmcl", "generate", "-m", "no-such-model", "-p", "x", "--offline")
    assert model.returncode in (6, 8) and "no-such-model" in model.stderr
    device = run_here("llmcl", "generate", "-m", MODEL, "-p", "x", "--device", "no-such-device")
    assert device.returncode == 3 and "no-such-device" in device.stderr
    for done in (model, device):
        assert done.stdout == "" and "error: " in done.stderr and "Traceback" not in done.stderr


def test_without_any_opencl_device_it_says_what_to_install(tmp_path: Path) -> None:
    nothing = str(tmp_path / "none.icd")  # a folder would leave the PoCL beside pyopencl's loader
    for arguments in (("generate", "-m", MODEL, "-p", "x"), ("devices",)):
        done = run(*arguments, OCL_ICD_VENDORS=nothing)
        assert (done.returncode, done.stdout) == (3, ""), done
        assert "error: " in done.stderr and "install" in done.stderr
        assert "Traceback" not in done.stderr


def test_models_lists_every_family(run_here: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from llmcl.architectures.families import FAMILIES
    from llmcl.checkpoint.formats import FORMATS

    listed = json.loads(run_here("llmcl", "models", "--format", "json").stdout)
    families = {family["model_type"]: family for family in listed["families"]}
    assert list(families) == list(FAMILIES) and listed["formats"]["gguf"] == list(FORMATS)
    assert {"sinks", "experts with biases", "a window in 1 of 2 layers"} <= {*families["gpt_oss"]["features"]}
    assert "MXFP4" in families["gpt_oss"]["safetensors"] and not families["mistral"]["features"][1:]
    assert "scores that grow with the position" in families["ministral3"]["features"]
    assert families["llama"]["tested_with"] == "a published model"
    text = run_here("llmcl", "models").stdout
    assert all(name in text for name in (*FAMILIES, *FORMATS))
    assert "tested with a published model: bert, llama; the others with random weights" in text
    (line,) = (line for line in text.splitlines() if "llama-3.1-8b" in line)
    assert re.search(r"8\.0 B +1[67]\.\d GB +[45]\.\d GB", line)
    for columns in ("0", "1"):
        monkeypatch.setenv("COLUMNS", columns)
        narrow = run_here("llmcl", "models").stdout
        assert all(name in narrow for name in FAMILIES)


def test_devices_lists_and_explains(run_here: Run) -> None:
    text = run_here("llmcl", "devices")
    assert text.returncode == 0, text.stderr
    assert all(len(line) <= 80 for line in text.stdout.splitlines())
    listed = json.loads(run_here("llmcl", "devices", "--format", "json").stdout)
    assert [device["index"] for device in listed["devices"]] == list(range(len(listed["devices"])))
    for device in listed["devices"]:
        assert device["name"] in " ".join(text.stdout.split())
        assert device["global_mem_bytes"] > 0 and device["max_alloc_bytes"] > 0 and device["compute_units"] > 0
        assert isinstance(device["ptx_arch"], int) and {device["is_intel_cpu"], device["is_pocl"]} <= {True, False}
    assert listed["selected"] in range(len(listed["devices"]))
    assert listed["reason"]


def test_debug_shows_the_traceback(run_here: Run) -> None:
    done = run_here("llmcl", "generate", "-m", "no-such-model", "-p", "x", "--offline", LLMCL_DEBUG="1")
    assert "Traceback" in done.stderr and "error: " in done.stderr


def test_start_up_imports_no_engine() -> None:
    heavy = "numpy", "pyopencl", "rich", "huggingface_hub", "tokenizers", "jinja2", "gguf"
    code = f"import sys, llmcl.cli; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment())
    assert done.stdout.strip() == "[]", done.stderr


def test_a_start_imports_no_other_command() -> None:
    code = (
        "import sys; from llmcl.cli import main\n"
        "try: main()\n"
        "finally: print([name for name in sys.modules if name.startswith('llmcl.cli.')], file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, "devices", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment())
    assert done.returncode == 0 and "--format" in done.stdout, done.stderr
    imported = set(ast.literal_eval(done.stderr.splitlines()[-1]))
    from llmcl.cli import _COMMANDS

    assert imported & {f"llmcl.cli.{name}" for name in (*_COMMANDS, "downloads", "about")} == {"llmcl.cli.devices"}
