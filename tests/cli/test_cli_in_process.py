"""The command line in detail, on an engine that answers at once."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from echo_engine import Engine, stats

import llmcl
from llmcl import __main__ as program
from llmcl.cli import command
from llmcl.engine.generation import Piece
from llmcl.engine.stats import summarize
from llmcl.errors import UsageError
from llmcl.runtime.cache_files import cache_dir
from llmcl.sampling_options import PARAMETERS


def test_options_reach_the_engine(engine: Engine, invoke: Callable[..., int]) -> None:
    options = "--temp 0.5 --top-k 3 --top-p 0.9 --min-p 0.1 --repeat-penalty 1.1 --seed 4"
    options += " --presence-penalty 0.5 --frequency-penalty -0.25 --repeat-last-n 16"
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
    assert engine.request == {name: each.default for name, each in PARAMETERS.items()} | {
        "prompt": "x",
        "max_tokens": 7,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.1,
        "repeat_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.25,
        "repeat_window": 16,
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


@pytest.mark.parametrize(("given", "strings"), [(["none"], ()), (["a", "none"], ("a", "none"))])
def test_where_dry_ends_repetitions(
    given: list[str], strings: tuple[str, ...], engine: Engine, invoke: Callable[..., int]
) -> None:
    options = [word for text in given for word in ("--dry-sequence-breaker", text)]
    assert (
        invoke("generate", "-m", "m", "-p", "x", "--dry-multiplier", "0.8", "--dry-penalty-last-n", "-1", *options) == 0
    )
    assert engine.request["dry_multiplier"] == 0.8 and engine.request["dry_penalty_last_n"] == -1
    assert engine.request["dry_sequence_breakers"] == strings


@pytest.mark.parametrize("command", [["generate", "-p", "x"], ["chat"]], ids=lambda command: command[0])
def test_who_drafts(
    command: list[str], engine: Engine, invoke: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
    assert invoke(*command, "-m", "m") == 0
    assert not {"prompt_lookup", "draft_model"} & engine.loaded.keys()
    assert invoke(*command, "-m", "m", "--prompt-lookup") == 0
    assert engine.loaded["prompt_lookup"] is True and engine.loaded["draft_model"] is None
    monkeypatch.setenv("LLMCL_DRAFT_MODEL", "small")
    assert invoke(*command, "-m", "m") == 0
    assert engine.loaded["prompt_lookup"] is False and engine.loaded["draft_model"] == "small"


@pytest.mark.parametrize(
    ("content", "expected"), [(b"{{ x }}\n", None), (b"\xff", "byte 0 is not UTF-8"), (None, "No such file")]
)
def test_a_chat_template_from_a_file(
    engine: Engine,
    invoke: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: bytes | None,
    expected: str | None,
) -> None:
    file = tmp_path / "template.jinja"
    if content is not None:
        file.write_bytes(content)
    code = invoke("generate", "-m", "m", "-p", "x", "--chat-template-file", str(file))
    if expected is None:
        assert code == 0 and engine.loaded["chat_template"] == "{{ x }}\n"
    else:
        error = capsys.readouterr().err
        assert code == 2 and f"--chat-template-file {file}" in error and expected in error


@pytest.mark.parametrize(
    ("variables", "options", "raw", "system_prompt"),
    [
        ({"LLMCL_SYSTEM_PROMPT": "s"}, ["--raw"], True, None),
        ({"LLMCL_RAW": "1"}, ["--system-prompt", "s"], False, "s"),
        ({"LLMCL_RAW": "1"}, [], True, None),
    ],
)
def test_raw_and_what_the_template_needs_go_by_where_they_are_given(
    variables: dict[str, str],
    options: list[str],
    raw: bool,
    system_prompt: str | None,
    engine: Engine,
    invoke: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert invoke("generate", "-m", "m", "-p", "x", *options) == 0
    assert engine.request.items() >= {"raw": raw, "system_prompt": system_prompt}.items()


def test_defaults_are_greedy(engine: Engine, invoke: Callable[..., int]) -> None:
    assert invoke("generate", "-m", "m", "-p", "x") == 0
    neutral = {
        "max_tokens": 256,
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repeat_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
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
        (["--presence-penalty", "101"], "--presence-penalty", "101", "from -100 to 100"),
        (["--frequency-penalty", "much"], "--frequency-penalty", "much", "from -100 to 100"),
        (["--seed", "-1"], "--seed", "-1", "0 to 2^64 - 1"),
        (["-n", "-1"], "--max-tokens", "-1", "1 or more"),
        (["-n", "2.5"], "--max-tokens", "2.5", "1 or more"),
        (["-c", "0"], "--ctx-size", "0", "1 or more"),
        (["--dtype", "int3"], "--dtype", "int3", "auto, float32, bfloat16, float16"),
        (["--dtype", "q4_0"], "--dtype", "q4_0", "--quantize makes"),
        (["--kv-dtype", "int3"], "--kv-dtype", "int3", "auto, float32, float16, bfloat16, q8_0"),
        (["--format", "xml"], "--format", "xml", "text, json"),
        (["--stop", ""], "--stop", "''", "at least one character"),
        (["--raw", "--system-prompt", "s"], "--raw", "--system-prompt", "one of the two"),
        (["-n", "9" * 400], "--max-tokens", "'99", "expected a whole number, 1 or more"),
        (["-n", "9" * 5000], "--max-tokens", "99... given", "expected a whole number"),
        (["-c", str(1 << 63)], "--ctx-size", "9223372036854775808", "expected a whole number of tokens"),
        (["--seed", "9" * 400], "--seed", "99... given", "2^64 - 1"),
        (["--temp", "9" * 400], "--temp", "99... given", "expected a number"),
        (["--kv-page-size", "6" * 400], "--kv-page-size", "66... given", "a multiple of 64"),
        (["--dtype", "\x1b[2J" + "x" * 999], "--dtype", r"'\x1b[2Jxxx", "expected one of"),
        (["--raw", "--chat-template-file", "t.jinja"], "--raw", "--chat-template-file", "one of the two"),
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


@pytest.mark.parametrize(
    "options",
    [
        *[("-f", "a\nb"), ("-f", "a\nb", "-p", "x"), ("--input", "a\nb", "--output", "r")],
        *[("-p", "x", name, "a\nb") for name in ("--json-schema", "--grammar", "--chat-template-file")],
        ("--input", "requests", "--output", "no\nfolder/r"),
    ],
    ids=lambda options: options[-2],
)
def test_a_file_name_is_shown_on_one_line(
    options: tuple[str, ...],
    engine: Engine,
    invoke: Callable[..., int],
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that what a stranger called his file does not end a message in the middle."""
    monkeypatch.chdir(tmp_path)
    Path("requests").write_text('{"prompt": "x"}')
    assert invoke("generate", "-m", "m", *options) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: ") and ("a\\nb" in line or "no\\nfolder" in line), line


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="needs the device /dev/zero")
def test_a_text_without_an_end_is_refused(
    engine: Engine, invoke: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmcl.cli.text_files.MAX_TEXT_BYTES", 1 << 20)
    message = "/dev/zero: has more than 1048576 bytes; expected a shorter text"
    for options in (["-f", "/dev/zero"], ["-p", "x", "--chat-template-file", "/dev/zero"]):
        assert invoke("generate", "-m", "m", *options) == 2
        assert message in capsys.readouterr().err
    with open("/dev/zero", "rb") as zeros:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(zeros))
        assert invoke("generate", "-m", "m") == 2
    assert "standard input: has more than" in capsys.readouterr().err


