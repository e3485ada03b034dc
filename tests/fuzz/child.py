"""The process that runs cases: reads the folder of a case from standard input, writes what came of it as a JSON line.

A case that takes too long ends the process with the stack on standard error, one that takes too much memory gets a
MemoryError; what else ends the process, the parent sees. Models are loaded onto one device, which stays open.
"""

from __future__ import annotations

import faulthandler
import gc
import io
import json
import logging
import os
import re
import resource
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from echo_engine import Engine
from fuzz.cases import read_description
from fuzz.command_cases import MODEL_FILE
from fuzz.http_child import HttpServer
from fuzz.messages import complaint
from fuzz.planted_cases import planted_case
from made_tokenizers import TEXTS

import llmcl
from llmcl.checkpoint import open_checkpoint
from llmcl.errors import LlmclError
from llmcl.tokenizer import Tokenizer

HEADROOM_BYTES = 2 << 30  # of a case
WORKED, REFUSED, FAILED = "worked", "refused", "failed"
ANSWERED, LOADED = "answered", "loaded"
TEMPLATE_LIMIT_S = 0.4  # in place of that of llmcl, since many templates here run as long as they may
DOCUMENTED_CODES = {0, *range(2, 10)}
_MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]


class Unreached(BaseException):
    """A model went as far as it is to go; not an Exception, which the command line would report."""


class Failure(Exception):
    """What a case found wrong by itself."""

    def __init__(self, what: str, where: str = ""):
        super().__init__(what)
        self.where = where


def limit_memory(headroom_bytes: int | None) -> None:
    """Lets the process map so many more bytes than it has now; None: as many as it likes."""
    limit = most = resource.getrlimit(resource.RLIMIT_AS)[1]
    if headroom_bytes is not None:
        limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + headroom_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, most))


class Models:
    """Loads models onto one device and lets them answer.

    Kernels are compiled for shapes and types, so a model unlike the first is loaded as far as its weights, unless
    compiles."""

    def __init__(self, *, compiles: bool):
        self.compiles = compiles
        self.device: Any = None
        self.first: Any = None

    def run(self, path: Path) -> str:
        """How far the model came: answered or loaded."""
        try:
            llm = self.load(str(path))
        except Unreached:
            with open_checkpoint(str(path)) as checkpoint:
                run_tokenizer(Tokenizer.from_checkpoint(checkpoint))
            return LOADED
        run_tokenizer(llm.tokenizer)
        llm.generate("Hi", max_tokens=2, raw=True)
        return ANSWERED

    def load(self, path: str, **settings: Any) -> Any:
        """`llmcl.load`. Raises Unreached before the weights of a model that needs other kernels."""
        from llmcl.engine import loading
        from llmcl.runtime.device import Device
        from llmcl.runtime.platforms import find_devices
        from llmcl.runtime.selection import select_device

        if self.device is None:
            limit_memory(None)  # of the first case: a driver maps what it likes, and kernels are compiled
            has_cpu = any(entry.kind == "cpu" and entry.usable for entry in find_devices())
            self.device = Device.open("cpu" if has_cpu else None)
        select_device(settings.get("device"))
        with open_checkpoint(path) as checkpoint:
            kernels = replace(
                checkpoint.config,
                rope_theta=1.0,
                rope_scaling=None,
                bos_token_id=None,
                eos_token_ids=(),
                max_position=1,
            )
            what = kernels, {tensor.format for tensor in checkpoint.tensors.values()}
        self.first = self.first or what
        usual = all(settings.get(name) in (None, "auto", "float32") for name in _CHOOSE_KERNELS)
        with ExitStack() as limits:
            if not self.compiles and (what != self.first or not usual):
                limits.enter_context(mock.patch.object(loading, "load_weights", _raise_unreached))
            return loading.load(path, **settings | {"device": self.device})


_CHOOSE_KERNELS = (
    "dtype",
    "quantize",
    "activation_dtype",
    "kv_dtype",
    "kv_page_tokens",
    "kernel_options",
    "prompt_lookup",
    "draft_model",
)


