#!/usr/bin/env python
"""Compares llmcl with llama.cpp on the same GGUF files, on a CPU, in one run.

Each engine runs in a process of its own (scripts/compare_child.py), pinned to the same processors. For each measurement
the two take turns, so that what slows the machine slows both, and the ratio of each turn's pair is kept.
"""

from __future__ import annotations

import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from compare_engines import (
    SHAPE_1B,
    TOP_1_TARGET,
    Child,
    ChildError,
    Engines,
    Format,
    Formats,
    LlamaPython,
    Pairs,
    Rounds,
    Threads,
    Work,
    check_llama_python,
    check_text,
    in_turn,
    make_file,
    note,
    order_of,
    processors_of,
    source_file,
    target_lines,
    text_windows,
)

from llmcl.cli import options as opt
from llmcl.cli.command import run_script
from llmcl.runtime import child_process
from llmcl.tools import json_text
from llmcl.tools.markdown import table

PREFILL, DECODE, DEPTH, WINDOW = 512, 64, 4096, 512

# The least ratios to llama.cpp that are aimed at, by model and format: measurement -> value. Shares are of 1.
TARGETS: dict[tuple[str, str], dict[str, float]] = {
    ("smollm2", "Q4_0"): {"decode": 2.2, "decode_deep": 2.0, "prefill": 4.0, "bandwidth": 0.70},
    ("smollm2", "Q4_K_M"): {"decode": 2.0, "decode_deep": 1.8, "prefill": 4.0},
    ("smollm2", "Q8_0"): {"decode": 2.2, "decode_deep": 2.0, "prefill": 6.0, "bandwidth": 0.85},
    ("smollm2", "BF16"): {"decode": 1.4, "decode_deep": 1.4, "prefill": 2.7, "bandwidth": 0.85},
    (SHAPE_1B, "Q4_0"): {"decode": 1.3, "prefill": 2.0},
    (SHAPE_1B, "Q8_0"): {"decode": 1.3, "prefill": 2.0},
}
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


@dataclass
class Settings:
    """What holds for all files of a run."""

    engines: Engines
    rounds: int
    text: Path | None
    positions: int
    deep: bool


def compare(path: Path, model: str, format: str, settings: Settings) -> dict[str, Any]:
    """All measurements of one file."""
    engines = settings.engines
    note(f"{model} {format}: load time and memory")
    result: dict[str, Any] = {"model": model, "format": format, "file_bytes": path.stat().st_size}
    load, memory = Pairs(), Pairs()
    for turn in range(settings.rounds + 1):
        for engine in order_of(turn):
            with engines.child(engine) as child:
                seconds = engines.load(child, path, PREFILL + DECODE)
                child.seconds("prefill", n=PREFILL)
                child.seconds("decode", n=16, depth=PREFILL)
                peak = child.end()
            if turn:  # the first is for caches: of files, and of compiled kernels
                (load.ours if engine == "llmcl" else load.peer).append(seconds)
                (memory.ours if engine == "llmcl" else memory.peer).append(peak)
    result["load"], result["peak_memory"] = load.to_dict(), memory.to_dict()

    with engines.child("llama.cpp") as peer, engines.child("llmcl") as ours:
        context = max(DEPTH if settings.deep else 0, PREFILL) + DECODE
        both = {"llama.cpp": peer, "llmcl": ours}
        for child in both.values():
            engines.load(child, path, context)
        tests: dict[str, tuple[int, str, dict[str, int]]] = {
            "prefill": (PREFILL, "prefill", {"n": PREFILL}),
            "decode": (DECODE, "decode", {"n": DECODE, "depth": 0}),
        }
        if settings.deep:
            tests["decode_deep"] = DECODE, "decode", {"n": DECODE, "depth": DEPTH}
        for name, (per, op, arguments) in tests.items():
            note(f"{model} {format}: {name}")
            result[name] = in_turn(both, op, settings.rounds, **arguments).to_dict(per)
        if settings.text is not None:
            note(f"{model} {format}: perplexity")
            result["quality"] = quality(peer, ours, settings.text, settings.positions)
        facts = ours.ask("facts")
        step = result["decode"]["llmcl"] / DECODE
        read = facts["weight_bytes"] + facts["kv_bytes_per_position"] * DECODE / 2
        result |= {"facts": facts, "bandwidth": read / step / facts["bandwidth"]}
        result["about"] = {name: child.ask("about") for name, child in both.items()}
        for child in both.values():
            child.end()
    result["generate"] = generate(path, engines, settings.rounds)
    return result


def quality(peer: Child, ours: Child, text: Path, positions: int) -> dict[str, Any]:
    """Perplexities on the same tokens, and the share of equal likeliest tokens."""
    windows = text_windows(ours, text, WINDOW, positions)
    scores = {name: child.ask("score", windows=windows) for name, child in (("llama.cpp", peer), ("llmcl", ours))}
    tops = [scores[name]["top"] for name in ("llama.cpp", "llmcl")]
    n = len(tops[0])
    return {
        "positions": n,
        "perplexity": {name: math.exp(score["loss"] / n) for name, score in scores.items()},
        "top_1": sum(a == b for a, b in zip(*tops, strict=True)) / n,
    }


