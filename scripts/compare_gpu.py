#!/usr/bin/env python
"""Compares llmcl with PyTorch (transformers) and llama.cpp on a GPU, on random weights of the same shapes, in one run.

Each contestant runs in a process of its own (scripts/compare_gpu_child.py, llama-bench), so that one that fails, or is
not installed, ends nothing but itself, and its memory is given back. They take turns; the ratios are those of a turn.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from attention_bench.measuring import grid
from compare_engines import Child, ChildError, Rounds, llama_bench, note

from llmcl.architectures.config import ModelConfig
from llmcl.checkpoint import open_checkpoint
from llmcl.cli import options as opt
from llmcl.cli.command import run_script
from llmcl.cli.text_files import check_writable
from llmcl.errors import UsageError
from llmcl.models.random_shapes import random_shape_config, random_shape_json
from llmcl.runtime.selection import select_device
from llmcl.tools import json_text
from llmcl.tools.benchmark import decode_bytes

CHILD = Path(__file__).with_name("compare_gpu_child.py")
OURS, EAGER, COMPILED, LLAMA = "llmcl", "PyTorch eager", "PyTorch compiled", "llama.cpp"
CONTESTANTS = (OURS, EAGER, COMPILED, LLAMA)
MAX_ON_CPU = 200_000_000  # weights
BYTES_PER_WEIGHT = 2  # bfloat16

EPILOG = """\b
pp2048           2048 random tokens prefilled into an empty context
tg128            128 single-token steps from an empty context; `@ d8192`: after 8192 tokens, whose prefill is not timed
llmcl, llama.cpp wait for each token, and do not sample, as llama-bench; llama.cpp with flash attention, and the faster
                 of its micro-batches 512 and 2048
PyTorch          transformers, SDPA, greedy, one wait after all steps. eager: a cache that grows; compiled:
                 mode="reduce-overhead" and a static cache as long as the test needs, in prefill compiled layers
ratio            the contestant's time over llmcl's in the same turn, so above 1 llmcl is faster: median (least - most)
of ceiling       decode: weights and cached keys and values in 16 bits, over the time, over llmcl's streaming read;
                 prefill: operations of the products and of causal attention, over the time, over torch's 8192^3"""


@dataclass(frozen=True)
class Test:
    """A prefill of n tokens (depth None), or n decode steps after `depth` tokens."""

    n: int
    depth: int | None = None

    @property
    def name(self) -> str:
        if self.depth is None:
            return f"pp{self.n}"
        return f"tg{self.n} @ d{self.depth}" if self.depth else f"tg{self.n}"


@dataclass
class Contestant:
    """What one engine did: seconds by test and turn, who it is, and if so why it is missing or stopped."""

    seconds: dict[str, dict[int, float]] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    failure: str | None = None

    def add(self, test: Test, turn: int, seconds: float) -> None:
        self.seconds.setdefault(test.name, {})[turn] = seconds


@dataclass
class Plan:
    """What holds for all shapes. device: as the user names it; on_cpu: it is a CPU, so PyTorch uses that too."""

    tests: list[Test]
    rounds: int
    device: str | None
    on_cpu: bool
    limit_s: float
    contestants: Sequence[str] = CONTESTANTS
    llama_bench: Path | None = None

    @property
    def context(self) -> int:
        return max(test.n + (test.depth or 0) for test in self.tests)

    @property
    def decodes(self) -> list[tuple[int, int]]:
        return [(test.n, test.depth) for test in self.tests if test.depth is not None]

    @property
    def prompts(self) -> list[int]:
        return [test.n for test in self.tests if test.depth is None]


