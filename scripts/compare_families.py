#!/usr/bin/env python
"""Compares llmcl with llama.cpp on random models of each family that both run: one device, the same files, in turns.

The models are small ones, in the configurations of the tests (tests/family_configs.py), or have the published sizes of
real ones (--random). scripts/random_gguf.py writes their files. Each engine runs in a process of its own
(scripts/compare_child.py). On a GPU llama.cpp has all layers there, and as many models as fit are loaded at once: most
of the time goes to compilers and copies.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Annotated, Any

from compare_engines import (
    MICRO_BATCHES,
    ChildError,
    Engines,
    Format,
    LlamaPython,
    Rounds,
    Threads,
    Work,
    check_llama_python,
    in_turn,
    in_turn_with,
    llama_bench,
    note,
    processors_of,
)
from random_gguf import QUANTIZATIONS, stored_bytes, tensors_of, write_random

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from family_configs import FAMILIES
from helpers import small_config, with_blocks
from llama_cpp_configs import as_llama_cpp_reads

from llmcl.architectures.config import ModelConfig
from llmcl.architectures.families import FAMILIES as FAMILIES_OF_CHECKPOINTS
from llmcl.architectures.families.blocks import Attention, Experts, ExpertSettings
from llmcl.architectures.families.recurrent import DeltaNet
from llmcl.cli import options as opt
from llmcl.cli.command import run_script
from llmcl.errors import UsageError
from llmcl.models.random_shapes import RANDOM_SHAPES, random_shape_config
from llmcl.runtime.selection import select_device
from llmcl.tools.markdown import table

BASIS = "llama"  # what the other families are compared with
NAMES = (
    *(BASIS, "mistral", "ministral3", "smollm3", "granite", "phi3", "qwen2", "qwen3", "olmo2", "olmo3", "gemma2"),
    *("gemma3_text", "mixtral", "qwen3_moe", "olmoe", "granitemoe", "gpt_oss", "lfm2", "qwen3_5_text"),
    *("qwen3_5_moe_text", "qwen3_next"),
)
AIM = 0.85  # of the basis' ratio
OF_BASIS = f"of_{BASIS}"

HIDDEN, INTERMEDIATE, VOCAB, WINDOW = 768, 2048, 32768, 512
LAYERS, EXPERT_LAYERS = 16, 8
# Heads of queries, of keys and values, and their size, where a family's own are others.
HEADS = {"gemma2": (4, 2, 256), "gemma3_text": (4, 1, 256), "qwen3": (8, 4, 128), "qwen3_moe": (8, 4, 128)}
HEADS |= dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"), (4, 1, 256))
EXPERTS, FEW_EXPERTS = ExpertSettings(32, 4, 256), ExpertSettings(8, 2, 1024)

ON_GPU = {"n_gpu_layers": 999, "n_ubatch": MICRO_BATCHES[0]}
BESIDE_WEIGHTS = 4e9  # bytes that both engines take of a GPU beside the weights of a model
LIMIT_S = 120.0  # for an answer of a process

EPILOG = f"""\b
parameters    of all, and of those that a token needs
prefill       random tokens, tokens a second: median of the turns; llama.cpp on a GPU with the faster of its
              micro-batches {" and ".join(map(str, MICRO_BATCHES))}; llama-bench runs all its turns at once
decode        single-token steps from an empty context, no sampling, as llama-bench
ratio         llama.cpp's time over llmcl's in the same turn: median (least - most)
of llama      that ratio over the one of the family llama, on a CPU in the same turn (median); aimed at: {AIM}
of bandwidth  bytes that llmcl's decode step reads, over its time, over a streaming read in the same run"""


@dataclass(frozen=True)
class Model:
    """What is compared: a family or a shape, written with weights of a format."""

    name: str
    config: ModelConfig
    quantization: str

    @property
    def file_name(self) -> str:
        return f"{self.name}-{self.quantization}.gguf"

    def nbytes(self) -> int:
        return sum(stored_bytes(*tensor) for tensor in tensors_of(self.config, self.quantization).values())


