"""What the comparisons with llama.cpp share: a process for each engine, and files made by llama.cpp's quantiser."""

from __future__ import annotations

import json
import os
import select
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from llmcl.cli import options as opt
from llmcl.convert import with_progress
from llmcl.convert.gguf import GgufPlan, gguf_name, model_metadata, typed
from llmcl.convert.tensors import OutTensor
from llmcl.errors import LlmclError, UsageError
from llmcl.runtime.child_process import import_folders
from llmcl.tools.markdown import table

CHILD = Path(__file__).with_name("compare_child.py")
SHAPE_1B = "llama-3.2-1b"
MICRO_BATCHES = 2048, 512  # of llama.cpp on a GPU
TOP_1_TARGET = 0.98  # share of positions with the same likeliest token


def environment() -> dict[str, str]:
    """This process's variables for a script that imports llmcl and whatever else this process can import."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(import_folders())}


class ChildError(LlmclError):
    """An engine's process failed; the message says at what."""


class Child:
    """An engine's process. A request that takes longer than `limit_s` ends it."""

    def __init__(
        self, engine: str, python: str, processors: set[int], script: Path = CHILD, limit_s: float | None = None
    ):
        self.engine = engine
        self._limit_s = limit_s
        self._said = None if engine == "llmcl" else tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [python, str(script), engine],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            env=environment() if engine == "llmcl" else {**os.environ, "PYTHONPATH": ""},
        )
        os.sched_setaffinity(self._process.pid, processors)

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        """Sends one request and waits for its answer; raises ChildError."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            print(json.dumps({"op": op, **arguments}), file=self._process.stdin, flush=True)
            if not select.select([self._process.stdout], [], [], self._limit_s)[0]:
                self.kill()
                raise ChildError(f"{self.engine} gave no answer to {op!r} within {self._limit_s:.0f} s")
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            status = self._process.wait()
            raise ChildError(f"the process of {self.engine} ended at {op!r} (status {status}). {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ChildError(f"{self.engine} failed at {op!r}: {answer['error']}")
        return answer

    def seconds(self, op: str, **arguments: Any) -> float:
        return float(self.ask(op, **arguments)["seconds"])

    def end(self) -> int:
        """Ends the process; its largest resident size in bytes."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        _, status, usage = os.wait4(self._process.pid, 0)
        self._process.returncode = os.waitstatus_to_exitcode(status)
        return usage.ru_maxrss * 1024

    def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
            self._process.wait()

    def _last_words(self) -> str:
        if self._said is None:
            return ""
        self._said.seek(max(0, self._said.seek(0, os.SEEK_END) - 1500))
        return self._said.read().decode(errors="replace").strip()


LlamaPython = Annotated[
    str, opt.measurement("--llama-python", metavar="PATH", help="A Python with llama-cpp-python; left out: this one.")
]
Formats = Annotated[
    str,
    opt.measurement("--formats", metavar="NAME,...", help="llama.cpp's names; the files are made by its quantiser."),
]
Format = Annotated[
    str, opt.choice(opt.OUTPUT_PANEL, "--format", ("md", "json"), env=False, help="json prints one object at the end.")
]
Rounds = Annotated[int, opt.measurement("-r", "--rounds", metavar="N", min=1, help="Turns, after a warm-up.")]
Threads = Annotated[
    int | None, opt.measurement("-t", "--threads", metavar="N", min=1, help="Processors for each; left out: all.")
]
Work = Annotated[
    Path | None,
    opt.measurement("--work", metavar="FOLDER", help="Where the files are kept; left out: a temporary one."),
]


def processors_of(threads: int | None) -> set[int]:
    """The processors that each engine may use: `threads` of them, all if None. Raises UsageError for too many."""
    processors = sorted(os.sched_getaffinity(0))
    if threads is not None and threads > len(processors):
        raise UsageError(f"-t/--threads {threads}: this process may use {len(processors)} processors")
    return set(processors[:threads])


