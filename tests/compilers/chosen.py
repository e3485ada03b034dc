"""Which kernels a device would compile for the models of shapes.py and for flex_attention: sources and constants."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np

from compilers.recording import RecordingDevice, ShapeCheckpoint
from compilers.shapes import DTYPES, KV_DTYPES, MODELS, PAGE_TOKENS, Stored, stored_models
from llmcl.attention import and_masks, create_block_mask, flex_attention
from llmcl.attention.masks import alibi, causal, document, sliding_window, soft_cap
from llmcl.kernels.intel import matrix_mad
from llmcl.kernels.portable import dot_product
from llmcl.models.batch import Batch
from llmcl.models.kv_cache import KVCache
from llmcl.models.layer_mods import trace_layer_mods
from llmcl.models.memory import exact_queries
from llmcl.models.model import Model
from llmcl.models.paged_kv_cache import PagedKVCache
from llmcl.models.weights import WeightTypes, load_weights, random_types, random_weights, stored_formats
from llmcl.ops.log_likelihood import kl_divergence, log_likelihood
from llmcl.ops.sample import SamplingParams
from llmcl.runtime import sub_groups
from llmcl.runtime.device_probe import PROBE
from llmcl.runtime.platforms import DeviceEntry
from llmcl.runtime.program import KernelSource, constant_text, read_source
from llmcl.runtime.roofline import arithmetic_peak, read_bandwidth
from llmcl.speculation.verification import Verification

CONTEXT = 8192
SEQUENCES, STEP_ROWS = 8, 256  # of a batch, and rows of a step with prompts
DECODE, PREFILL, LOAD, ATTENTION, TOOLS = "decode", "prefill", "load", "flex_attention", "tools"
USES = (DECODE, PREFILL, LOAD, ATTENTION, TOOLS)  # where two use a program, the first counts
WORD = re.compile(r"[A-Za-z_]\w*")
# Build constants that say what a kernel does; of those that are left, sizes, a kind of kernel has many.
TYPES = ("FORMAT", "FROM", "TO", "WEIGHT", "KV")
SWITCHES = {
    "NORM": "norm",
    "ADD": "add",
    "BIAS": "bias",
    "HEAD_NORM": "head norms",
    "KV_BLOCK_RANGES": "runs",
    "LSE": "lse",
}


@dataclass
class Program:
    """What is compiled at once. kernels: use by name of those that are launched. models: for which, in order."""

    file: str
    constants: dict[str, object]
    prelude: str
    kernels: dict[str, str] = field(default_factory=dict)
    models: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return self.prelude + read_source(self.file)

    def kind(self, kernel: str) -> str:
        """What the kernel does, in a few words: a row of the table."""
        given, stem = self.constants, Path(self.file).stem
        words = ["intel"] if self.file.startswith("intel/") else []
        words += [stem if kernel == stem or kernel in stem else kernel]
        words += [str(given[name]) for name in TYPES if name in given]
        if "GROUP_SIZE" in given or "DV_TILE" in given:
            words += [str(given[name]) for name in ("HEAD_DIM", "GROUP_SIZE") if name in given]
        words += [str(given[name]).partition("_")[2].lower() for name in ("EPILOGUE", "GATE") if name in given]
        words += [word for name, word in SWITCHES.items() if given.get(name)]
        words += ["int8"] if "DOT" in given else []
        words += ["paged"] if "KV_PAGE" in given else []
        words += ["several sequences"] if "RECORDS" in given else []
        words += ["one split"] if given.get("N_SPLITS") == 1 else []
        return " ".join(
            [*words, *(name.lower() for name in ("MASK_MOD", "SCORE_MOD") if f"HAS_{name}" in self.prelude)]
        )

    @property
    def options(self) -> tuple[str, ...]:
        return tuple(f"-D{name}={constant_text(value)}" for name, value in sorted(self.constants.items()))


class Collection:
    """The programs of one device, each once, whatever constants it is given that its text does not name."""

    def __init__(self) -> None:
        self.programs: dict[tuple[object, ...], Program] = {}
        self._of_source: dict[tuple[object, ...], Program] = {}

    def add(self, model: str, use: str, sources: Iterable[KernelSource]) -> None:
        for source in sources:
            given = (source.file, source.prelude, *source.constants.items())
            if given not in self._of_source:  # most are those of a launch before
                self._of_source[given] = self._program(source)
            program = self._of_source[given]
            before = program.kernels.get(source.name, USES[-1])
            program.kernels[source.name] = min(before, use, key=USES.index)
            if model not in program.models:
                program.models.append(model)

    def _program(self, source: KernelSource) -> Program:
        words = _words(source.file) | set(WORD.findall(source.prelude))
        constants = {name: value for name, value in source.constants.items() if name in words}
        key = (source.file, source.prelude, *sorted((name, constant_text(v)) for name, v in constants.items()))
        return self.programs.setdefault(key, Program(source.file, constants, source.prelude))


@cache
def _words(file: str) -> frozenset[str]:
    return frozenset(WORD.findall(read_source(file)))


def programs_of(entry: DeviceEntry) -> list[Program]:
    """Everything that a device of this description would compile, the preferred model's first."""
    found = Collection()
    for stored in stored_models():
        _load_and_run(found, entry, stored)
    for name, sources in _flex_calls(entry):
        found.add(name, ATTENTION, sources)
    found.add("every model", TOOLS, _tools(entry))
    return [*found.programs.values()]


