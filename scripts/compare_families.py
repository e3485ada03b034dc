#!/usr/bin/env python
"""Compares llmcl with llama.cpp on a small random model of each family that both run: a CPU, one run, the same GGUF
files.

The configurations are those of the tests (tests/family_configs.py) in the sizes of a small model, written as the
converter of llama.cpp would (tests/family_files.py); its quantiser makes the files. The two take turns, each in a
process of its own (scripts/compare_child.py).
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import cycle, islice
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

from compare_engines import (
    ChildError,
    Engines,
    Format,
    LlamaPython,
    Work,
    check_llama_python,
    in_turn,
    make_file,
    note,
    processors_of,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from family_configs import FAMILIES
from family_files import save_gguf
from helpers import random_weights, small_config, with_blocks
from llama_cpp_configs import as_llama_cpp_reads

from llmcl.cli import options as opt
from llmcl.cli.command import run_script
from llmcl.errors import UsageError
from llmcl.models.config import ModelConfig
from llmcl.models.families import FAMILIES as FAMILIES_OF_CHECKPOINTS
from llmcl.models.families.blocks import Attention, Experts, ExpertSettings
from llmcl.models.families.recurrent import DeltaNet
from llmcl.tools.markdown import table

BASIS = "llama"  # what the other families are compared with
NAMES = (
    *(BASIS, "mistral", "ministral3", "smollm3", "granite", "phi3", "qwen2", "qwen3", "olmo2", "olmo3", "gemma2"),
    *("gemma3_text", "mixtral", "qwen3_moe", "olmoe", "granitemoe", "gpt_oss", "lfm2", "qwen3_5_text"),
    *("qwen3_5_moe_text", "qwen3_next"),
)
PREFILL, DECODE = 512, 64
TESTS: dict[str, tuple[int, dict[str, int]]] = {
    "prefill": (PREFILL, {"n": PREFILL}),
    "decode": (DECODE, {"n": DECODE, "depth": 0}),
}
AIM = 0.85  # of the basis' ratio

HIDDEN, INTERMEDIATE, VOCAB, WINDOW = 768, 2048, 32768, 512
LAYERS, EXPERT_LAYERS = 16, 8
# Heads of queries, of keys and values, and their size, where a family's own are others.
HEADS = {"gemma2": (4, 2, 256), "gemma3_text": (4, 1, 256), "qwen3": (8, 4, 128), "qwen3_moe": (8, 4, 128)}
HEADS |= dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"), (4, 1, 256))
EXPERTS, FEW_EXPERTS = ExpertSettings(32, 4, 256), ExpertSettings(8, 2, 1024)

EPILOG = f"""\b
parameters    of all, and of those that a token needs
prefill       512 random tokens, tokens a second: median of the turns
decode        64 single-token steps from an empty context, no sampling, as llama-bench
ratio         llama.cpp's time over llmcl's in the same turn: median (least - most)
of llama      that ratio over the one of the family llama in this run; aimed at: {AIM}"""


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


def write_random(path: Path, name: str) -> None:
    part = path.with_suffix(".part")
    config = config_of(name)
    save_gguf(part, config, random_weights(config, seed=0))
    part.replace(path)


def file_of(name: str, format: str, folder: Path, engines: Engines) -> Path:
    """The family's model in `format`. A process of its own makes the weights, which takes a gigabyte."""
    found = sorted(folder.glob(f"{name}-[0-9]*-{format}.gguf"))
    if found:
        return found[0]
    source = folder / f"{name}-F32.gguf"
    note(f"{name}: random weights")
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as elsewhere:
        elsewhere.submit(write_random, source, name).result()
    path = make_file(source, format, folder, name, engines)
    source.unlink()
    return path


def compare(path: Path, engines: Engines, rounds: int) -> dict[str, Any]:
    """Prefill and decode of both engines on a file."""
    with engines.child("llama.cpp") as peer, engines.child("llmcl") as ours:
        both = {"llama.cpp": peer, "llmcl": ours}
        for child in both.values():
            engines.load(child, path, PREFILL + DECODE)
        return {test: in_turn(both, test, rounds, **arguments).to_dict(per) for test, (per, arguments) in TESTS.items()}


def markdown(results: dict[str, dict[str, Any]]) -> str:
    """A row for each family."""
    header = ["family", "parameters"]
    for test in TESTS:
        header += [f"{test}, llama.cpp t/s", "llmcl t/s", "ratio", "of llama"]
    basis = results.get(BASIS)
    lines = []
    for name, result in results.items():
        cells = [name, f"{result['parameters'] / 1e6:.0f} M, {result['needed'] / 1e6:.0f} M"]
        for test in TESTS:
            values = result[test]
            cells += [f"{values[f'{engine}_tokens_per_s']:.1f}" for engine in ("llama.cpp", "llmcl")]
            cells.append(f"{values['ratio']:.2f}x ({values['ratio_min']:.2f} - {values['ratio_max']:.2f})")
            cells.append("" if basis is None else f"{values['ratio'] / basis[test]['ratio']:.2f}")
        lines.append(cells)
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


def compare_families(
    families: Annotated[
        str, opt.measurement("--families", metavar="NAME,...", help=f"Of {', '.join(NAMES)}; left out: all.")
    ] = ",".join(NAMES),
    quantization: Annotated[str, opt.measurement("--quantization", metavar="NAME", help="llama.cpp's name.")] = "Q4_0",
    llama_python: LlamaPython = sys.executable,
    rounds: Annotated[int, opt.measurement("-r", "--rounds", metavar="N", min=1, help="Turns, after a warm-up.")] = 5,
    threads: Annotated[
        int | None, opt.measurement("-t", "--threads", metavar="N", min=1, help="Processors for each; left out: all.")
    ] = None,
    work: Work = None,
    device: opt.Device = None,
    format: Format = "md",
) -> None:
    """Ratios of llmcl to llama.cpp on small random models, family by family."""
    names = names_of(families)
    check_llama_python(llama_python)
    engines = Engines(llama_python, processors_of(threads), device or "cpu", {})
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = work or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            try:
                path = file_of(name, quantization, folder, engines)
                note(f"{name}: {path.name}")
                measured = compare(path, engines, rounds)
            except ChildError as error:
                note(f"{name} is left out: {error}")
                continue
            config = config_of(name)
            results[name] = {"parameters": config.n_parameters(), "needed": needed_parameters(config), **measured}
    print(json.dumps(results) if format == "json" else markdown(results), end="\n" if format == "json" else "")


if __name__ == "__main__":
    run_script(compare_families, EPILOG)
