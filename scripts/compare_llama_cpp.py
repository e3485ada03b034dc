#!/usr/bin/env python
"""Compares llmcl with llama.cpp on the same GGUF files, on a CPU, in one run.

Each engine runs in a process of its own (scripts/compare_child.py), pinned to the same processors. For each measurement
the two take turns, so that what slows the machine slows both, and the ratio of each turn's pair is kept.
"""

from __future__ import annotations

import json
import os
import platform
import select
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from llmcl import json_text
from llmcl.cli import options as opt
from llmcl.cli.command import TYPER_SETTINGS, Command, run
from llmcl.errors import LlmclError, UsageError

ROOT = Path(__file__).resolve().parent.parent
CHILD = Path(__file__).with_name("compare_child.py")
PREFILL, DECODE, DEPTH, WINDOW = 512, 64, 4096, 512
SHAPE_1B = "llama-3.2-1b"

# The least ratios to llama.cpp that are aimed at, by model and format: measurement -> value. Shares are of 1.
TARGETS: dict[tuple[str, str], dict[str, float]] = {
    ("smollm2", "Q4_0"): {"decode": 2.2, "decode_deep": 2.0, "prefill": 4.0, "bandwidth": 0.70},
    ("smollm2", "Q4_K_M"): {"decode": 2.0, "decode_deep": 1.8, "prefill": 4.0},
    ("smollm2", "Q8_0"): {"decode": 2.2, "decode_deep": 2.0, "prefill": 6.0, "bandwidth": 0.85},
    ("smollm2", "BF16"): {"decode": 1.4, "decode_deep": 1.4, "prefill": 2.7, "bandwidth": 0.85},
    (SHAPE_1B, "Q4_0"): {"decode": 1.3, "prefill": 2.0},
    (SHAPE_1B, "Q8_0"): {"decode": 1.3, "prefill": 2.0},
}
TOP_1_TARGET = 0.98
FIRST_TOKEN_TARGET_S = 1.0  # Q4_0 of smollm2
MEMORY_FACTOR, MEMORY_BYTES = 1.3, 350_000_000  # of `generate`: factor of the file's size, and what comes on top

EPILOG = """\b
prefill, decode   512 random tokens; 64 single-token steps from an empty context; no sampling, as llama-bench
decode @ d4096    the same steps after 4096 tokens. SmolLM2 was trained for fewer: for speed that makes no difference
load              model and context made and a first token computed, files in the page cache
peak memory       largest resident size of a process that loads, prefills 512 and decodes 16
ratio             llama.cpp's time over llmcl's, so above 1 llmcl is faster: median of the turns (least - most)
top 1             share of the scored tokens before which both engines had the same likeliest token
of bandwidth      bytes that a decode step of llmcl reads, over its time, over a streaming read's rate"""


class ChildError(LlmclError):
    """An engine's process failed; the message says at what."""


class Child:
    """An engine's process. A request that takes longer than `limit_s` ends it."""

    def __init__(
        self, engine: str, python: str, processors: set[int], script: Path = CHILD, limit_s: float | None = None
    ):
        paths = [] if engine == "llama.cpp" else [str(ROOT), os.environ.get("PYTHONPATH", "")]
        self.engine = engine
        self._limit_s = limit_s
        self._said = None if engine == "llmcl" else tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [python, str(script), engine],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
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


@dataclass
class Settings:
    """What holds for all files of a run."""

    llama_python: str
    processors: set[int]
    rounds: int
    device: str | None
    options: dict[str, Any]
    text: Path | None
    positions: int
    deep: bool

    @contextmanager
    def child(self, engine: str) -> Iterator[Child]:
        child = Child(engine, self.llama_python if engine == "llama.cpp" else sys.executable, self.processors)
        try:
            yield child
        finally:
            child.kill()

    def load(self, child: Child, path: Path, context: int) -> float:
        extra = {"device": self.device, "options": self.options} if child.engine == "llmcl" else {}
        return child.seconds("load", path=str(path), context=context, threads=len(self.processors), **extra)


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