@dataclass(frozen=True)
class Plan:
    engines: Engines
    folder: Path
    n_prompt: int
    n_gen: int
    rounds: int
    on_gpu: bool
    device_bytes: int
    keep_files: bool
    bench: Path | None = None

    @property
    def tests(self) -> dict[str, tuple[int, dict[str, int]]]:
        """Of each test its tokens, and what a process is asked with."""
        return {
            "prefill": (self.n_prompt, {"n": self.n_prompt}),
            "decode": (self.n_gen, {"n": self.n_gen, "depth": 0}),
        }


def config_of(name: str) -> ModelConfig:
    """The family in the sizes of a small model, with 120 million parameters or more."""
    small = small_config(tie_embeddings=True) if name == BASIS else FAMILIES[name]
    mixtures = [block.settings for layer in small.layers for block in layer if isinstance(block, Experts)]
    experts = FEW_EXPERTS if name == "mixtral" else EXPERTS

    def change(block: Any) -> dict[str, Any]:
        if isinstance(block, Attention):
            return {"window": None if block.window is None else WINDOW}
        if isinstance(block, Experts):
            shared = experts.size if block.settings.shared_size else 0
            return {"settings": replace(experts, renormalize=block.settings.renormalize, shared_size=shared)}
        if isinstance(block, DeltaNet):
            return {"settings": replace(block.settings, n_k=4, n_v=8, d_k=128, d_v=128, length=4)}
        return {}

    q, kv, size = HEADS.get(name, (12, 4, 64))
    of_experts = any(one.size == small.intermediate_size for one in mixtures)  # the format has one number for both
    scaled = FAMILIES_OF_CHECKPOINTS[small.architecture].scaled_embedding
    layers = with_blocks(small, change).layers
    config: ModelConfig = as_llama_cpp_reads(
        replace(
            small,
            layers=tuple(islice(cycle(layers), EXPERT_LAYERS if mixtures else LAYERS)),
            hidden_size=HIDDEN,
            intermediate_size=experts.size if of_experts else INTERMEDIATE,
            n_q_heads=q,
            n_kv_heads=kv,
            head_dim=size,
            rotary_dim=small.rotary_dim and size // 4 * (3 if name == "phi3" else 1),
            vocab_size=VOCAB,
            max_position=4096,
            tie_embeddings=True,
            embedding_scale=HIDDEN**0.5 if scaled else small.embedding_scale,
        )
    )
    return config


def batches(models: Sequence[Model], plan: Plan) -> Iterator[list[Model]]:
    """Models that are loaded at once, one on a CPU; in their order."""
    batch: list[Model] = []
    taken = 0.0
    for model in models:
        needed = 2 * model.nbytes() + BESIDE_WEIGHTS
        if batch and (not plan.on_gpu or taken + needed > 0.9 * plan.device_bytes):
            yield batch
            batch, taken = [], 0.0
        batch.append(model)
        taken += needed
    if batch:
        yield batch


class Bench:
    """llama-bench in place of a process: when it is first asked it runs all tests, each as often as there are turns."""

    engine = "llama.cpp"

    def __init__(self, binary: Path, path: Path, plan: Plan):
        self._how: dict[str, Any] = {"n_prompt": [plan.n_prompt], "n_gen": [plan.n_gen], "depths": [0]}
        self._binary, self._path, self._rounds = binary, path, plan.rounds
        self._micro_batch = MICRO_BATCHES[0]
        self._rows: list[dict[str, Any]] = []
        self._asked: dict[tuple[str, int], int] = {}

    def ask(self, op: str, n: int) -> None:
        self._micro_batch = n

    def seconds(self, op: str, **arguments: Any) -> float:
        """Of a turn; in the first, which is a warm-up, those of the last."""
        if not self._rows:
            how = {**self._how, "rounds": self._rounds, "limit_s": LIMIT_S}
            self._rows = llama_bench(self._binary, self._path, **how)
        of_op = [row for row in self._rows if (row["n_gen"] == 0) == (op == "prefill")]
        (row,) = (row for row in of_op if row["n_ubatch"] == self._micro_batch)
        turn = self._asked.get((op, self._micro_batch), 0)
        self._asked[op, self._micro_batch] = turn + 1
        return float(row["samples_ns"][turn - 1]) / 1e9


