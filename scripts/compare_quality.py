#!/usr/bin/env python
"""What each quantised format costs in quality, against the same weights in float32 and against llama.cpp, on one text.

Every file is made by llama.cpp's quantiser and read by both engines. Each contestant (an engine with its settings)
scores the same tokens of the same windows as `llmcl perplexity`, in a process of its own (scripts/compare_child.py).
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from compare_engines import (
    TOP_1_TARGET,
    Engines,
    Format,
    Formats,
    LlamaPython,
    Work,
    check_llama_python,
    check_text,
    make_file,
    note,
    processors_of,
    source_file,
    target_lines,
    text_windows,
)

from llmcl.checkpoint import open_checkpoint
from llmcl.cli import options as opt
from llmcl.cli.command import run_script
from llmcl.tools import json_text
from llmcl.tools.markdown import table

WINDOW = 512
WITHIN_FLOAT32, WITHIN_8_BIT = 0.003, 0.01
F32 = 0  # of ggml_type

EPILOG = """\b
stored         the file's formats by their share of the values, without those of the norms
dequantised    llmcl, the file's weights widened to float32 (--dtype float32): its perplexity is the next columns' 1
float32        llmcl, weights as stored, activations as they are (--activation-dtype float32)
8 bits         llmcl, weights as stored, activations rounded to 8 bits as llama.cpp does
top 1          share of the scored tokens before which two contestants have the same likeliest token: llmcl with 8-bit
               activations and llama.cpp; and llama.cpp with itself, its keys and values held in float32 instead of
               float16, which shows how many near ties 8-bit activations decide by chance"""


@dataclass(frozen=True)
class Contestant:
    engine: str
    options: dict[str, Any]


CONTESTANTS = {
    "dequantised": Contestant("llmcl", {"dtype": "float32"}),
    "float32": Contestant("llmcl", {"activation_dtype": "float32"}),
    "8 bits": Contestant("llmcl", {}),
    "llama.cpp": Contestant("llama.cpp", {}),
    "llama.cpp, KV float32": Contestant("llama.cpp", {"type_k": F32, "type_v": F32, "flash_attn_type": 0}),
}


def measure(path: Path, format: str, engines: Engines, text: Path, positions: int) -> dict[str, Any]:
    """The scores of one file: perplexity of each contestant, and the shares of equal likeliest tokens."""
    windows: list[list[int]] = []
    scores = {}
    for name, contestant in CONTESTANTS.items():
        note(f"{format}: {name}")
        with engines.child(contestant.engine) as child:
            engines.load(child, path, WINDOW, **contestant.options)
            windows = windows or text_windows(child, text, WINDOW, positions)
            scores[name] = child.ask("score", windows=windows)
            child.end()
    n = len(scores["llama.cpp"]["top"])

    def same(a: str, b: str) -> float:
        pairs = zip(scores[a]["top"], scores[b]["top"], strict=True)
        return sum(int(x == y) for x, y in pairs) / n

    return {
        "format": format,
        "stored": stored_shares(path),
        "positions": n,
        "perplexity": {name: math.exp(score["loss"] / n) for name, score in scores.items()},
        "top_1": {
            "float32, dequantised": same("float32", "dequantised"),
            "8 bits, dequantised": same("8 bits", "dequantised"),
            "8 bits, llama.cpp": same("8 bits", "llama.cpp"),
            "float32, llama.cpp": same("float32", "llama.cpp"),
            "llama.cpp, itself": same("llama.cpp", "llama.cpp, KV float32"),
        },
    }


def stored_shares(path: Path) -> dict[str, float]:
    """Format -> its share of the values of all matrices, largest first."""
    counts: Counter[str] = Counter()
    with open_checkpoint(str(path)) as checkpoint:
        for info in checkpoint.tensors.values():
            if len(info.shape) == 2:
                counts[info.format] += math.prod(info.shape)
    return {name: count / counts.total() for name, count in counts.most_common()}


def markdown(results: list[dict[str, Any]]) -> str:
    """Two tables: figures and targets."""
    header = ["file", "stored", "dequantised", "float32", "8 bits", "llama.cpp"]
    header += ["top 1 as llama.cpp", "llama.cpp as itself"]
    rows = []
    for result in results:
        base = result["perplexity"]["dequantised"]
        stored = ", ".join(f"{name} {share:.0%}" for name, share in result["stored"].items())
        ratios = [f"{result['perplexity'][name] / base:.5f}" for name in ("float32", "8 bits", "llama.cpp")]
        same = [f"{result['top_1'][pair]:.2%}" for pair in ("8 bits, llama.cpp", "llama.cpp, itself")]
        rows.append([result["format"], stored, f"{base:.3f}", *ratios, *same])
    return "\n".join(table("llrrrrrr", header, rows) + target_lines(targets(results))) + "\n"


def targets(results: list[dict[str, Any]]) -> list[tuple[str, str, str, bool]]:
    """(what, aim, measured, met)."""
    rows = []
    for result in results:
        base = result["perplexity"]["dequantised"]
        for name, kind, aim in (("float32", "float32", WITHIN_FLOAT32), ("8 bits", "8-bit", WITHIN_8_BIT)):
            off = result["perplexity"][name] / base - 1
            what = f"{result['format']}, perplexity with {kind} activations"
            rows.append((what, f"within {aim:.1%}", f"{off:+.3%}", abs(off) <= aim))
        share = result["top_1"]["8 bits, llama.cpp"]
        rows.append((f"{result['format']}, same top 1", f"{TOP_1_TARGET:.0%}", f"{share:.2%}", share >= TOP_1_TARGET))
    return rows


def compare_quality(
    text: Annotated[Path, opt.measurement("-f", "--file", metavar="FILE", help="The text (UTF-8).")],
    model: Annotated[
        str, opt.measurement("-m", "--model", metavar="NAME|FILE", help="smollm2 or a GGUF file.")
    ] = "smollm2",
    formats: Formats = "Q8_0,Q4_0,Q4_1,Q5_0,Q5_1,Q4_K_S,Q5_K_S,Q6_K,Q4_K_M",
    llama_python: LlamaPython = sys.executable,
    positions: Annotated[
        int, opt.measurement("--positions", metavar="N", min=1, help="Tokens of the text to score.")
    ] = 4096,
    work: Work = None,
    device: opt.Device = None,
    format: Format = "md",
) -> None:
    """Perplexity and likeliest tokens of each format, and how they stand to the targets."""
    check_text(text)
    check_llama_python(llama_python)
    engines = Engines(llama_python, processors_of(None), device or "cpu", {})
    with tempfile.TemporaryDirectory() as temporary:
        folder = work or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        source, name = source_file(model, folder)
        results = []
        for wanted in formats.split(","):
            results.append(measure(make_file(source, wanted, folder, name, engines), wanted, engines, text, positions))
            if format == "md":
                note(markdown(results[-1:]))
    print(json_text.dumps({"results": results}) if format == "json" else markdown(results), end="", flush=True)


if __name__ == "__main__":
    run_script(compare_quality, EPILOG)
