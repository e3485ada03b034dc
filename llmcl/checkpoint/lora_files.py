"""Reads the files of LoRA adapters: PEFT folders, and GGUF files of llama.cpp's convert_lora_to_gguf.py.

PEFT   adapter_config.json, and adapter_model.safetensors with base_model.model.MODULE.lora_A.weight and lora_B.weight
GGUF   general.type adapter, adapter.type lora, adapter.lora.alpha, and tensors NAME.lora_a and NAME.lora_b
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmcl.architectures.config import ModelConfig
from llmcl.architectures.families import FAMILIES
from llmcl.architectures.families.family import Family
from llmcl.checkpoint.files import read_json, read_view
from llmcl.checkpoint.formats import FORMATS, dequantize, row_bytes
from llmcl.checkpoint.gguf import model_names, read_gguf
from llmcl.checkpoint.safetensors import TEXT_PREFIXES, read_file_tensors
from llmcl.checkpoint.tensors import StoredTensor
from llmcl.errors import CheckpointError, UnsupportedModelError, shown

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_FACTOR = re.compile(r"(.+)\.lora_([AB])(?:\.default)?\.weight")
_SPECIAL = {  # kinds of tensors beside A and B, by a part of their names
    ".lora_magnitude_vector": "a DoRA adapter (use_dora)",
    ".lora_embedding_": "an adapter of the token embedding",
    ".lora_B.bias": "an adapter with a bias (lora_bias)",
    ".lora_ga.": "a LoRA-GA adapter",
    ".experts.": "an adapter of experts",
    ".base_layer.": "an adapter of parameters (target_parameters)",
}
# Settings that change more than llmcl applies, with the values that turn them off.
_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "use_dora": (None, False),
    "use_qalora": (None, False),
    "lora_bias": (None, False),
    "bias": (None, "none"),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
    "use_bdlora": (None, False, {}),
    "kasa_config": (None, {}),
    "monteclora_config": (None, {}),
    "arrow_config": (None, {}),
    "velora_config": (None, {}),
}
_REFUSED_NAMES = {"use_dora": "DoRA (use_dora)", "alora_invocation_tokens": "activated LoRA (alora_invocation_tokens)"}
_ENDLESS = (")*", ")+", "){", "++", "**", "*+")  # parts of patterns that may take a very long time
_LONGEST_PATTERN = 200


@dataclass(frozen=True)
class Factors:
    """A stored pair of matrices."""

    stored: str  # name in the file, for messages
    tensors: Sequence[str]  # the model's tensors that B's rows change, in order
    a: np.ndarray  # float32 [rank, k]
    b: np.ndarray  # float32 [rows, rank]
    scale: float  # alpha / rank


@dataclass(frozen=True)
class Source:
    """An adapter's contents."""

    factors: Sequence[Factors]
    interleaves_rope: bool  # rotary pairs are neighbouring rows of B
    hint: str  # names the base model that the files mention; "" if they do not


def read_adapter(path: Path, config: ModelConfig) -> Source:
    """Reads a folder or a file. Raises CheckpointError or UnsupportedModelError."""
    family = FAMILIES[config.architecture]
    return _read_folder(path, family) if path.is_dir() else _read_file(path, config, family)


def _read_folder(folder: Path, family: Family) -> Source:
    names = {path.name for path in folder.iterdir()}
    if CONFIG_FILE not in names:
        raise CheckpointError(
            f"the folder has no {CONFIG_FILE}. Give the folder that PEFT's save_pretrained wrote, or a GGUF file."
        )
    if WEIGHTS_FILE not in names:
        pickles = (
            "; adapter_model.bin is a pickle file, which can run code when read, so llmcl never reads it"
            if "adapter_model.bin" in names
            else ""
        )
        raise CheckpointError(
            f"the folder has no {WEIGHTS_FILE}{pickles}. Save it again with PEFT (model.save_pretrained(folder))."
        )
    settings = read_json(folder / CONFIG_FILE)
    if (kind := settings.get("peft_type")) != "LORA":
        raise UnsupportedModelError(
            f"{CONFIG_FILE} has the peft_type {shown(kind)}, expected 'LORA', the only kind that llmcl applies."
        )
    for key, off in _REFUSED.items():
        if (value := settings.get(key)) not in off:
            raise UnsupportedModelError(
                f"{CONFIG_FILE} has {_REFUSED_NAMES.get(key, key)}: {shown(value)}, which llmcl does not apply. "
                "Use a plain LoRA adapter, or merge this one into its model (in PEFT: model.merge_and_unload())."
            )
    stored = read_file_tensors(folder / WEIGHTS_FILE)
    pairs: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in stored.items():
        match = _FACTOR.fullmatch(name)
        if match is None or ".base_layer." in name:
            what = next((what for part, what in _SPECIAL.items() if part in name), "no matrix of a LoRA adapter")
            raise UnsupportedModelError(
                f"tensor {shown(name)} is {what}; llmcl applies only lora_A and lora_B of linear layers."
            )
        pairs.setdefault(match[1].removeprefix(_PREFIX), {})[match[2]] = tensor
    factors = []
    for module, of_module in pairs.items():
        a, b = (_matrix(module, letter, of_module.get(letter)) for letter in "AB")
        tensors = [f"{name}.weight" for name in _modules(module, family)]
        factors.append(Factors(shown(module), tensors, a, b, _scale(settings, module, len(a))))
    base = settings.get("base_model_name_or_path")
    return _source(factors, family.interleaves_rope, f" ({CONFIG_FILE} names {shown(base)})" if base else "")