@contextmanager
def loaded(model: Model, plan: Plan) -> Iterator[dict[str, Any]]:
    """A process of each engine with the model; llama.cpp's may be a `Bench`."""
    path = plan.folder / model.file_name
    if not path.exists():
        note(f"{model.name}: random weights")
        write_random(path, model.config, model.quantization)
    with ExitStack() as stack:
        names = ("llama.cpp", "llmcl") if plan.bench is None else ("llmcl",)
        both: dict[str, Any] = {name: stack.enter_context(plan.engines.child(name)) for name in names}
        for name, child in both.items():
            options = ON_GPU if plan.on_gpu and name == "llama.cpp" else {}
            plan.engines.load(child, path, plan.n_prompt + plan.n_gen, **options)
        if plan.bench is not None:
            both["llama.cpp"] = Bench(plan.bench, path, plan)
        elif not plan.keep_files:
            path.unlink()  # both have read it
        yield both
    if not plan.keep_files:
        path.unlink(missing_ok=True)


def measure(both: dict[str, Any], plan: Plan, basis: dict[str, Any] | None = None) -> dict[str, Any]:
    """Prefill and decode of both engines. basis: the same of BASIS, which is measured in the same turns."""
    models = [both] if basis is None else [both, basis]
    found = {test: in_turn_with(models, test, plan.rounds, **arguments) for test, (_, arguments) in plan.tests.items()}
    if plan.on_gpu:
        both["llama.cpp"].ask("set_micro_batch", n=MICRO_BATCHES[1])
        other = in_turn(both, "prefill", plan.rounds, n=plan.n_prompt)
        found["prefill"] = [min(found["prefill"][0], other, key=lambda pairs: statistics.median(pairs.peer))]
    result: dict[str, Any] = {}
    for test, (pairs, *of_basis) in found.items():
        result[test] = pairs.to_dict(plan.tests[test][0])
        for other in of_basis:
            shares = [ratio / beside for ratio, beside in zip(pairs.ratios, other.ratios, strict=True)]
            result[test][OF_BASIS] = statistics.median(shares)
    facts = both["llmcl"].ask("facts")
    n_bytes = facts["weight_bytes"] + facts["kv_bytes_per_position"] * (plan.n_gen + 1) / 2
    step = result["decode"]["llmcl"] / plan.n_gen
    return result | {"of_bandwidth": n_bytes / step / facts["bandwidth"], "device": facts["device"]}


def compare(models: Sequence[Model], plan: Plan) -> Iterator[tuple[Model, dict[str, Any]]]:
    """The results, each as soon as it is there. A model that an engine does not run is left out.

    On a CPU the memory's speed changes from second to second, so BASIS stays loaded for the turns of the others.
    """
    with ExitStack() as beside:
        basis: dict[str, Any] | None = None
        for batch in batches(models, plan):
            with ExitStack() as stack, ThreadPoolExecutor() as pool:
                keep = not plan.on_gpu and batch[0].name == BASIS
                contexts = [(model, loaded(model, plan)) for model in batch]
                enter = (beside if keep else stack).enter_context
                loading = [(model, pool.submit(enter, context)) for model, context in contexts]
                for _, future in loading:
                    future.exception()  # nothing is measured beside a compiler
                for model, future in loading:
                    try:
                        both = future.result()
                        result = measure(both, plan, basis)
                    except ChildError as error:
                        note(f"{model.name} is left out: {error}")
                        continue
                    basis = both if keep else basis
                    note(f"{model.name}: {', '.join(said(test, result[test]) for test in plan.tests)}")
                    yield model, result


def said(test: str, values: dict[str, Any]) -> str:
    """A test's result in a line that is there before the table."""
    ours, peer = (values[f"{engine}_tokens_per_s"] for engine in ("llmcl", "llama.cpp"))
    of_basis = f", {values[OF_BASIS]:.2f} of {BASIS}'s" if OF_BASIS in values else ""
    return f"{test} {ours:.1f} / {peer:.1f} t/s, {values['ratio']:.2f}x{of_basis}"


def markdown(results: dict[str, dict[str, Any]], tests: Sequence[str]) -> str:
    """A row for each model."""
    basis = results.get(BASIS)
    header = ["model", "parameters"]
    for test in tests:
        header += [f"{test}, llama.cpp t/s", "llmcl t/s", "ratio"] + ([] if basis is None else ["of llama"])
    lines = []
    for name, result in results.items():
        cells = [name, f"{result['parameters'] / 1e6:.0f} M, {result['needed'] / 1e6:.0f} M"]
        for test in tests:
            values = result[test]
            cells += [f"{values[f'{engine}_tokens_per_s']:.1f}" for engine in ("llama.cpp", "llmcl")]
            cells.append(f"{values['ratio']:.2f}x ({values['ratio_min']:.2f} - {values['ratio_max']:.2f})")
            if basis is not None:
                cells.append(f"{values.get(OF_BASIS, values['ratio'] / basis[test]['ratio']):.2f}")
        lines.append([*cells, f"{result['of_bandwidth']:.0%}"])
    header.append("of bandwidth")
    return "\n".join(table("l" + "r" * (len(header) - 1), header, lines)) + "\n"