def compare(path: Path, model: str, format: str, settings: Settings) -> dict[str, Any]:
    """All measurements of one file."""
    _note(f"{model} {format}: load time and memory")
    result: dict[str, Any] = {"model": model, "format": format, "file_bytes": path.stat().st_size}
    load, memory = Pairs(), Pairs()
    for turn in range(settings.rounds + 1):
        for engine in _order(turn):
            with settings.child(engine) as child:
                seconds = settings.load(child, path, PREFILL + DECODE)
                child.seconds("prefill", n=PREFILL)
                child.seconds("decode", n=16, depth=PREFILL)
                peak = child.end()
            if turn:  # the first is for caches: of files, and of compiled kernels
                (load.ours if engine == "llmcl" else load.peer).append(seconds)
                (memory.ours if engine == "llmcl" else memory.peer).append(peak)
    result["load"], result["peak_memory"] = load.to_dict(), memory.to_dict()

    with settings.child("llama.cpp") as peer, settings.child("llmcl") as ours:
        context = max(DEPTH if settings.deep else 0, PREFILL) + DECODE
        both = {"llama.cpp": peer, "llmcl": ours}
        for child in both.values():
            settings.load(child, path, context)
        tests: dict[str, tuple[int, str, dict[str, int]]] = {
            "prefill": (PREFILL, "prefill", {"n": PREFILL}),
            "decode": (DECODE, "decode", {"n": DECODE, "depth": 0}),
        }
        if settings.deep:
            tests["decode_deep"] = DECODE, "decode", {"n": DECODE, "depth": DEPTH}
        for name, (per, op, arguments) in tests.items():
            _note(f"{model} {format}: {name}")
            pairs = Pairs()
            for turn in range(settings.rounds + 1):
                for engine in _order(turn):
                    seconds = both[engine].seconds(op, **arguments)
                    if turn:  # the first is a warm-up
                        (pairs.ours if engine == "llmcl" else pairs.peer).append(seconds)
            result[name] = pairs.to_dict(per)
        if settings.text is not None:
            _note(f"{model} {format}: perplexity")
            result["quality"] = quality(peer, ours, settings)
        facts = ours.ask("facts")
        step = result["decode"]["llmcl"] / DECODE
        read = facts["weight_bytes"] + facts["kv_bytes_per_position"] * DECODE / 2
        result |= {"facts": facts, "bandwidth": read / step / facts["bandwidth"]}
        result["about"] = {name: child.ask("about") for name, child in both.items()}
        for child in both.values():
            child.end()
    result["generate"] = generate(path, settings)
    return result


def quality(peer: Child, ours: Child, settings: Settings) -> dict[str, Any]:
    """Perplexities on the same tokens, and the share of equal likeliest tokens."""
    import math

    a_window = WINDOW - 1 - WINDOW // 2
    limit = -(-settings.positions // a_window)
    windows = ours.ask("windows", path=str(settings.text), window=WINDOW, limit=limit)["value"]
    scores = {name: child.ask("score", windows=windows) for name, child in (("llama.cpp", peer), ("llmcl", ours))}
    tops = [scores[name]["top"] for name in ("llama.cpp", "llmcl")]
    n = len(tops[0])
    return {
        "positions": n,
        "perplexity": {name: math.exp(score["loss"] / n) for name, score in scores.items()},
        "top_1": sum(a == b for a, b in zip(*tops, strict=True)) / n,
    }


def generate(path: Path, settings: Settings) -> dict[str, Any]:
    """`llmcl generate` as a user starts it: seconds to the end of the first token, and the peak memory of 32 tokens."""
    command = [
        sys.executable,
        "-m",
        "llmcl.cli",
        "generate",
        "-m",
        str(path),
        "-p",
        "Why is the sky blue?",
        "--raw",
        "-q",
    ]
    command += ["--device", settings.device] if settings.device else []
    for name, value in settings.options.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}

    def once(n_tokens: int) -> tuple[float, int]:
        start = time.perf_counter()
        process = subprocess.Popen([*command, "-n", str(n_tokens)], stdout=subprocess.DEVNULL, env=environment)
        os.sched_setaffinity(process.pid, settings.processors)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise ChildError(f"llmcl generate ended with status {process.returncode}; its message is above")
        return time.perf_counter() - start, usage.ru_maxrss * 1024

    once(1)
    first = [once(1)[0] for _ in range(settings.rounds)]
    return {"first_token_s": statistics.median(first), "peak_memory": once(32)[1]}