@dataclass
class Shape:
    """A shape, the contestants' processes and results on it, and the ceilings that were measured beside them."""

    name: str
    plan: Plan
    gguf: Path | None
    contestants: dict[str, Contestant]
    children: dict[str, Child] = field(default_factory=dict)
    ceilings: dict[str, float] = field(default_factory=dict)  # bandwidth in bytes/s, matrix_peak in operations/s
    facts: dict[str, Any] = field(default_factory=dict)

    @contextmanager
    def loaded(self) -> Iterator[None]:
        """Starts the processes and loads all models at once: what compiles for long does it beside the others."""
        names = [name for name, contestant in self.contestants.items() if name != LLAMA and contestant.failure is None]
        with ExitStack() as stack, ThreadPoolExecutor() as pool:
            for name in names:
                processors = os.sched_getaffinity(0)
                self.children[name] = Child(name, sys.executable, processors, CHILD, self.plan.limit_s)
                stack.callback(self.children[name].kill)
            list(pool.map(self._load, names))
            yield

    def _load(self, name: str) -> None:
        plan = self.plan
        if name == OURS:
            request: dict[str, Any] = {"path": self.name, "random": True, "options": {"dtype": "bfloat16"}}
            request |= {"context": plan.context, "device": plan.device, "threads": 0}
        else:
            request = {"config": random_shape_json(self.name), "device": "cpu" if plan.on_cpu else "cuda"}
            request |= {"n_prompt": plan.prompts, "decodes": plan.decodes}
        with self._failing(name):
            self.children[name].ask("load", **request)
            self.contestants[name].about = self.children[name].ask("about")

    @contextmanager
    def _failing(self, name: str) -> Iterator[None]:
        """A failure of a contestant is noted, and its process, which may be in any state, ended."""
        try:
            yield
        except ChildError as error:
            self.contestants[name].failure = str(error)
            note(f"{self.name}: {error}")
            if name in self.children:
                self.children[name].kill()

    def turn(self, turn: int) -> None:
        """Every contestant runs every test once; the order rotates. Turn 0 is a warm-up."""
        names = list(self.contestants)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            contestant = self.contestants[name]
            if contestant.failure is not None:
                continue
            with self._failing(name):
                if name == LLAMA:
                    if turn:  # llama-bench warms up itself
                        self._llama_turn(contestant, turn)
                    continue
                child = self.children[name]
                for test in self.plan.tests:
                    request = {"op": "prefill"} if test.depth is None else {"op": "decode", "depth": test.depth}
                    if test.depth is None:  # too short to wake the device up by itself
                        child.seconds(**request, n=test.n)
                    seconds = child.seconds(**request, n=test.n)
                    if turn:
                        contestant.add(test, turn, seconds)
                if turn:
                    self._measure_ceiling(name, child)

    def _measure_ceiling(self, name: str, child: Child) -> None:
        """The device's rates, measured in every turn; the best counts."""
        if name == OURS:
            self.facts = child.ask("facts")
            self._ceiling("bandwidth", self.facts["bandwidth"])
        elif not self.plan.on_cpu:
            self._ceiling("matrix_peak", child.ask("matrix_peak")["value"])

    def _ceiling(self, name: str, value: float) -> None:
        self.ceilings[name] = max(value, self.ceilings.get(name, 0.0))

    def _llama_turn(self, contestant: Contestant, turn: int) -> None:
        """One run of llama-bench; it loads the model once for all tests."""
        plan = self.plan
        assert plan.llama_bench is not None and self.gguf is not None
        rows = llama_bench(
            plan.llama_bench,
            self.gguf,
            n_prompt=plan.prompts,
            n_gen=[n for n, _ in plan.decodes],
            depths=[0, *(depth for _, depth in plan.decodes)],
            rounds=1,
            limit_s=plan.limit_s,
        )
        for test in plan.tests:
            key = (0, test.n, test.depth) if test.depth is not None else (test.n, 0, 0)
            found = [row for row in rows if (row["n_prompt"], row["n_gen"], row.get("n_depth", 0)) == key]
            if not found:
                raise ChildError(f"llama-bench gave no row for {test.name}; expected a build that knows -d")
            contestant.add(test, turn, min(ns for row in found for ns in row["samples_ns"]) / 1e9)
        build = f"llama.cpp {rows[0].get('build_commit', '')}"
        contestant.about = {"version": build, "model": rows[0]["model_type"], "device": rows[0].get("gpu_info", "")}

    # ---- results ----

    def rows(self) -> list[dict[str, Any]]:
        """One row a test and contestant that ran it in a whole turn."""
        config, ours = random_shape_config(self.name), self.contestants.get(OURS, Contestant()).seconds
        rows = []
        for test in self.plan.tests:
            for name, contestant in self.contestants.items():
                times = contestant.seconds.get(test.name)
                if not times:
                    continue
                seconds = statistics.median(times.values())
                pairs = [times[turn] / ours[test.name][turn] for turn in times if turn in ours.get(test.name, {})]
                rates = [test.n / value for value in times.values()]
                row: dict[str, Any] = {"shape": self.name, "test": test.name, "contestant": name}
                row |= {"seconds": list(times.values()), "ms_per_token": 1e3 * seconds / test.n}
                row |= {"tokens_per_s": test.n / seconds, "min": min(rates), "max": max(rates)}
                if pairs and name != OURS:
                    row |= {"ratio": statistics.median(pairs), "ratio_min": min(pairs), "ratio_max": max(pairs)}
                rows.append(row | self._share(config, test, name, seconds))
        return rows

    def _share(self, config: ModelConfig, test: Test, name: str, seconds: float) -> dict[str, Any]:
        """Of the bandwidth or of the matrix peak; none for quantised weights, whose bytes are fewer."""
        if name == LLAMA and not str(self.contestants[name].about["model"]).endswith(("BF16", "F16")):
            return {}
        if test.depth is None:
            peak = self.ceilings.get("matrix_peak")
            return {"of_matrix_peak": prefill_operations(config, test.n) / seconds / peak} if peak else {}
        bandwidth = self.ceilings.get("bandwidth")
        if not bandwidth:
            return {}
        position = 2 * BYTES_PER_WEIGHT * config.n_layers * config.n_kv_heads * config.head_dim
        n_bytes = decode_bytes(BYTES_PER_WEIGHT * streamed_weights(config), position, test.depth, test.n)
        return {"of_bandwidth": n_bytes / (seconds / test.n) / bandwidth}

    def to_dict(self) -> dict[str, Any]:
        about = {
            name: contestant.about | ({"failure": contestant.failure} if contestant.failure else {})
            for name, contestant in self.contestants.items()
        }
        return {
            "shape": self.name,
            "rows": self.rows(),
            "contestants": about,
            "ceilings": self.ceilings,
            "llmcl": self.facts,
        }