def needed_parameters(config: ModelConfig) -> int:
    """Those that a token needs: of experts the chosen ones."""
    of = [block.settings for layer in config.layers for block in layer if isinstance(block, Experts)]
    return config.n_parameters() - sum(3 * (one.n_experts - one.top_k) * one.size * config.hidden_size for one in of)


def names_of(text: Any) -> Sequence[str]:
    names = tuple(str(text).split(","))
    if unknown := [name for name in names if name not in NAMES]:
        raise UsageError(f"--families has {', '.join(unknown)}; expected some of {', '.join(NAMES)}")
    return names


def models_of(families: str, shapes: Sequence[str], quantization: str) -> list[Model]:
    """Of the shapes if there are any; SHAPE=FORMAT is one with weights of that format."""
    if not shapes:
        return [Model(name, config_of(name), quantization) for name in names_of(families)]
    found = []
    for shape in shapes:
        name, _, own = shape.partition("=")
        format = opt.one_of(*QUANTIZATIONS)(own) if own else quantization
        found.append(Model(name if name in RANDOM_SHAPES else Path(name).stem, random_shape_config(name), str(format)))
    return found


def compare_families(
    families: Annotated[
        str,
        opt.measurement(
            "--families", metavar="NAME,...", help=f"Of {', '.join(NAMES)}; left out: all.", show_default=False
        ),
    ] = ",".join(NAMES),
    random: Annotated[
        list[str],
        opt.measurement(
            "--random",
            metavar="SHAPE[=FORMAT]",
            help="In place of families a real shape or a config.json, in --quantization or its own; may be repeated.",
        ),
    ] = [],  # noqa: B006
    quantization: Annotated[
        Any,
        opt.measurement(
            "--quantization",
            metavar="FORMAT",
            parser=opt.one_of(*QUANTIZATIONS),
            help=f"{', '.join(QUANTIZATIONS)} (of experts alone).",
        ),
    ] = "Q4_0",
    n_prompt: Annotated[
        int, opt.measurement("-p", "--n-prompt", metavar="N", min=1, help="Tokens of the prefill.")
    ] = 512,
    n_gen: Annotated[int, opt.measurement("-n", "--n-gen", metavar="N", min=1, help="Steps of the decode.")] = 64,
    llama_python: LlamaPython = sys.executable,
    bench: Annotated[
        Path | None,
        opt.measurement("--llama-bench", metavar="PATH", help="On a GPU llama-bench in place of --llama-python."),
    ] = None,
    rounds: Rounds = 5,
    threads: Threads = None,
    work: Work = None,
    device: opt.Device = None,
    format: Format = "md",
) -> None:
    """Ratios of llmcl to llama.cpp on random models, family by family."""
    models = models_of(families, random, quantization)
    entry = select_device(device or "cpu")
    if bench is None:
        check_llama_python(llama_python)
    elif entry.kind == "cpu":
        raise UsageError(f"--llama-bench {bench} is for a GPU, the device is {entry.label}; give --llama-python")
    engines = Engines(llama_python, processors_of(threads), str(entry.index), {}, limit_s=LIMIT_S)
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = work or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        on_gpu = entry.kind != "cpu"
        plan = Plan(engines, folder, n_prompt, n_gen, rounds, on_gpu, entry.global_mem_bytes, work is not None, bench)
        for model, measured in compare(models, plan):
            sizes = {"parameters": model.config.n_parameters(), "needed": needed_parameters(model.config)}
            name = model.name if not random else f"{model.name} {model.quantization}"
            results[name] = sizes | measured
    print(json.dumps(results) if format == "json" else markdown(results, [*plan.tests]), end="\n" * (format == "json"))


if __name__ == "__main__":
    run_script(compare_families, EPILOG)