def _order(turn: int) -> tuple[str, str]:
    return ("llama.cpp", "llmcl") if turn % 2 == 0 else ("llmcl", "llama.cpp")


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ---- files -------------------------------------------------------------------------------------------------------


def make_file(source: Path, format: str, folder: Path, model: str, settings: Settings) -> Path:
    """The model in `format` by llama.cpp's own quantiser, kept in `folder` under a name of its own."""
    target = folder / f"{model}-{source.stat().st_size}-{format}.gguf"
    if not target.exists():
        _note(f"{model}: llama.cpp quantises to {format}")
        part = target.with_suffix(".part")
        with settings.child("llama.cpp") as child:
            child.ask("quantize", source=str(source), target=str(part), ftype=format, threads=len(settings.processors))
            child.end()
        part.replace(target)
    return target


def random_file(path: Path, shape: str) -> Path:
    """A GGUF file in float16 with random weights of a real shape, tied embeddings and a vocabulary of made-up words."""
    import gguf
    import numpy as np

    from llmcl.random_shapes import random_shape_config

    config = random_shape_config(shape)
    needed = 2 * config.n_parameters()
    if (free := shutil.disk_usage(path.parent).free) < 2 * needed:
        raise UsageError(f"{path.parent} has {free / 1e9:.1f} GB free; {shape} needs {2 * needed / 1e9:.1f} GB")
    part = path.with_suffix(".part")
    writer = gguf.GGUFWriter(part, "llama")
    writer.add_block_count(config.n_layers)
    writer.add_context_length(config.max_position)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.n_q_heads)
    writer.add_head_count_kv(config.n_kv_heads)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    words = ["a", "b", "ab", "\u010a", *(f"w{i}" for i in range(config.vocab_size - 4))]
    writer.add_token_list(words)
    writer.add_token_types([1] * len(words))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(config.vocab_size - 1)

    hidden, q, kv = config.hidden_size, config.n_q_heads * config.head_dim, config.n_kv_heads * config.head_dim
    matrices = {"token_embd": (config.vocab_size, hidden)}
    norms = ["output_norm"]
    for i in range(config.n_layers):
        layer = {
            "attn_q": (q, hidden),
            "attn_k": (kv, hidden),
            "attn_v": (kv, hidden),
            "attn_output": (hidden, q),
            "ffn_gate": (config.intermediate_size, hidden),
            "ffn_up": (config.intermediate_size, hidden),
            "ffn_down": (hidden, config.intermediate_size),
        }
        matrices |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
        norms += [f"blk.{i}.attn_norm", f"blk.{i}.ffn_norm"]
    for name, (rows, k) in matrices.items():
        writer.add_tensor_info(f"{name}.weight", [rows, k], np.dtype(np.float16), 2 * rows * k)
    for name in norms:
        writer.add_tensor_info(f"{name}.weight", [hidden], np.dtype(np.float32), 4 * hidden)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    rng = np.random.default_rng(0)
    for rows, k in matrices.values():
        values = rng.standard_normal((rows, k), np.float32) * np.float32(k**-0.5)
        writer.write_tensor_data(values.astype(np.float16))
    for _ in norms:
        writer.write_tensor_data(np.ones(hidden, np.float32))
    writer.close()
    part.replace(path)
    return path