def streamed_weights(config: ModelConfig) -> int:
    """Weights that a decode step reads: all matrices; a separate embedding is only looked up."""
    lookup = 0 if config.tie_embeddings else config.vocab_size * config.hidden_size
    return config.n_parameters() - lookup


def prefill_operations(config: ModelConfig, n: int) -> float:
    """Additions and multiplications of n tokens: products of the layers, causal attention, the last token's logits."""
    head = config.vocab_size * config.hidden_size
    layers = streamed_weights(config) - head
    attention = 2 * config.n_layers * config.n_q_heads * config.head_dim * n * (n + 1) / 2  # Q K^T and P V
    return 2 * (layers * n + attention + head)


def batches(shapes: list[Shape], device_bytes: int) -> list[list[Shape]]:
    """All shapes at once where the copies of all contestants fit, so that all compile at once; otherwise one by one."""
    needed = 0
    for shape in shapes:
        copies = sum(contestant.failure is None for contestant in shape.contestants.values())
        needed += copies * BYTES_PER_WEIGHT * random_shape_config(shape.name).n_parameters()
    return [shapes] if 1.5 * needed < device_bytes else [[shape] for shape in shapes]


def compare(shapes: list[Shape], device_bytes: int) -> None:
    for batch in batches(shapes, device_bytes):
        with ExitStack() as stack, ThreadPoolExecutor() as pool:
            note(f"loading and compiling: {', '.join(shape.name for shape in batch)}")
            list(pool.map(lambda shape: stack.enter_context(shape.loaded()), batch))
            for shape in batch:
                for turn in range(shape.plan.rounds + 1):
                    note(f"{shape.name}: {f'turn {turn}' if turn else 'warm-up'}")
                    shape.turn(turn)


# ---- output ------------------------------------------------------------------------------------------------------


def markdown(results: list[dict[str, Any]]) -> str:
    """A table of all shapes, then who took part and the ceilings."""
    rows, notes = [], []
    for result in results:
        for row in result["rows"]:
            ceiling = next((key for key in ("of_bandwidth", "of_matrix_peak") if key in row), None)
            ratio = f"{row['ratio']:.2f}x ({row['ratio_min']:.2f} - {row['ratio_max']:.2f})" if "ratio" in row else ""
            rows.append(
                {
                    "shape": row["shape"],
                    "test": row["test"],
                    "contestant": row["contestant"],
                    "t/s (least - most)": f"{row['tokens_per_s']:.1f} ({row['min']:.1f} - {row['max']:.1f})",
                    "ms/token": f"{row['ms_per_token']:.4f}",
                    "ratio": ratio,
                    "of ceiling": f"{row[ceiling]:.1%} of {ceiling[3:].replace('_', ' ')}" if ceiling else "",
                }
            )
        for name, about in result["contestants"].items():
            said = [str(about[key]) for key in ("version", "model", "device") if about.get(key)]
            if "failure" in about:
                said.append(f"not measured to the end: {about['failure']}" if said else f"left out: {about['failure']}")
            notes.append(f"- {result['shape']}, {name}: {', '.join(said)}")
        bandwidth, peak = (result["ceilings"].get(name) for name in ("bandwidth", "matrix_peak"))
        read = f"{bandwidth / 1e9:.1f} GB/s" if bandwidth else "not measured"
        product = f"{peak / 1e12:.0f} TFLOP/s" if peak else "not measured (it needs PyTorch on the GPU)"
        notes.append(f"- {result['shape']}: streaming read {read}, bfloat16 product {product}")
    return (grid(rows) if rows else "nothing was measured\n") + "\n" + "\n".join(notes) + "\n"


# ---- command line ------------------------------------------------------------------------------------------------


def chosen_contestants(text: Any) -> tuple[str, ...]:
    short = {"llmcl": OURS, "eager": EAGER, "compiled": COMPILED, "llama.cpp": LLAMA}
    return tuple(short[opt.one_of(*short)(name)] for name in str(text).split(","))