def generate(path: Path, engines: Engines, rounds: int) -> dict[str, Any]:
    """`llmcl generate` as a user starts it: seconds to the end of the first token, and the peak memory of 32 tokens."""
    command = child_process.command("llmcl", "generate", "-m", str(path), "-p", "Why is the sky blue?")
    command += ["--raw", "-q", *(["--device", engines.device] if engines.device else [])]
    for name, value in engines.options.items():
        command += [f"--{name.replace('_', '-')}", str(value)]

    def once(n_tokens: int) -> tuple[float, int]:
        start = time.perf_counter()
        process = subprocess.Popen([*command, "-n", str(n_tokens)], stdout=subprocess.DEVNULL)
        os.sched_setaffinity(process.pid, engines.processors)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise ChildError(f"llmcl generate ended with status {process.returncode}; its message is above")
        return time.perf_counter() - start, usage.ru_maxrss * 1024

    once(1)
    first = [once(1)[0] for _ in range(rounds)]
    return {"first_token_s": statistics.median(first), "peak_memory": once(32)[1]}


# ---- output ------------------------------------------------------------------------------------------------------


def markdown(results: list[dict[str, Any]]) -> str:
    """Tables: speed, the rest, targets."""
    rows = []
    for result in results:
        name = f"{result['model']} {result['format']}"
        for test, label in TESTS.items():
            if test in result:
                values = result[test]
                rates = [f"{values[f'{engine}_tokens_per_s']:.1f} t/s" for engine in ("llama.cpp", "llmcl")]
                rows.append([name, label, *rates, _spread(values)])
        for test, label, unit, scale in (("load", "load", "s", 1.0), ("peak_memory", "peak memory", "MiB", 2.0**20)):
            values = result[test]
            digits = 2 if unit == "s" else 0
            both = [f"{values[engine] / scale:.{digits}f} {unit}" for engine in ("llama.cpp", "llmcl")]
            rows.append([name, label, *both, _spread(values)])
        if "quality" in result:
            quality = result["quality"]
            both = [f"{quality['perplexity'][engine]:.4f}" for engine in ("llama.cpp", "llmcl")]
            label = f"perplexity, {quality['positions']} positions"
            rows.append([name, label, *both, f"top 1 {quality['top_1']:.2%}"])
        rows.append([name, "decode, of bandwidth", "", f"{result['bandwidth']:.1%}", ""])
    lines = table("llrrr", ["model", "test", "llama.cpp", "llmcl", "ratio"], rows)
    return "\n".join(lines + target_lines(targets(results))) + "\n"


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


def compare_llama_cpp(
    model: Annotated[
        str,
        opt.measurement(
            "-m", "--model", metavar="NAME|FILE", help="smollm2, a GGUF file, or a shape: " + SHAPE_1B + "."
        ),
    ] = "smollm2",
    formats: Formats = "Q4_0,Q4_K_M,Q8_0,BF16",
    llama_python: LlamaPython = sys.executable,
    text: Annotated[
        Path | None,
        opt.measurement("-f", "--file", metavar="FILE", help="Text for perplexity; left out: none is measured."),
    ] = None,
    positions: Annotated[int, opt.measurement("--positions", metavar="N", help="Tokens of the text to score.")] = 4096,
    rounds: Rounds = 5,
    threads: Threads = None,
    deep: Annotated[
        bool, opt.measurement("--deep/--no-deep", help="Whether decode is measured at a depth of 4096 too.")
    ] = True,
    work: Work = None,
    device: opt.Device = None,
    dtype: opt.Dtype = "auto",
    activation_dtype: opt.ActivationDtype = "auto",
    kv_dtype: opt.KvDtype = "auto",
    format: Format = "md",
) -> None:
    """Ratios of llmcl to llama.cpp on the same files, and how they stand to the targets."""
    if text is not None:
        check_text(text)
    engines = Engines(
        llama_python,
        processors_of(threads),
        device or "cpu",
        {"dtype": dtype, "activation_dtype": activation_dtype, "kv_dtype": kv_dtype},
    )
    settings = Settings(engines, rounds, text, positions, deep)
    check_llama_python(llama_python)
    with tempfile.TemporaryDirectory() as temporary:
        folder = work or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        source, name = source_file(model, folder)
        if name == SHAPE_1B:
            settings.text = None  # random weights predict nothing
        results = []
        for wanted in formats.split(","):
            path = make_file(source, wanted, folder, name, engines)
            results.append(compare(path, name, wanted, settings))
            if format == "md":
                note(markdown(results[-1:]))
    if format == "json":
        print(json_text.dumps({"machine": platform.processor(), "rounds": rounds, "results": results}))
    else:
        print(markdown(results), end="", flush=True)


if __name__ == "__main__":
    run_script(compare_llama_cpp, EPILOG)