@dataclass
class Engines:
    """How both engines are started. options: of `llmcl.load`. limit_s: of an answer."""

    llama_python: str
    processors: set[int]
    device: str | None
    options: dict[str, Any]
    openvino_python: str | None = None
    limit_s: float | None = None

    @contextmanager
    def child(self, engine: str) -> Iterator[Child]:
        pythons = {"llama.cpp": self.llama_python, "openvino": self.openvino_python}
        child = Child(engine, pythons.get(engine) or sys.executable, self.processors, limit_s=self.limit_s)
        try:
            yield child
        finally:
            child.kill()

    def load(self, child: Child, path: Path, context: int, **options: Any) -> float:
        """Seconds until the model has computed a token. options: of this engine, in place of those of all."""
        extra = {"device": self.device} if child.engine == "llmcl" else {}
        if child.engine == "llmcl":
            options = self.options | options
        return child.seconds(
            "load", path=str(path), context=context, threads=len(self.processors), options=options, **extra
        )


@dataclass
class Pairs:
    """The times of both engines, turn by turn, in seconds (or bytes)."""

    peer: list[float] = field(default_factory=list)
    ours: list[float] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        return [peer / ours for peer, ours in zip(self.peer, self.ours, strict=True)]

    def to_dict(self, per: int = 0) -> dict[str, Any]:
        """Medians, and with `per` tokens of a measurement also tokens/s."""
        ratios = self.ratios
        values: dict[str, Any] = {
            "ratio": statistics.median(ratios),
            "ratio_min": min(ratios),
            "ratio_max": max(ratios),
            "llama.cpp": statistics.median(self.peer),
            "llmcl": statistics.median(self.ours),
        }
        if per:
            values |= {f"{name}_tokens_per_s": per / values[name] for name in ("llama.cpp", "llmcl")}
        return values