def compare_gpu(
    random: Annotated[
        list[str], opt.measurement("--random", metavar="SHAPE", help="A shape, or a config.json; may be repeated.")
    ] = ["llama-3.2-1b", "llama-3.1-8b"],  # noqa: B006
    n_prompt: Annotated[
        Any, opt.measurement("-p", "--n-prompt", metavar="N,...", parser=opt.wholes(1), help="Prefill lengths.")
    ] = "2048",
    n_gen: Annotated[
        Any, opt.measurement("-n", "--n-gen", metavar="N,...", parser=opt.wholes(1), help="Decode lengths.")
    ] = "128",
    n_depth: Annotated[
        Any,
        opt.measurement("-d", "--n-depth", metavar="N,...", parser=opt.wholes(0), help="Context before the decodes."),
    ] = "0,8192",
    rounds: Rounds = 5,
    contestants: Annotated[
        Any, opt.measurement("--contestants", metavar="NAME,...", parser=chosen_contestants, help="Who takes part.")
    ] = "llmcl,eager,compiled,llama.cpp",
    bench: Annotated[
        Path | None,
        opt.measurement("--llama-bench", metavar="PATH", help="llama.cpp's llama-bench, built for the GPU."),
    ] = None,
    gguf: Annotated[
        list[Path],
        opt.measurement("--gguf", metavar="PATH", help="A file for it, of one of the shapes; may be repeated."),
    ] = [],  # noqa: B006
    limit: Annotated[
        float,
        opt.measurement(
            "--limit", metavar="SECONDS", min=1, help="A contestant that takes longer at a step is stopped."
        ),
    ] = 180.0,
    device: opt.Device = None,
    markdown_file: Annotated[Path | None, opt.written("--markdown", "the table")] = None,
    json_file: Annotated[Path | None, opt.written("--json", "an object")] = None,
) -> None:
    """Ratios of PyTorch and llama.cpp to llmcl on random bfloat16 weights, and the shares of the GPU's ceilings."""
    check_writable("--markdown", markdown_file)
    check_writable("--json", json_file)
    entry = select_device(device)
    tests = [Test(n) for n in n_prompt] + [Test(n, depth) for depth in n_depth for n in n_gen]
    plan = Plan(tests, rounds, device, entry.kind == "cpu", limit, contestants, bench)
    shapes = make_shapes(random, gguf, plan)
    compare(shapes, entry.global_mem_bytes)
    results = [shape.to_dict() for shape in shapes]
    print(markdown(results), end="", flush=True)
    if markdown_file is not None:
        markdown_file.write_text(markdown(results), encoding="utf-8")
    if json_file is not None:
        text = json_text.dumps({"device": entry.label, "rounds": rounds, "results": results})
        json_file.write_text(text + "\n", encoding="utf-8")


def make_shapes(names: Sequence[str], ggufs: Sequence[Path], plan: Plan) -> list[Shape]:
    """The shapes with their contestants; raises UsageError for what can be known to fail."""
    configs = {name: random_shape_config(name) for name in names}
    if plan.on_cpu:
        for name, config in configs.items():
            if config.n_parameters() > MAX_ON_CPU:
                raise UsageError(
                    f"--random {name} has {config.n_parameters() / 1e9:.1f} billion weights and the device is a CPU; "
                    "name a GPU with --device, take a small config.json, or use scripts/compare_llama_cpp.py"
                )
    files: dict[str, Path] = {}
    for path in ggufs:
        with open_checkpoint(str(path)) as checkpoint:
            found = sizes(checkpoint.config)
        matching = [name for name, config in configs.items() if sizes(config) == found]
        if not matching:
            expected = "; ".join(f"{name}: {sizes(config)}" for name, config in configs.items())
            raise UsageError(f"--gguf {path} has the sizes {found}; expected those of a --random shape, {expected}")
        files[matching[0]] = path
    shapes = []
    for name in configs:
        taking_part = {contestant: Contestant() for contestant in plan.contestants}
        if LLAMA in taking_part:
            if plan.llama_bench is None:
                taking_part[LLAMA].failure = "no --llama-bench PATH given"
            elif name not in files:
                taking_part[LLAMA].failure = f"no --gguf PATH of the shape {name} given"
        shapes.append(Shape(name, plan, files.get(name), taking_part))
    return shapes


def sizes(config: ModelConfig) -> dict[str, int]:
    names = ("n_layers", "hidden_size", "intermediate_size", "n_q_heads", "n_kv_heads", "head_dim", "vocab_size")
    return {name: getattr(config, name) for name in names}


if __name__ == "__main__":
    run_script(compare_gpu, EPILOG)