def _raise_unreached(*_: Any) -> None:
    raise Unreached


def run_tokenizer(tokenizer: Any) -> None:
    """Texts there and back, every token on its own, and a conversation."""
    for text in TEXTS:
        tokenizer.decode(tokenizer.encode(text))
    one_by_one = tokenizer.detokenizer()
    for token in [*range(min(tokenizer.n_vocab, 600)), 2**31]:
        one_by_one.push(token)
    one_by_one.flush()
    if tokenizer.has_chat_template:
        tokenizer.encode_chat(_MESSAGES)


def tokenizer_case(folder: Path, described: Any) -> None:
    config = SimpleNamespace(vocab_size=described["arguments"]["vocab_size"], bos_token_id=1, eos_token_ids=(0,))
    source: Any = SimpleNamespace(path=folder, config=config, gguf_metadata=None)
    run_tokenizer(Tokenizer.from_checkpoint(source))


def convert_case(folder: Path, described: Any) -> None:
    """What a conversion writes can be read."""
    from llmcl.convert import convert

    given = described["arguments"]
    with open_checkpoint(str(folder / given["source"])) as checkpoint:
        run_tokenizer(Tokenizer.from_checkpoint(checkpoint))
    with tempfile.TemporaryDirectory() as place:
        written = convert(str(folder / given["source"]), Path(place) / given["target"], **given["options"])
        left = [path.name for path in Path(place).iterdir() if path != written]
        if left:
            raise Failure(f"left {left} beside the result")
        try:
            with open_checkpoint(str(written)) as checkpoint:
                run_tokenizer(Tokenizer.from_checkpoint(checkpoint))
        except LlmclError as error:
            raise Failure(f"what was written is refused: {error}") from error


class Templates:
    def __init__(self) -> None:
        self.tokenizer: Any = None

    def run(self, folder: Path, described: Any) -> None:
        if self.tokenizer is None:
            from ascii_tokenizer import ascii_tokenizer

            from llmcl.tokenizer import template_process

            template_process.TIME_LIMIT_S = TEMPLATE_LIMIT_S

            special = {"bos_token": "<s>", "eos_token": "</s>"}
            self.tokenizer = Tokenizer(ascii_tokenizer(), vocab_size=99, special_tokens=special)
        source = (folder / "template.jinja").read_bytes().decode("utf-8", "surrogatepass")
        self.tokenizer.use_chat_template(source)
        self.tokenizer.render_chat(_MESSAGES)


# ---- the command line -----------------------------------------------------------------------------------


def command_case(folder: Path, described: Any, models: Models) -> None:
    """Runs a command in this process, in a folder and a home of its own; other models than MODEL_FILE are echoes."""
    given = described["arguments"]
    tracebacks: list[str] = []
    with tempfile.TemporaryDirectory() as outer:
        home, place = Path(outer) / "home", Path(outer) / "place"
        home.mkdir()
        place.mkdir()
        for file in folder.iterdir():
            (place / file.name).write_bytes(file.read_bytes())
        code, out, errors = _command(given, home, place, folder.parent / "cache", tracebacks, models)
        named = [*given["arguments"], *given["variables"].values()]
        strays = [path for path in home.rglob("*") if path.parts[len(home.parts)] not in (".cache", "cache", "x")]
        strays += [p for p in place.iterdir() if not (folder / p.name).exists() and not _is_named(p.name, named)]
        strays += [path for path in Path(outer).iterdir() if path not in (home, place)]
    where = next((line for line in reversed(tracebacks) if line), "")
    if code not in DOCUMENTED_CODES and "cannot be written" not in errors:
        raise Failure(f"exit code {code}: {errors[-300:]}\n{''.join(tracebacks)}", _last_location(where))
    if "Traceback" in errors:
        raise Failure(f"a traceback: {errors[-2000:]}")
    if strays:
        raise Failure(f"left files that nobody named: {[str(path) for path in strays[:5]]}")
    lines = errors.replace("\r", "").splitlines()
    for line in lines:
        if not line.isprintable():
            raise Failure(f"standard error holds a control character: {line[:300]!r}", "output")
    if code == 0:
        return
    for line in lines:
        if line.startswith("error: "):
            message = line.removeprefix("error: ")
            if re.fullmatch(r"See llmcl.* --help\.", lines[-1]):  # the second line of a usage error
                message += "; see --help, and give another"
            raise Refusal(_without(named, message), code, _last_location(where))
    if lines or out:  # llmcl without a command shows its help
        raise Failure(f"exit code {code} without an error: {errors[-300:]!r}")
    raise Failure(f"exit code {code} and nothing said")