def _source(factors: Sequence[Factors], interleaves_rope: bool, hint: str) -> Source:
    if not factors:
        raise CheckpointError("there are no matrices in it, so it would change nothing. Fetch or train it again.")
    return Source(factors, interleaves_rope, hint)


def _matrix(module: str, letter: str, tensor: StoredTensor | None) -> np.ndarray:
    """Decodes A or B."""
    if tensor is None:
        raise CheckpointError(f"matrix {letter} of {shown(module)} is missing. The adapter is incomplete.")
    if tensor.format not in FORMATS or len(tensor.shape) != 2 or 0 in tensor.shape:
        raise UnsupportedModelError(
            f"matrix {letter} of {shown(module)} is {tensor.format} {shown(list(tensor.shape))}, expected two "
            "sizes and the type F32, F16 or BF16."
        )
    name = f"{letter} of {module}"
    return dequantize(
        tensor.format, read_view(tensor.data).reshape(-1, row_bytes(name, tensor.format, tensor.shape[1]))
    )


def _modules(module: str, family: Family) -> Iterator[str]:
    """Yields llmcl's names for a module: one, or the parts of a stacked module by rows."""
    for prefix, alone in TEXT_PREFIXES.items():
        if module.startswith(prefix):
            module = alone + module.removeprefix(prefix)
            break
    if module.startswith("layers."):  # trained on the model without its output head
        module = f"model.{module}"
    for stacked, parts in family.stacked.items():
        if module.endswith(f".{stacked}"):
            if "{}" in parts[0]:
                raise UnsupportedModelError(f"{shown(module)} has all experts, whose adapters llmcl does not apply.")
            yield from (f"{module.removesuffix(stacked)}{part}" for part in parts)
            return
    for hf_module, name in family.modules.items():
        if module == hf_module or module.endswith(f".{hf_module}"):
            module = f"{module.removesuffix(hf_module)}{name}"
            break
    yield module


def _scale(settings: Mapping[str, Any], module: str, rank: int) -> float:
    """Returns alpha / rank, or with rank-stabilised LoRA alpha / sqrt(rank)."""
    expected = _of_module(settings, "rank_pattern", "r", module)
    if expected != rank:
        raise CheckpointError(
            f"matrix A of {shown(module)} has the rank {rank}, expected {shown(expected)} by {CONFIG_FILE}. "
            "The two files do not belong together."
        )
    alpha = _of_module(settings, "alpha_pattern", "lora_alpha", module)
    divisor = math.sqrt(rank) if settings.get("use_rslora") is True else rank
    return _number("lora_alpha", alpha) / divisor


def _of_module(settings: Mapping[str, Any], patterns: str, default: str, module: str) -> Any:
    """Returns a module's setting: from the first pattern that matches the end of its name, or the default."""
    by_pattern = settings.get(patterns) or {}
    if not isinstance(by_pattern, dict):
        raise CheckpointError(f"{CONFIG_FILE}: {patterns} is {shown(by_pattern)}, expected names with numbers.")
    for pattern, value in by_pattern.items():
        if len(pattern) > _LONGEST_PATTERN or any(part in pattern for part in _ENDLESS):
            raise UnsupportedModelError(f"{CONFIG_FILE}: {patterns} has the pattern {shown(pattern)}, too complex.")
        try:
            if re.match(rf"(.*\.)?({pattern})$", module):
                return value
        except re.error as error:
            raise CheckpointError(f"{CONFIG_FILE}: {patterns} has {shown(pattern)}, no pattern ({error}).") from error
    return settings.get(default, 8)


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= 1e9:
        raise CheckpointError(f"{name} is {shown(value)}, expected a number. The adapter is damaged; fetch it again.")
    return float(value)


def _read_file(path: Path, config: ModelConfig, family: Family) -> Source:
    if path.suffix == ".safetensors":
        raise CheckpointError(f"a safetensors file alone is no adapter. Give the folder with {CONFIG_FILE} and it.")
    metadata, stored = read_gguf(path)
    kind = metadata.get("general.type"), metadata.get("adapter.type")
    if kind[0] != "adapter":
        raise UnsupportedModelError(f"general.type is {shown(kind[0])}, expected 'adapter': this file is no adapter.")
    if kind[1] != "lora" or any(key.startswith("adapter.alora.") for key in metadata):
        raise UnsupportedModelError(f"adapter.type is {shown(kind[1])} or an activated LoRA; llmcl applies plain LoRA.")
    known = {family.gguf_name, family.gguf_name_with_experts} - {None}
    architecture = metadata.get("general.architecture")
    if known and architecture not in known:
        raise CheckpointError(
            f"general.architecture is {shown(architecture)}, expected {' or '.join(sorted(filter(None, known)))}: "
            "give an adapter of this model."
        )
    alpha = _number("adapter.lora.alpha", metadata.get("adapter.lora.alpha"))
    pairs: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in stored.items():
        base, _, end = name.rpartition(".")
        if end not in ("lora_a", "lora_b"):
            raise UnsupportedModelError(f"tensor {shown(name)} is no matrix of a LoRA adapter (lora_a, lora_b).")
        pairs.setdefault(base, {})[end[-1].upper()] = tensor
    factors = []
    for base, of_tensor in pairs.items():
        names = model_names(base, family)
        if "{}" in names[0]:
            raise UnsupportedModelError(f"{shown(base)} has all experts, whose adapters llmcl does not apply.")
        a, b = (_matrix(base, letter, of_tensor.get(letter)) for letter in "AB")
        factors.append(Factors(shown(base), names, a, b, alpha / len(a) if alpha else 1.0))
    trained_on = metadata.get("general.base_model.0.name")
    hint = f" (the file names {shown(trained_on)})" if trained_on else ""
    return _source(factors, family.gguf_interleaves_rope, hint)