def test_a_pipe_is_a_prompt_as_good_as_a_file(engine: Engine, invoke: Callable[..., int], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # as `-f <(command)` gives one
    writer = threading.Thread(target=(tmp_path / "pipe").write_text, args=("from the pipe",))
    writer.start()
    assert invoke("generate", "-m", "m", "-f", str(tmp_path / "pipe")) == 0
    writer.join()
    assert engine.request["prompt"] == "from the pipe"


def test_a_file_called_minus_is_standard_input(
    engine: Engine, invoke: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"one two\n")))
    assert invoke("generate", "-m", "m", "-f", "-") == 0
    assert engine.request["prompt"] == "one two"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"no JSON\n")))
    assert invoke("generate", "-m", "m", "--input", "-", "--output", "r") == 2
    assert "error: --input - line 1 is no JSON" in capsys.readouterr().err


def test_results_are_not_written_to_standard_output(
    engine: Engine, invoke: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They would end in a file called so, as those of a conversion."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"prompt": "x"}\n')))
    assert invoke("generate", "-m", "m", "--input", "-", "--output", "-") == 2
    assert "no results are written to standard output" in capsys.readouterr().err and not engine.loaded


def test_a_conversion_to_standard_output_is_refused(
    invoke: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A folder of the name `-` was written."""
    monkeypatch.chdir(tmp_path)
    assert invoke("convert", "smollm2", "-") == 2 and not [*tmp_path.iterdir()]
    assert "no conversion is written to standard output; give the name of a file or a folder" in capsys.readouterr().err


def test_no_home_folder_is_said(
    invoke: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pwd = pytest.importorskip("pwd")
    for name in ("HOME", "LLMCL_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    assert cache_dir().is_absolute()  # a temporary one
    monkeypatch.setenv("LLMCL_CACHE_DIR", "~nobody-of-this-name/x")
    with pytest.raises(UsageError, match=r"LLMCL_CACHE_DIR is '~nobody-of-this-name/x', and no home folder"):
        cache_dir()
    assert invoke("convert", "smollm2", "~/x.gguf") == 2
    assert "the target is '~/x.gguf', and no home folder is known" in capsys.readouterr().err
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "~/.cache/huggingface/hub")
    assert invoke("convert", "org/name", str(tmp_path / "x.gguf"), "--offline") == 8
    assert "no home folder is known for its ~; set HF_HOME" in capsys.readouterr().err


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


def test_a_pipe_goes_before_the_variable(
    engine: Engine, invoke: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMCL_PROMPT", "from the variable")
    for piped, expected in ((b"from the pipe\n", "from the pipe"), (b"", "from the variable")):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(piped)))
        assert invoke("generate", "-m", "m") == 0
        assert engine.request["prompt"] == expected


def test_options_have_the_names_of_other_engines(
    engine: Engine, invoke: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    options = "--temperature 0.5 --n-predict 7 --repetition-penalty 1.1 -s 4 -ngl 99 --dtype BF16 --quantize Q4_0"
    assert invoke("generate", "-hf", "m", "-p", "x", *options.split()) == 0
    names = ("temperature", "max_tokens", "repeat_penalty", "seed")
    assert [engine.request[name] for name in names] == [0.5, 7, 1.1, 4]
    assert [engine.loaded[name] for name in ("model", "dtype", "quantize")] == ["m", "bfloat16", "q4_0"]
    assert capsys.readouterr().err.count("-ngl has no effect") == 1


def test_run_answers_a_prompt_or_chats(
    engine: Engine, invoke: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    assert invoke("run", "m", "two", "words", "-n", "7") == 0
    assert engine.request["prompt"] == "two words" and engine.request["max_tokens"] == 7
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"from the pipe\n")))
    assert invoke("run", "m", "Sum up:") == 0
    assert engine.request["prompt"] == "Sum up:\n\nfrom the pipe" and engine.request["temperature"] == 0.7
    chats: list[tuple[float, float, int]] = []

    def chat(temperature: float, top_p: float, max_tokens: int) -> None:
        chats.append((temperature, top_p, max_tokens))

    monkeypatch.setattr("llmcl.cli.run.chat", chat)
    assert invoke("run", "m", "--top-p", "0.9") == 0
    assert chats == [(0.7, 0.9, 1024)]  # what llmcl chat has


def test_no_prompt_at_a_terminal(
    engine: Engine,
    invoke: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    assert invoke("generate", "-m", "m") == 2
    assert "-p/--prompt" in capsys.readouterr().err
    assert invoke("perplexity", "-m", "m") == 2
    assert "no text: give -f/--file" in capsys.readouterr().err


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
    assert "stopped   after 3 tokens\n" in errors and "p50 20.00" in errors and "stalls    0 of 2 " in errors
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


def test_ctrl_c_while_the_program_is_imported_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "typer":
                raise KeyboardInterrupt

    for name in ("llmcl.cli", "typer"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(llmcl, "cli")
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    with pytest.raises(SystemExit) as end:
        program.main()
    assert end.value.code == 130


def test_messages_do_not_steer_the_terminal(
    engine: Engine, invoke: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    assert invoke("generate", "-m", "m", "-p", "x", "-f", "\x1b[2J\u202e") == 2
    assert r"--file \x1b[2J\u202e both" in capsys.readouterr().err
    monkeypatch.setattr(engine, "model_name", "m\n\x1b[2J")
    monkeypatch.setattr(engine, "before", lambda: logging.getLogger("llmcl.engine.llm").warning("is \x9b odd"))
    assert invoke("generate", "-m", "m", "-p", "x") == 0
    errors = capsys.readouterr().err
    assert r"model: m\n\x1b[2J," in errors and r"warning: is \x9b odd" in errors
    assert warnings.formatwarning(UserWarning("a\x1b\nb"), UserWarning, "", 1) == "warning: a\\x1b\nb\n"


def test_a_full_disk_is_no_defect_of_ours(
    engine: Engine, invoke: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(command, "_silence_stdout", lambda: None)
    monkeypatch.setattr(llmcl, "load", full)
    assert invoke("generate", "-m", "m", "-p", "x") == 1
    assert capsys.readouterr().err == "error: the output cannot be written (No space left on device)\n"


@pytest.mark.parametrize(
    ("error", "limit"),
    [
        (RuntimeError("can't start new thread"), "thread; raise the limit of its processes"),
        (OSError(errno.EMFILE, "Too many open files"), "open file; raise the limit of its files"),
        (MemoryError("std::bad_alloc"), "byte of memory; raise its limit"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "byte of memory; raise its limit"),
    ],
)
def test_a_limit_of_the_system_is_no_defect_of_ours(
    error: Exception,
    limit: str,
    engine: Engine,
    invoke: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(llmcl, "load", refused)
    assert invoke("generate", "-m", "m", "-p", "x") == 1
    assert capsys.readouterr().err.startswith(f"error: the system refuses this process another {limit} (`ulimit")


def test_a_closed_standard_error_does_not_reach_standard_output(
    engine: Engine, invoke: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    assert invoke("generate", "-m", "m", "-p", "one two") == 0
    sys.stderr.close()  # type: ignore[unreachable]  # what main put there
    assert capsys.readouterr().out == "one two \n"


@pytest.mark.parametrize("quiet", [False, True])
def test_warnings_are_sentences_and_quiet_leaves_them_out(
    quiet: bool, engine: Engine, invoke: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = io.StringIO()

    def load(model: str, **settings: Any) -> Engine:
        warnings.warn("a file is damaged", stacklevel=1)
        logging.getLogger("llmcl.engine.llm").warning("the context is long")
        return engine

    monkeypatch.setattr(llmcl, "load", load)
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    with warnings.catch_warnings():
        warnings.simplefilter("default", UserWarning)
        monkeypatch.setattr(warnings, "showwarning", lambda *given: shown.write(warnings.formatwarning(*given[:4])))
        assert invoke("generate", "-m", "m", "-p", "x", *(["-q"] if quiet else [])) == 0
    if quiet:
        assert shown.getvalue() == ""
    else:
        assert (
            "warning: a file is damaged\n" in shown.getvalue() and "warning: the context is long\n" in shown.getvalue()
        )


def test_a_table_for_a_reader_that_has_gone_ends_as_other_text_does() -> None:
    from llmcl.cli.tables import console

    read, write = os.pipe()
    os.close(read)
    out = console()
    with open(write, "w") as out.file, pytest.raises(BrokenPipeError):
        out.print("row\n" * 10_000)


def test_the_report_fits_a_narrow_terminal() -> None:
    tbt = summarize([20.0, 21.0, 690.0])
    figures = stats(tbt_ms=tbt, load_ms=4490.2, device_to_host_bytes_per_token=14.1)
    wide, narrow = figures.report().splitlines(), figures.report(width=60).splitlines()
    assert figures.report(width=120).splitlines() == wide
    assert max(map(len, narrow)) <= 60 < max(map(len, wide))
    assert [line[:10] for line in narrow] == [line[:10] for line in wide]
    assert "reading the prompt" in figures.report(width=60)


def test_an_answer_that_fills_the_context_says_so(
    engine: Engine, invoke: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def pieces(prompt: str, **request: Any) -> Iterator[Piece]:
        yield Piece("one", 1, None, None, None)
        yield Piece("two", 2, 20.0, "length", stats(generated_tokens=2))

    monkeypatch.setattr(engine, "stream", pieces)
    for n, is_cut in ((8, True), (2, False)):
        assert invoke("generate", "-m", "m", "-p", "x", "-n", str(n)) == 0
        error = capsys.readouterr().err
        assert ("the context is full" in error) == is_cut
        assert ("stopped at the limit of 2 tokens (raise it with -n)" in error) == (not is_cut)


def test_variables_of_other_commands_do_not_change_a_measurement(
    invoke: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    """LLMCL_CTX_SIZE is generate's room for an answer, perplexity's -c a window; LLMCL_DTYPE=auto is none to write."""
    for name, options in (("perplexity", ("CTX_SIZE", "FILE")), ("convert", ("DTYPE", "QUANTIZE", "FORCE"))):
        assert invoke(name, "--help") == 0
        text = capsys.readouterr().out
        assert not any(f"LLMCL_{option}" in text for option in options)