# ---- output ------------------------------------------------------------------------------------------------------


def markdown(results: list[dict[str, Any]]) -> str:
    """Tables: speed, the rest, targets."""
    lines = ["| model | test | llama.cpp | llmcl | ratio |", "|---|---|---:|---:|---:|"]
    for result in results:
        name = f"{result['model']} {result['format']}"
        for test, label in TESTS.items():
            if test in result:
                values = result[test]
                rates = [f"{values[f'{engine}_tokens_per_s']:.1f} t/s" for engine in ("llama.cpp", "llmcl")]
                lines.append(f"| {name} | {label} | {rates[0]} | {rates[1]} | {_spread(values)} |")
        for test, label, unit, scale in (("load", "load", "s", 1.0), ("peak_memory", "peak memory", "MiB", 2.0**20)):
            values = result[test]
            digits = 2 if unit == "s" else 0
            both = [f"{values[engine] / scale:.{digits}f} {unit}" for engine in ("llama.cpp", "llmcl")]
            lines.append(f"| {name} | {label} | {both[0]} | {both[1]} | {_spread(values)} |")
        if "quality" in result:
            quality = result["quality"]
            both = [f"{quality['perplexity'][engine]:.4f}" for engine in ("llama.cpp", "llmcl")]
            label = f"perplexity, {quality['positions']} positions"
            lines.append(f"| {name} | {label} | {both[0]} | {both[1]} | top 1 {quality['top_1']:.2%} |")
        lines.append(f"| {name} | decode, of bandwidth | | {result['bandwidth']:.1%} | |")
    lines += ["", "| target | aim | measured | met |", "|---|---:|---:|---|"]
    lines += [
        f"| {name} | {aim} | {measured} | {'yes' if met else 'no'} |" for name, aim, measured, met in targets(results)
    ]
    return "\n".join(lines) + "\n"


TESTS = {"prefill": f"prefill {PREFILL}", "decode": f"decode {DECODE}", "decode_deep": f"decode {DECODE} @ d{DEPTH}"}


def targets(results: list[dict[str, Any]]) -> list[tuple[str, str, str, bool]]:
    """(what, aim, measured, met) for every target that a result bears on."""
    rows = []
    for result in results:
        name = f"{result['model']} {result['format']}"
        for test, aim in TARGETS.get((result["model"], result["format"]), {}).items():
            if test == "bandwidth":
                share = result["bandwidth"]
                rows.append((f"{name}, decode, of bandwidth", f"{aim:.0%}", f"{share:.1%}", share >= aim))
            elif test in result:
                ratio = result[test]["ratio"]
                rows.append((f"{name}, {TESTS[test]}", f"{aim:.1f}x", f"{ratio:.2f}x", ratio >= aim))
        if result["model"] == "smollm2" and "quality" in result:
            share = result["quality"]["top_1"]
            rows.append((f"{name}, same top 1", f"{TOP_1_TARGET:.0%}", f"{share:.2%}", share >= TOP_1_TARGET))
        if (result["model"], result["format"]) == ("smollm2", "Q4_0"):
            first = result["generate"]["first_token_s"]
            rows.append(
                (f"{name}, first token", f"{FIRST_TOKEN_TARGET_S} s", f"{first:.2f} s", first < FIRST_TOKEN_TARGET_S)
            )
        limit = MEMORY_FACTOR * result["file_bytes"] + MEMORY_BYTES
        peak = result["generate"]["peak_memory"]
        sizes = [f"{size / 2**20:.0f} MiB" for size in (limit, peak)]
        rows.append((f"{name}, peak memory of generate", sizes[0], sizes[1], peak < limit))
    return rows


def _spread(values: dict[str, Any]) -> str:
    return f"{values['ratio']:.2f}x ({values['ratio_min']:.2f} - {values['ratio_max']:.2f})"


# ---- command line ------------------------------------------------------------------------------------------------


