"""What `llmcl` says about itself: its commands, the help of each, and its version."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from llmcl.checkpoint.quantize import QUANTIZE_FORMATS
from llmcl.cli import _COMMANDS, _Commands
from llmcl.cli import options as opt
from llmcl.kernels.common import dtype


def test_without_a_command_it_lists_them_whole(invoke: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke() == 2
    shown = capsys.readouterr()
    text = shown.out + shown.err
    assert "Usage: llmcl" in text and "convert " in text and "..." not in text.partition("Commands:")[2]


def test_help_fits_a_terminal(invoke: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    for name in _COMMANDS:
        assert invoke(name, "--help") == 0
        assert max(map(len, capsys.readouterr().out.splitlines())) <= 80, name


def test_arguments_are_shown_by_what_they_are(invoke: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke("convert", "--help") == 0
    text = capsys.readouterr().out
    assert "Usage: llmcl convert [OPTIONS] SRC DST.gguf|DST_FOLDER\n" in text and "<" not in text


def test_help_is_complete(invoke: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke("generate", "--help") == 0
    text = capsys.readouterr().out
    for heading in ("Model:", "Prompt:", "Sampling:", "Device:", "Output:", "Metrics"):
        assert heading in text
    for word in ("TTFT", "TBT", "TPOT", "--repeat-penalty", "greedy", "standard error"):
        assert word in text


def test_help_says_what_a_command_does_without_docstrings() -> None:
    for arguments in (["--help"], ["generate", "--help"]):
        commands = [[sys.executable, *level, "-m", "llmcl", *arguments] for level in ((), ("-OO",))]
        said = [subprocess.check_output(command, text=True) for command in commands]
        lines = [[line.strip() for line in text.splitlines()] for text in said]
        assert lines[1][:3] == lines[0][:3] and "Stream a model's answer, or answer a file of requests." in said[1]


def test_version(invoke: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke("--version") == 0
    name, version = capsys.readouterr().out.split()
    assert name == "llmcl" and version[0].isdigit()


def test_an_unknown_command_is_answered_by_the_nearest(
    invoke: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert _Commands().get("generat") is None
    for typed, near in (("generat", "generate"), ("lst", "list"), ("bnch", "bench")):
        for arguments in ([typed], ["help", typed]):
            assert invoke(*arguments) == 2
            lines = capsys.readouterr().err.splitlines()
            assert lines[0].startswith(f"error: No such command '{typed}'. Did you mean '{near}'") and len(lines) == 2
    assert invoke("xyzzy") == 2
    assert capsys.readouterr().err.startswith("error: No such command 'xyzzy'.\n")


def test_a_usage_error_is_two_lines(invoke: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["generate"], ["generate", "--nothing"], ["run"], ["generate", "-m", "m", "--temp", "warm"]):
        assert invoke(*arguments) == 2
        first, second = capsys.readouterr().err.splitlines()
        assert first.startswith("error: ") and second == f"See llmcl {arguments[0]} --help."


def test_help_and_version_are_commands_too(invoke: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    for one, other in ((["help"], ["--help"]), (["help", "bench"], ["bench", "--help"]), (["version"], ["--version"])):
        assert [invoke(*one), invoke(*other)] == [0, 0]
        lines = capsys.readouterr().out.splitlines()
        assert lines[: len(lines) // 2] == lines[len(lines) // 2 :]


def test_types_have_the_names_that_other_engines_give_them() -> None:
    for typed, name in {"bf16": "bfloat16", "F16": "float16", "half": "float16", "Float32": "float32"}.items():
        assert opt.weight_dtype(typed) == name
    assert opt.weight_dtype("Q4_0") == "q4_0" and opt.one_of(*opt.KV_DTYPES)("BF16") == "bfloat16"


def test_the_names_in_help_are_those_that_work() -> None:
    """Help has its own, since it imports nothing that computes."""
    assert tuple(QUANTIZE_FORMATS) == opt.QUANTIZE_FORMATS
    assert opt.ACTIVATION_DTYPES == dtype.ACTIVATION_DTYPES
    assert {*opt.WEIGHT_DTYPES} == {"auto", *dtype.KERNEL_NAMES} and {*opt.KV_DTYPES} == {"auto", *dtype.KV_DTYPES}


def test_random_weights_are_held_in_any_format(invoke: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    for name in "float16", "q5_k", "mxfp4", "q4_k_m":
        assert opt.weight_dtype(name) == name
    assert invoke("profile", "--random", "smollm2-135m", "--dtype", "Q4_9") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "'Q4_9' given, expected one of auto, float32, bfloat16, float16, q8_0, q4_0," in said and "q5_k_m" in said
