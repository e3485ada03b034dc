"""Cases whose subject is the command line: every command's own options, with values that do and do not make sense."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

from fuzz.cases import Case
from fuzz.mutations import TEXTS, Draw, shown
from fuzz.seeds import Folders
from hypothesis import strategies as st

from llmcl.cli import _COMMANDS, _Commands

# A server that starts does not end by itself; tests/serve has what it refuses. Nothing is downloaded or deleted.
DRAWN = sorted({*_COMMANDS} - {"serve", "pull", "rm"})
# What is there for a command to read, and where it may write: relative names in an empty folder.
MODEL_FILE, TEXT_FILE, LATIN_FILE = "tiny.gguf", "text.txt", "latin.txt"
_PATHS = [MODEL_FILE, TEXT_FILE, LATIN_FILE, "none.txt", "out.gguf", "out", "a/b/c", ".", "", "/dev/null", "/dev/zero"]
_PATHS += ["/proc/self/nothing/x", "~/x", "~nobody0/x", "x" * 300, "\udcff\udcfe", "new\nline", "-", "out.safetensors"]
_SENSIBLE: dict[str, list[str]] = {
    "model": [MODEL_FILE, "m", "smollm2", "org/name", "org/name/file.gguf", "."],
    "draft_model": [MODEL_FILE, "none.gguf", TEXT_FILE, "."],
    "mmproj": [MODEL_FILE, "none.gguf", TEXT_FILE, "."],
    "image": [TEXT_FILE, "none.png", "."],
    "source": [MODEL_FILE, "none.gguf", ".", TEXT_FILE],
    "target": ["out.gguf", "out", MODEL_FILE, "a/b.gguf"],
    "random": ["llama-3.2-1b", "tiny", "config.json", "."],
    "reference": [MODEL_FILE],
    "dtype": ["auto", "float32", "q4_0"],
    "reference_dtype": ["float16"],
    "quantize": ["q8_0", "q4_k"],
    "activation_dtype": ["float32"],
    "kv_dtype": ["float16", "q8_0"],
    "format": ["text", "json"],
    "kernel": ["prefill", "decode"],
    "combo": ["A", "H"],
    "device": ["cpu", "gpu", "0", "7", "-1"],
    "prompt": ["hello there", "-"],
    "file": [TEXT_FILE, TEXT_FILE, "none.txt"],
    "system_prompt": ["s"],
    "chat_template_file": [TEXT_FILE],
    "stop": ["a", ""],
    "markdown": ["out.md"],
    "csv_file": ["out.csv"],
    "json_file": ["out.json"],
    "output_dir": ["out", "."],
    "variant": ["portable", "cpu"],
}
_NUMBERS = ["0", "1", "7", "64", "0.5", "-0", "-1", "1e3", "1_000", " 5 ", "٣", "0x10", "inf", "-inf", "nan", "1e400"]
_NUMBERS += ["9" * 400, "-" + "9" * 400, "9" * 5000, "0." + "1" * 5000, "512,2048", ",", "1,,2", "2147483648", "1e-400"]
_NAMES = ["auto", "AUTO", "float32 ", "q2_k", "json\n", "all", "gpu,cpu"]


def _is_possible(text: str) -> bool:
    """Whether a shell can hand it over."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


_WORDS = [text for text in TEXTS if _is_possible(text) and not text.startswith(("/", ".."))]
_words = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0/"), max_size=12) | st.binary(
    max_size=6
).map(lambda data: data.replace(b"\0", b"").replace(b"/", b"").decode("utf-8", "surrogateescape"))
_any_value = st.one_of(
    st.sampled_from(_NUMBERS),
    st.sampled_from(_NUMBERS),
    st.sampled_from(_PATHS),
    st.sampled_from(_NAMES + _WORDS),
    _words,
)


@cache
def parameters_of(command: str) -> list[Any]:
    return [parameter for parameter in _Commands()[command].params if parameter.name != "help"]


@st.composite
def command_cases(draw: Draw, folders: Folders) -> Case:
    command = draw(st.sampled_from(DRAWN) | st.sampled_from(["generate", "generate", "tune"]))
    parameters = parameters_of(command)
    arguments: list[str] = []
    variables: dict[str, str] = {}
    wanted = draw(st.lists(st.sampled_from(parameters), max_size=3)) if parameters else []
    names = {parameter.name for parameter in wanted}
    for parameter in parameters:
        instead = {"model": "random", "prompt": "file"}.get(parameter.name)
        needed = parameter.name in ("model", "source", "target", "prompt") and not names & {parameter.name, instead}
        if needed and draw(st.integers(0, 9)):
            wanted.append(parameter)
    for parameter in draw(st.permutations(wanted)):
        value = _value(draw, parameter.name)
        if parameter.param_type_name == "argument":
            arguments.append(value)
        elif parameter.envvar and draw(st.integers(0, 7)) == 0:
            variables[str(parameter.envvar)] = value
        else:
            arguments.append(draw(st.sampled_from([*parameter.opts, *parameter.secondary_opts])))
            if not parameter.is_flag:
                arguments.append(value)
    if draw(st.integers(0, 7)) == 0:
        at = draw(st.integers(0, len(arguments)))
        odd = draw(st.sampled_from(["--", "-", "--nothing", "-x", "--help", "--temp=", "-p", "-qv", "@file"]) | _words)
        arguments.insert(at, odd)
    stdin = draw(st.sampled_from(["hello\nworld\n/stats\n/reset\n/exit\n", "", "\\\n\\", "/nothing\n\x1b[2J\n"]))
    files: dict[str, Any] = {
        MODEL_FILE: folders.files["model.gguf"],
        TEXT_FILE: b"A text of some words. " * 3,
        LATIN_FILE: "caf\u00e9".encode("latin-1"),
    }
    notes = [f"llmcl {command} {shown(arguments)} {shown(variables) if variables else ''}"]
    return Case("command", notes, files, {"arguments": [command, *arguments], "variables": variables, "stdin": stdin})


def _value(draw: Draw, name: str) -> str:
    sensible = _SENSIBLE.get(name)
    if sensible is None:  # mostly numbers
        what = draw(st.integers(0, 4))
        return draw(st.sampled_from(_NUMBERS[1:5] if what < 2 else _NUMBERS) if what else _any_value)
    return draw(st.sampled_from(sensible) if draw(st.integers(0, 3)) else _any_value)