def _load_and_run(found: Collection, entry: DeviceEntry, stored: Stored) -> None:
    device, config, name = RecordingDevice(entry), stored.config(), f"{stored.model} {stored.dtype}"
    checkpoint = ShapeCheckpoint(config, stored.format, from_gguf=stored.from_gguf)
    types = WeightTypes("native", stored_formats(checkpoint)) if stored.from_gguf else WeightTypes(stored.dtype)
    weights = load_weights(device, checkpoint, types)
    found.add(name, LOAD, device.take())
    for kv_dtype in KV_DTYPES:
        for page_tokens in PAGE_TOKENS:
            exact = exact_queries(types, kv_dtype)
            if page_tokens is None:
                cache = KVCache(device, config, CONTEXT, kv_dtype, exact_queries=exact)
            else:
                cache = PagedKVCache(device, config, CONTEXT, kv_dtype, page_tokens, exact_queries=exact)
            mods = trace_layer_mods(config, CONTEXT).bind(device)
            model = Model(device, config, weights, cache, logit_rows=SEQUENCES, mods=mods)
            decode = [*model.decode_launches]
            for params in (
                SamplingParams(),
                SamplingParams(temperature=0.8, top_k=40, logit_bias={1: 1.0}, logprobs=5),
                SamplingParams(dry_multiplier=0.8),
            ):
                model.sampler.configure(params)
                decode += model.sampler.launches
            found.add(name, DECODE, [launch.source for launch in decode if isinstance(launch.source, KernelSource)])
            for _ in model.logit_chunks(model.cache.sequence(), [1, 2]):
                break
            logits = model.act.logits
            log_likelihood(device, config.vocab_size, logits, logits, logits)
            kl_divergence(device, config.vocab_size, logits, logits, logits)
            found.add(name, PREFILL, device.take())
            if isinstance(cache, PagedKVCache) and kv_dtype == KV_DTYPES[0]:
                of_steps = Model(device, config, weights, cache, logit_rows=SEQUENCES, step_rows=STEP_ROWS, mods=mods)
                batch = Batch(of_steps, SEQUENCES, STEP_ROWS)
                decode = [*batch.decode_launches, *batch.sampler.every_launch]
                found.add(name, DECODE, [launch.source for launch in decode if isinstance(launch.source, KernelSource)])
                found.add(name, PREFILL, device.take())
                if cache.states is None:
                    Verification(model)
                found.add(name, PREFILL, device.take())


def _tools(entry: DeviceEntry) -> list[KernelSource]:
    """What tries a device, measures its ceilings, and makes random weights."""
    device, config = RecordingDevice(entry), Stored(MODELS[0], DTYPES[0]).config()
    read_bandwidth(device)
    arithmetic_peak(device)
    for dtype in DTYPES:
        random_weights(device, config, random_types(config, dtype))
    probes = [KernelSource(PROBE, "device_probe", {"SALT": 1})]
    if form := sub_groups.listed(entry):
        constants = {"SUB_GROUP": form, "LOCAL_SIZE": 1 << sub_groups.BITS, "BITS": sub_groups.BITS}
        probes.append(KernelSource(sub_groups.PROBE, "sub_group_probe", constants))
    if form := dot_product.listed(entry):
        probes.append(KernelSource(dot_product.PROBE, "dot4_probe", {"DOT": form}))
    if form := matrix_mad.matrix_form(entry):
        probes += [
            KernelSource(matrix_mad.PROBE, "matrix_probe", {"WEIGHT": weight, "MATRIX": form})
            for weight in ("bf16", "f16")
        ]
    return [*probes, *device.take()]


def _flex_calls(entry: DeviceEntry) -> Iterator[tuple[str, list[KernelSource]]]:
    """flex_attention on arrays of several types and widths, with the mods that people use."""
    documents = np.repeat(np.arange(4, dtype=np.int32), 64)
    calls = {
        "plain": (None, None),
        "causal": (None, causal),
        "window and soft cap": (soft_cap(30.0), sliding_window(64)),
        "ALiBi": (alibi(4), causal),
        "documents": (None, and_masks(causal, document(documents))),
    }
    for label, (score_mod, mask_mod) in calls.items():
        for width in (64, 72, 128, 256):
            if width in (72, 256) and label not in ("plain", "causal"):
                continue
            for kv_dtype in (np.float16, np.float32):
                device = RecordingDevice(entry)
                query = np.zeros((1, 4, 256, width), np.float32)
                key = np.zeros((1, 2, 256, width), kv_dtype)
                mask = None if mask_mod is None else create_block_mask(mask_mod, None, None, 256, 256)
                flex_attention(
                    query, key, key, score_mod, mask, enable_gqa=True, return_lse=label == "plain", device=device
                )
                yield f"{label}, {width} wide", device.take()