class Refusal(LlmclError):
    """A refusal of the command line, with its exit code."""

    def __init__(self, message: str, code: int, where: str):
        super().__init__(message)
        self.code, self.where = code, where


def _without(named: list[str], message: str) -> str:
    """The message without what the user gave: however long that was, it is known to the user."""
    parts = {part for value in named for part in (value, *value.split(","))}
    for part in sorted(parts, key=len, reverse=True):
        if len(part) > 3:
            message = message.replace(repr(part), "...").replace(part, "...")
    return message


def _is_named(file: str, named: list[str]) -> bool:
    return any(file in value for value in named) or file in ("cl_profiling.csv", "cl_trace.json")


def _command(
    given: Any, home: Path, place: Path, cache: Path, tracebacks: list[str], models: Models
) -> tuple[int, str, str]:
    from llmcl import cli
    from llmcl.cli import command
    from llmcl.engine import warming
    from llmcl.tools import benchmark, doctor, throughput
    from llmcl.tools import profile as profiling
    from llmcl.tools import tune as tuning

    def load(model: str, **settings: Any) -> Any:
        if model != MODEL_FILE or not isinstance(settings.get("device"), str | None):
            return Engine()
        return models.load(model, **settings)

    def reached(*_: Any, **__: Any) -> None:
        raise SystemExit(0)

    work: list[tuple[Any, str]] = [(warming, "warm"), (benchmark, "run"), (throughput, "run"), (doctor, "diagnose")]
    work += [(profiling, "profile"), (tuning, "tune_prefill"), (tuning, "tune_decode")]

    def remember() -> None:
        tracebacks.append(traceback.format_exc())

    variables = {name: value for name, value in os.environ.items() if not name.startswith("LLMCL_")}
    variables |= {"HOME": str(home), "LLMCL_CACHE_DIR": str(cache), "XDG_CACHE_HOME": str(home / ".cache")}
    variables |= {"LLMCL_MAX_TOKENS": "3"} | given["variables"] | {"HF_HUB_OFFLINE": "1", "COLUMNS": "100"}
    stdin = io.TextIOWrapper(io.BytesIO(given["stdin"].encode()))
    before, level = os.getcwd(), logging.getLogger("llmcl").level
    with (
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as errors,
        mock.patch.object(llmcl, "load", load),
        mock.patch.object(llmcl, "load_random", load),
        mock.patch.object(os, "sched_setaffinity", lambda *_: None),  # -t would hold for the cases that follow
        mock.patch.object(command, "_show_traceback_if_wanted", remember),
        mock.patch.object(sys, "argv", ["llmcl", *given["arguments"]]),
        mock.patch.object(sys, "stdin", stdin),
        mock.patch.object(sys, "stdout", io.TextIOWrapper(out, "utf-8", errors="strict", write_through=True)),
        mock.patch.object(sys, "stderr", io.TextIOWrapper(errors, "utf-8", errors="strict", write_through=True)),
        mock.patch.object(warnings, "formatwarning", warnings.formatwarning),
        mock.patch.dict(os.environ, variables, clear=True),
        warnings.catch_warnings(),
        ExitStack() as patches,
    ):
        for module, name in work:
            patches.enter_context(mock.patch.object(module, name, reached))
        os.chdir(place)
        try:
            cli.main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        except Unreached:
            code = 0
        finally:
            os.chdir(before)
            logging.getLogger("llmcl").setLevel(level)
            gc.set_threshold(700, 10, 10)
        texts = []
        for file in (out, errors):
            file.seek(0)
            texts.append(file.read().decode("utf-8", "replace"))
        return code, texts[0], texts[1]