def _option(*names: str, **settings: Any) -> Any:
    return typer.Option(*names, rich_help_panel="Comparison", **settings)


def compare_llama_cpp(
    model: Annotated[
        str, _option("-m", "--model", metavar="NAME|FILE", help="smollm2, a GGUF file, or a shape: " + SHAPE_1B + ".")
    ] = "smollm2",
    formats: Annotated[
        str, _option("--formats", metavar="NAME,...", help="llama.cpp's names; the files are made by its quantiser.")
    ] = "Q4_0,Q4_K_M,Q8_0,BF16",
    llama_python: Annotated[
        str, _option("--llama-python", metavar="PATH", help="A Python with llama-cpp-python; left out: this one.")
    ] = sys.executable,
    text: Annotated[
        Path | None, _option("-f", "--file", metavar="FILE", help="Text for perplexity; left out: none is measured.")
    ] = None,
    positions: Annotated[int, _option("--positions", metavar="N", help="Tokens of the text to score.")] = 4096,
    rounds: Annotated[int, _option("-r", "--rounds", metavar="N", min=1, help="Turns, after a warm-up.")] = 5,
    threads: Annotated[
        int | None, _option("-t", "--threads", metavar="N", min=1, help="Processors for each; left out: all.")
    ] = None,
    deep: Annotated[
        bool, _option("--deep/--no-deep", help="Whether decode is measured at a depth of 4096 too.")
    ] = True,
    work: Annotated[
        Path | None, _option("--work", metavar="FOLDER", help="Where the files are kept; left out: a temporary one.")
    ] = None,
    device: opt.Device = None,
    dtype: opt.Dtype = "auto",
    kv_dtype: opt.KvDtype = "auto",
    format: Annotated[
        str, typer.Option("--format", metavar="md|json", parser=opt.one_of("md", "json"), rich_help_panel="Output")
    ] = "md",
) -> None:
    """Ratios of llmcl to llama.cpp on the same files, and how they stand to the targets."""
    processors = sorted(os.sched_getaffinity(0))
    if threads is not None and threads > len(processors):
        raise UsageError(f"-t/--threads {threads}: this process may use {len(processors)} processors")
    if text is not None and not text.is_file():
        raise UsageError(f"-f/--file {text}: there is no such file; expected a text in UTF-8")
    settings = Settings(
        llama_python=llama_python,
        processors=set(processors[:threads]),
        rounds=rounds,
        device=device or "cpu",
        options={"dtype": dtype, "kv_dtype": kv_dtype},
        text=text,
        positions=positions,
        deep=deep,
    )
    check_llama_python(llama_python)
    with tempfile.TemporaryDirectory() as temporary:
        folder = work or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        source, name = _source(model, folder)
        if name == SHAPE_1B:
            settings.text = None  # random weights predict nothing
        results = []
        for wanted in formats.split(","):
            path = make_file(source, wanted, folder, name, settings)
            results.append(compare(path, name, wanted, settings))
            if format == "md":
                _note(markdown(results[-1:]))
    if format == "json":
        print(json_text.dumps({"machine": platform.processor(), "rounds": rounds, "results": results}))
    else:
        print(markdown(results), end="", flush=True)


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


def _source(model: str, folder: Path) -> tuple[Path, str]:
    """(the GGUF file to quantise, a name for it)."""
    if model == SHAPE_1B:
        path = folder / f"{model}-random-F16.gguf"
        return (path if path.exists() else random_file(path, model)), model
    from llmcl.checkpoint import open_checkpoint

    with open_checkpoint(model) as checkpoint:
        if checkpoint.gguf_metadata is None:
            raise UsageError(f"-m/--model {model} is a folder; expected a GGUF file, which both engines can read")
        return checkpoint.path, model if model == "smollm2" else checkpoint.path.stem


if __name__ == "__main__":
    app = typer.Typer(**TYPER_SETTINGS)
    app.command(cls=Command, epilog=EPILOG)(compare_llama_cpp)
    run(app)
