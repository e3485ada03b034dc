#!/usr/bin/env python
"""Compares llmcl with llama.cpp and OpenVINO GenAI on several sequences at once: a CPU, one run, one GGUF file.

Each engine runs in a process of its own (scripts/compare_child.py), pinned to the same processors, and they take turns.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

from compare_engines import (
    Child,
    ChildError,
    Engines,
    Format,
    LlamaPython,
    Rounds,
    Threads,
    Work,
    check_llama_python,
    make_file,
    note,
    processors_of,
    source_file,
)

from llmcl.cli import options as opt
from llmcl.cli.command import run_script
from llmcl.tools.markdown import table

ENGINES = ("llmcl", "llama.cpp", "openvino")
EPILOG = """\b
PL            sequences at once, each with -npp tokens of prompt and -ntg of answer
decode        tokens a second of all sequences: median of the turns. llmcl chooses each token, as an answer needs;
              llama.cpp is given random tokens, as llama-batched-bench does; OpenVINO chooses each token, and is timed
              from the step on that gives the last sequence its first
ratio         llmcl's tokens a second over the faster peer's in the same turn: median (least - most)"""


def compare(
    children: dict[str, Child], n_parallel: tuple[int, ...], pp: int, tg: int, rounds: int
) -> list[dict[str, Any]]:
    """A row for each number of sequences: tokens a second of each engine, by turn."""
    rows = []
    for pl in n_parallel:
        note(f"{pl} sequences of {pp} + {tg} tokens")
        rates: dict[str, list[float]] = {name: [] for name in children}
        for turn in range(rounds + 1):
            names = list(children)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                seconds = children[name].seconds("sequences", pp=pp, tg=tg, pl=pl)
                if turn:  # the first is a warm-up
                    rates[name].append(pl * tg / seconds)
        rows.append({"pp": pp, "tg": tg, "pl": pl, "tokens_per_s": rates})
    return rows


def markdown(rows: list[dict[str, Any]]) -> str:
    names = list(rows[0]["tokens_per_s"])
    lines = []
    for row in rows:
        rates = row["tokens_per_s"]
        peers = [max(turn) for turn in zip(*(rates[name] for name in names if name != "llmcl"), strict=True)]
        ratios = [own / peer for own, peer in zip(rates["llmcl"], peers, strict=True)]
        spread = f"{statistics.median(ratios):.2f}x ({min(ratios):.2f} - {max(ratios):.2f})" if ratios else ""
        medians = [f"{statistics.median(rates[name]):.1f}" for name in names]
        lines.append([str(row["pp"]), str(row["tg"]), str(row["pl"]), *medians, spread])
    header = ["PP", "TG", "PL", *(f"{name} t/s" for name in names), "ratio"]
    return "\n".join(table("r" * len(header), header, lines)) + "\n"


def compare_sequences(
    model: Annotated[
        str, opt.measurement("-m", "--model", metavar="NAME|FILE", help="smollm2 or a GGUF file.")
    ] = "smollm2",
    file_format: Annotated[
        str, opt.measurement("--quantization", metavar="NAME", help="llama.cpp's name; its quantiser makes the file.")
    ] = "Q4_0",
    llama_python: LlamaPython = sys.executable,
    openvino_python: Annotated[
        str | None,
        opt.measurement("--openvino-python", metavar="PATH", help="A Python with openvino-genai; left out: no column."),
    ] = None,
    n_prompt: Annotated[
        int, opt.measurement("-npp", metavar="N", parser=opt.whole(1), help="Tokens of a prompt.")
    ] = 128,
    n_gen: Annotated[int, opt.measurement("-ntg", metavar="N", parser=opt.whole(2), help="Tokens of an answer.")] = 32,
    n_parallel: Annotated[
        Any, opt.measurement("-npl", metavar="N,...", parser=opt.wholes(1), help="Sequences at once.")
    ] = "1,4,8,16,32",
    rounds: Rounds = 3,
    threads: Threads = None,
    work: Work = None,
    device: opt.Device = None,
    format: Format = "md",
) -> None:
    """Tokens a second of several sequences, beside llama.cpp and OpenVINO GenAI."""
    check_llama_python(llama_python)
    engines = Engines(llama_python, processors_of(threads), device or "cpu", {}, openvino_python)
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folder = work or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        source, name = source_file(model, folder)
        path = make_file(source, file_format, folder, name, engines)
        most, context = max(n_parallel), n_prompt + n_gen + 1
        children: dict[str, Child] = {}
        for engine in ENGINES if openvino_python else ENGINES[:2]:
            children[engine] = stack.enter_context(engines.child(engine))
            options = {"n_seq_max": most, "n_batch": 2048} if engine == "llama.cpp" else {}
            tokens = context if engine == "llmcl" else most * context
            try:
                engines.load(children[engine], path, tokens, **options)
            except ChildError as error:
                if engine == "llmcl":
                    raise
                note(f"{engine} is left out: {error}")
                del children[engine]
        children["llmcl"].ask("prepare", pl=most, context=context)
        rows = compare(children, n_parallel, n_prompt, n_gen, rounds)
        for child in children.values():
            child.end()
    print(json.dumps(rows) if format == "json" else markdown(rows), end="\n" if format == "json" else "", flush=True)


if __name__ == "__main__":
    run_script(compare_sequences, EPILOG)