def llama_bench(
    binary: Path, path: Path, *, n_prompt: list[int], n_gen: list[int], depths: list[int], rounds: int, limit_s: float
) -> list[dict[str, Any]]:
    """What llama-bench, built for a GPU, says of a file, with flash attention and each of MICRO_BATCHES: a row a test.

    It loads the model once, and warms up. Raises ChildError.
    """
    command = [str(binary), "-m", str(path), "-r", str(rounds), "-o", "json", "-fa", "1", "-ngl", "999"]
    for option, values in {"-ub": sorted(MICRO_BATCHES), "-p": n_prompt, "-n": n_gen, "-d": depths}.items():
        command += [option, ",".join(map(str, dict.fromkeys(values))) or "0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
        rows: list[dict[str, Any]] | None = json.loads(done.stdout) if done.returncode == 0 else None
    except subprocess.TimeoutExpired as error:
        raise ChildError(f"llama-bench did not end within {limit_s:.0f} s") from error
    except (OSError, ValueError) as error:
        raise ChildError(f"llama-bench: {error}") from error
    if rows is None:
        raise ChildError(f"llama-bench ended with status {done.returncode}. {done.stderr[-1500:].strip()}")
    return rows


def order_of(turn: int) -> tuple[str, str]:
    """Both engines, another one first in each turn."""
    return ("llama.cpp", "llmcl") if turn % 2 == 0 else ("llmcl", "llama.cpp")


def in_turn(both: Mapping[str, Child], op: str, rounds: int, **arguments: Any) -> Pairs:
    """What `op` takes both engines, in turns, after a warm-up."""
    return in_turn_with([both], op, rounds, **arguments)[0]


def in_turn_with(models: Sequence[Mapping[str, Child]], op: str, rounds: int, **arguments: Any) -> list[Pairs]:
    """The same of several models, each with its engines: every turn has all of them."""
    found = [Pairs() for _ in models]
    for turn in range(rounds + 1):
        for both, pairs in zip(models, found, strict=True):
            for engine in order_of(turn):
                seconds = both[engine].seconds(op, **arguments)
                if turn:
                    (pairs.ours if engine == "llmcl" else pairs.peer).append(seconds)
    return found


def check_text(path: Path) -> None:
    """Raises UsageError if there is no such file."""
    if not path.is_file():
        raise UsageError(f"-f/--file {path}: there is no such file; expected a text in UTF-8")


def text_windows(llmcl: Child, text: Path, window: int, positions: int) -> list[list[int]]:
    """Windows of token ids, as `llmcl perplexity` cuts the text, that score `positions` tokens or a few more."""
    limit = -(-positions // (window - 1 - window // 2))
    windows: list[list[int]] = llmcl.ask("windows", path=str(text), window=window, limit=limit)["value"]
    return windows


def make_file(source: Path, format: str, folder: Path, model: str, engines: Engines) -> Path:
    """The model in `format` by llama.cpp's own quantiser, kept in `folder` under a name of its own."""
    target = folder / f"{model}-{source.stat().st_size}-{format}.gguf"
    if not target.exists():
        note(f"{model}: llama.cpp quantises to {format}")
        part = target.with_suffix(".part")
        with engines.child("llama.cpp") as child:
            child.ask("quantize", source=str(source), target=str(part), ftype=format, threads=len(engines.processors))
            child.end()
        part.replace(target)
    return target


def random_file(path: Path, shape: str) -> Path:
    """A GGUF file in float16 with random weights of a real shape, tied embeddings and a vocabulary of made-up words.

    A process of its own writes it: what a process starts counts as at least as large as this process ever was.
    """
    from llmcl.models.random_shapes import random_shape_config

    config = random_shape_config(shape)
    needed = 2 * config.n_parameters()
    if (free := shutil.disk_usage(path.parent).free) < 2 * needed:
        raise UsageError(f"{path.parent} has {free / 1e9:.1f} GB free; {shape} needs {2 * needed / 1e9:.1f} GB")
    subprocess.run([sys.executable, __file__, str(path), shape], check=True, env=environment())
    return path


def _write_random(path: Path, model_shape: str) -> None:
    from gguf import GGUFValueType

    from llmcl.models.random_shapes import random_shape_config

    config = random_shape_config(model_shape)
    words = ["a", "b", "ab", "\u010a", *(f"w{i}" for i in range(config.vocab_size - 4))]
    tokenizer = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.token_type": [1] * len(words),
        "tokenizer.ggml.merges": ["a b"],
    }
    last = config.vocab_size - 1, GGUFValueType.UINT32, None
    metadata = model_metadata(config) | typed(tokenizer) | {"tokenizer.ggml.eos_token_id": last}
    rng = np.random.default_rng(0)

    def norm(start: int, stop: int) -> np.ndarray:
        return np.ones((1, config.hidden_size), np.float32).view(np.uint8)

    def matrix(k: int) -> Callable[[int, int], np.ndarray]:
        def rows(start: int, stop: int) -> np.ndarray:
            values = rng.standard_normal((stop - start, k), np.float32) * np.float32(k**-0.5)
            return values.astype(np.float16).view(np.uint8)

        return rows

    tensors = []
    for name, shape in replace(config, tie_embeddings=True).tensors().items():
        format, rows = ("F32", norm) if len(shape) == 1 else ("F16", matrix(shape[1]))
        tensors.append(OutTensor(gguf_name(name), shape, format, format, rows))
    part = path.with_suffix(".part")
    GgufPlan("llama", metadata, tensors).write(part, with_progress(tensors, None))
    part.replace(path)


def check_llama_python(python: str) -> None:
    """Raises UsageError if the interpreter cannot import llama_cpp and numpy."""
    try:
        done = subprocess.run([python, "-c", "import llama_cpp, numpy"], capture_output=True, text=True)
        reason = done.stderr.strip().splitlines()[-1] if done.returncode else ""
    except OSError as error:
        reason = error.strerror or str(error)
    if reason:
        raise UsageError(
            f"{python} has no llama-cpp-python ({reason}); build it natively, for instance with "
            '`CMAKE_ARGS="-DGGML_NATIVE=ON" pip install --no-binary llama-cpp-python llama-cpp-python numpy` in an '
            "environment of its own, and name its Python with --llama-python"
        )


def source_file(model: str, folder: Path) -> tuple[Path, str]:
    """(the GGUF file to quantise, a name for it)."""
    if model == SHAPE_1B:
        path = folder / f"{model}-random-F16.gguf"
        return (path if path.exists() else random_file(path, model)), model
    from llmcl.checkpoint import open_checkpoint

    with open_checkpoint(model) as checkpoint:
        if checkpoint.gguf_metadata is None:
            raise UsageError(f"-m/--model {model} is a folder; expected a GGUF file, which both engines can read")
        return checkpoint.path, model if model == "smollm2" else checkpoint.path.stem


def target_lines(targets: list[tuple[str, str, str, bool]]) -> list[str]:
    """A Markdown table of (what, aim, measured, met), an empty line before it."""
    rows = ([what, aim, found, "yes" if met else "no"] for what, aim, found, met in targets)
    return ["", *table("lrrl", ["target", "aim", "measured", "met"], rows)]


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":  # started by random_file
    _write_random(Path(sys.argv[1]), sys.argv[2])