def _last_location(text: str) -> str:
    """file:line of the last frame of llmcl in a traceback."""
    found = [line.split('"') for line in text.splitlines() if line.startswith("  File") and "/llmcl/" in line]
    return f"{found[-1][1].rpartition('/llmcl/')[2]}{found[-1][2].partition(', in ')[0]}" if found else ""


# ---- what must not happen, for the tests of the fuzzer itself --------------------------------------------


def misbehave(folder: Path, described: Any) -> None:
    how = described["arguments"]["how"]
    if how == "hang":
        while True:
            pass
    if how == "crash":
        import ctypes

        ctypes.string_at(0)
    if how == "memory":
        bytearray(HEADROOM_BYTES + (1 << 20))
    if how == "exit":
        os._exit(0)
    if how == "panic":
        raise type("PanicException", (BaseException,), {})("a panic of another language")
    raise LlmclError({"escape": "\x1b[2J is wrong; give another", "dead end": "this is wrong"}.get(how, how))


# ---- one case after another -----------------------------------------------------------------------------


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def outcome_of(run: Callable[[], str | None]) -> dict[str, str]:
    """What came of a case: outcome, error, message, where, and the traceback of a failure."""
    log = _Warnings()
    logging.getLogger("llmcl").handlers = [log]
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always", UserWarning)
            reached = run()
    except Failure as failure:
        return _outcome(FAILED, failure, failure.where or str(failure).partition(":")[0])
    except LlmclError as error:
        first: BaseException = error
        while isinstance(first.__cause__, LlmclError):
            first = first.__cause__
        where = getattr(error, "where", "") or _last_location("".join(traceback.format_tb(first.__traceback__)))
        wrong = complaint(str(error))
        if wrong is not None:
            return _outcome(FAILED, error, f"{wrong.rstrip('0123456789')} ({where})", wrong)
        return _outcome(REFUSED, error, where)
    except BaseException as error:  # what is not our error is a failure, a panic of a library too
        text = "".join(traceback.format_exception(error))
        return _outcome(FAILED, error, _last_location(text), text[-3000:])
    for text in [*log.texts, *(str(warning.message) for warning in warned)]:
        if (wrong := complaint(text, needs_remedy=False)) is not None:
            return _outcome(FAILED, UserWarning(text), "a warning: " + wrong, wrong)
    return {"outcome": WORKED, "message": reached or ""}


def _outcome(outcome: str, error: BaseException, where: str, details: str = "") -> dict[str, str]:
    kind = type(error).__name__
    return {"outcome": outcome, "error": kind, "message": str(error)[:2000], "where": where, "details": details}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints is no answer
    models, templates, server = Models(compiles=sys.argv[1] == "compile"), Templates(), HttpServer()
    subjects: dict[str, Callable[[Path, Any], str | None]] = {
        "gguf": lambda folder, _: models.run(folder / "model.gguf"),
        "safetensors": lambda folder, _: models.run(folder),
        "config": lambda folder, _: models.run(folder),
        "tokenizer": tokenizer_case,
        "template": templates.run,
        "command": lambda folder, described: command_case(folder, described, models),
        "convert": convert_case,
        "body": server.run,
        "http": server.run,
        "planted": planted_case,
        "misbehave": misbehave,
    }
    for line in sys.stdin:
        limit, _, name = line.rstrip("\n").partition(" ")
        folder = Path(name)
        os.ftruncate(2, os.lseek(2, 0, os.SEEK_SET))
        limit_memory(HEADROOM_BYTES)
        described = read_description(folder)
        faulthandler.dump_traceback_later(float(limit), exit=True)
        outcome = outcome_of(lambda f=folder, d=described: subjects[d["subject"]](f, d))
        faulthandler.cancel_dump_traceback_later()
        answers.write(json.dumps(outcome) + "\n")


if __name__ == "__main__":
    faulthandler.enable()
    main()
