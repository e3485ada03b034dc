"""Hugging Face folders: config.json and safetensors files.

A safetensors file is a header length (8 bytes, little endian), a JSON header with each tensor's dtype, shape and byte
range, and then the bytes (https://huggingface.co/docs/safetensors). The library `safetensors` reads and checks the
header: tensors follow each other without holes from the header to the end of the file. Therefore each tensor's location
follows from the order, shapes and dtypes that the library returns.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from llmcl.architectures.config import ModelConfig, config_from_hf
from llmcl.architectures.config.quantization import quantization_from_hf
from llmcl.architectures.families import FAMILIES, TEXT_PARTS
from llmcl.checkpoint.encoder_names import encoder_names
from llmcl.checkpoint.files import MAX_HEADER_BYTES, map_file, optional_json, parse_json, read_json, read_view, reading
from llmcl.checkpoint.interleaved import interleaved_parts, transposed_parts
from llmcl.checkpoint.latent import split_latents
from llmcl.checkpoint.made_norms import with_made_norms
from llmcl.checkpoint.packed import warn_if_expanded, with_scales
from llmcl.checkpoint.quantize import is_convolution
from llmcl.checkpoint.stacked import unstacked
from llmcl.checkpoint.tensors import JUDGING_TENSORS, Checkpoint, StoredTensor
from llmcl.errors import CheckpointError, UnsupportedModelError, counted, one_line, shown

_log = logging.getLogger(__name__)

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# Prefixes in multimodal models, and the names in a text-only model.
TEXT_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
    "backbone.": "model.",
}
_BACKBONE = "backbone.embeddings.weight"  # Nemotron-H's
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
_SHARD = re.compile(r"model-([0-9]{5})-of-([0-9]{5})\.safetensors")
# Prefixes that training wrappers leave on tensor names.
_WRAPPERS = {
    "base_model.model.": "a model with an adapter that is not merged (PEFT): save what merge_and_unload() returns",
    "_orig_mod.": "a model compiled by torch.compile: save the model inside it (model._orig_mod)",
}
# Ends of the names that quantisers give to their tensors.
_QUANTISERS = {
    ".weight_scale_inv": "an FP8 format",
    ".weight_scale": "ModelOpt or an FP8 format",
    ".scales": "MLX",
}
_LAYER = re.compile(r"model\.layers\.(0|[1-9][0-9]{0,8})\.")
_COMPARED_BYTES = 1 << 20
_MAX_SIZES = 64  # limit on multiplied dimensions in an error message; a million would take hours


def open_folder(folder: Path, name: str) -> Checkpoint:
    """Opens the checkpoint in a Hugging Face folder. Raises CheckpointError or UnsupportedModelError."""
    check_no_adapter([path.name for path in folder.iterdir()])
    if not (folder / "config.json").exists():
        hint = "Give the folder that holds config.json and model.safetensors."
        if gguf_files := sorted(path.name for path in folder.glob("*.gguf")):
            hint = f"It holds {one_line(', '.join(gguf_files[:5]))}: give the path of that file."
            if (folder / gguf_files[0]).name.endswith(f"-00001-of-{len(gguf_files):05d}.gguf") and len(gguf_files) > 1:
                hint = f"It holds a split GGUF file: give the path of its first part, {one_line(gguf_files[0], 80)}."
        raise CheckpointError(f"the folder has no config.json. {hint}")
    generation_config = optional_json(folder / "generation_config.json")
    config_json = read_json(folder / "config.json")
    config = config_from_hf(config_json, generation_config)
    stored = read_folder_tensors(folder)
    _check_not_wrapped(stored)
    family = FAMILIES[config.architecture]
    is_packed = False
    if not family.quant_methods:
        stored = with_scales(stored, quantization_from_hf(config_json), config.dtype)
        is_packed = any(tensor.view is not None for tensor in stored.values())
    _check_not_quantised(stored)
    if config_json["model_type"] in TEXT_PARTS or _BACKBONE in stored:
        stored = _text_tensors(stored)
    if _EMBEDDING.removeprefix("model.") in stored:  # the base model alone, as models for embeddings are published
        stored = {f"model.{name}": tensor for name, tensor in stored.items()}
        config = replace(config, tie_embeddings=True)
    if family.judges and not {"lm_head.weight", *JUDGING_TENSORS}.isdisjoint(stored):
        tied = config.tie_embeddings or "lm_head.weight" not in stored  # a reranker needs no output head
        config = replace(config, tie_embeddings=tied)
    if config.encoder is not None:
        stored = encoder_names(stored)
    stored = interleaved_parts(unstacked(stored, family.stacked, config), family.interleaved, config)
    stored = transposed_parts(stored, family.transposed, config)
    stored = _renamed(stored, family.modules)
    if family.drafting_layers:
        stored = {name: tensor for name, tensor in stored.items() if not _is_behind(name, config.n_layers)}
    stored = with_made_norms(split_latents(stored, config), family, config)
    checkpoint = Checkpoint(name, folder, _with_head(config, stored), stored)
    if is_packed:
        warn_if_expanded(checkpoint.tensors.values(), stored)
    return checkpoint


def quant_method(folder: Path) -> str | None:
    """Returns the method in a folder's quantization_config, or None if config.json is missing, damaged or has none."""
    try:
        settings = read_json(folder / "config.json")
    except CheckpointError:
        return None
    for values in (settings, settings.get("text_config")):
        table = values.get("quantization_config") if isinstance(values, dict) else None
        if isinstance(table, dict) and isinstance(table.get("quant_method"), str):
            return one_line(table["quant_method"], 40)
    return None


def check_no_adapter(files: Collection[str]) -> None:
    """Raises UnsupportedModelError if the files include an adapter (LoRA)."""
    if adapter := next((file for file in _ADAPTER_FILES if file in files), None):
        what = (
            "an adapter beside a model, which would change it" if "config.json" in files else "an adapter, not a model"
        )
        raise UnsupportedModelError(
            f"{adapter} is there: this is {what}. Name the model with -m, and the adapter's folder, apart from "
            "it, with --lora (lora=)."
        )


def _check_not_wrapped(stored: Mapping[str, StoredTensor]) -> None:
    for name in stored:
        for prefix, what in _WRAPPERS.items():
            if name.startswith(prefix):
                raise UnsupportedModelError(f"tensor {shown(name)} has {prefix} in front, so this is {what}.")


def _check_not_quantised(stored: Mapping[str, StoredTensor]) -> None:
    """Raises UnsupportedModelError for weights that a quantiser wrote, and that `with_scales` left."""
    for name in stored:
        for end, quantiser in _QUANTISERS.items():
            if name.endswith(end):
                raise UnsupportedModelError(
                    f"tensor {shown(name)} ends with {end}, so its weight is quantised by {quantiser}, which llmcl "
                    "does not read; use the original bfloat16 or float16 checkpoint, or a GGUF file."
                )


def _with_head(config: ModelConfig, stored: Mapping[str, StoredTensor]) -> ModelConfig:
    """Returns the configuration, untied if the file has an output head that differs from the embedding.

    transformers does the same.
    """
    head, embedding = stored.get(_HEAD), stored.get(_EMBEDDING)
    if not config.tie_embeddings or head is None or embedding is None or _equal(head, embedding):
        return config
    _log.warning(
        "config.json says that the output head is the embedding; the file has a %s of its own: using it", _HEAD
    )
    return replace(config, tie_embeddings=False)


def _equal(a: StoredTensor, b: StoredTensor) -> bool:
    if (a.shape, a.format, len(a.data)) != (b.shape, b.format, len(b.data)) or a.view is not b.view:
        return False
    starts = range(0, len(a.data), _COMPARED_BYTES)
    return all(np.array_equal(a.data[i : i + _COMPARED_BYTES], b.data[i : i + _COMPARED_BYTES]) for i in starts)


def _is_behind(name: str, n_layers: int) -> bool:
    """Returns whether a tensor belongs to a layer after the last one."""
    match = _LAYER.match(name)
    return match is not None and int(match[1]) >= n_layers


def _text_tensors(stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Returns the text part's tensors under text-only names. Raises CheckpointError for a duplicate."""
    tensors: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        for prefix, alone in TEXT_PREFIXES.items():
            if name.startswith(prefix):
                name = alone + name.removeprefix(prefix)
                break
        if name in tensors:
            raise CheckpointError(f"tensor {shown(name)} is there under two names. Fetch the model again.")
        tensors[name] = tensor
    return tensors


def _renamed(stored: dict[str, StoredTensor], modules: Mapping[str, str]) -> dict[str, StoredTensor]:
    """Returns the tensors under llmcl's module names (`Family.modules`), with convolutions as [channels, length].

    Raises CheckpointError for a duplicate.
    """
    renamed: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        module, _, suffix = name.rpartition(".")
        hf_module = next(
            (hf_module for hf_module in modules if module == hf_module or module.endswith(f".{hf_module}")), None
        )
        if hf_module is not None:
            name = f"{module.removesuffix(hf_module)}{modules[hf_module]}.{suffix}"
        if name in renamed:
            raise CheckpointError(f"tensor {shown(name)} is there under two names. Fetch the model again.")
        if is_convolution(name) and len(tensor.shape) == 3 and tensor.shape[1] == 1:
            tensor = replace(tensor, shape=(tensor.shape[0], tensor.shape[2]))
        if ".act_fn." in name and tensor.shape == ():
            tensor = replace(tensor, shape=(1,))
        if name.endswith(".e_score_correction_bias") and len(tensor.shape) == 2 and tensor.shape[0] == 1:
            tensor = replace(tensor, shape=tensor.shape[1:])
        renamed[name] = tensor
    return renamed


def shard_files(index_path: Path) -> dict[str, str]:
    """Reads a sharded checkpoint's index: {tensor name: file name}. Every name is a plain file beside it."""
    weight_map = read_json(index_path, MAX_HEADER_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index_path.name}: weight_map is missing or empty. Fetch the file again.")
    for file in weight_map.values():
        is_plain = isinstance(file, str) and file.endswith(".safetensors") and not set(file) & set("/\\:")
        if not is_plain or file.startswith(".") or not file.isprintable():
            raise CheckpointError(
                f"{index_path.name}: weight_map names the file {shown(file)}, expected the plain name of a "
                ".safetensors file beside it. The checkpoint is damaged or hostile."
            )
    return weight_map


def weight_files(names: Collection[str], index: Mapping[str, str] | None) -> list[str]:
    """Picks the weight files among the names in a folder or a repository. Returns [] if there are none.

    index: `shard_files` of the existing index. The index takes precedence over a model.safetensors beside its shards.
    Shards without an index are read if none is missing.
    """
    shards = sorted(set((index or {}).values()))
    if shards and (WEIGHTS_FILE not in names or all(file in names for file in shards)):
        if WEIGHTS_FILE in names and WEIGHTS_FILE not in shards:
            _log.warning("%s is not read: %s names %s instead", WEIGHTS_FILE, INDEX_FILE, counted(len(shards), "file"))
        return shards
    if WEIGHTS_FILE in names:
        return [WEIGHTS_FILE]
    numbered = sorted(name for name in names if _SHARD.fullmatch(name))
    counts = {name[-17:-12] for name in numbered}
    if len(counts) > 1:
        raise CheckpointError(f"{numbered[0]} and {numbered[-1]} are of different models. Remove the files of one.")
    every = [f"model-{i:05d}-of-{count}.safetensors" for count in counts for i in range(1, int(count) + 1)]
    if missing := next((file for file in every if file not in names), None):
        raise CheckpointError(
            f"there are {len(numbered)} of {len(every)} weight files, and {missing} is missing. Fetch the model again."
        )
    return numbered


def read_folder_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Maps all tensors in a folder's weight files. Raises CheckpointError for missing or inconsistent files."""
    names = {path.name for path in folder.iterdir()}
    index = shard_files(folder / INDEX_FILE) if INDEX_FILE in names else None
    files = weight_files(names, index)
    if not files:
        raise CheckpointError(no_weights_message(names))
    if missing := [file for file in files if file not in names]:
        raise CheckpointError(
            f"{len(missing)} of {len(files)} weight files are missing, the first is {one_line(missing[0], 80)}. "
            "Fetch the model again."
        )
    shards = {file: read_file_tensors(folder / file) for file in files}
    stored: dict[str, StoredTensor] = {}
    if index is None or not set(files) >= set(index.values()):
        for tensors in shards.values():
            if twice := stored.keys() & tensors.keys():
                raise CheckpointError(f"tensor {shown(min(twice))} is in two weight files. Fetch the model again.")
            stored |= tensors
        return stored
    for name, file in index.items():
        if name not in shards[file]:
            raise CheckpointError(
                f"tensor {shown(name)} is not in {one_line(file, 80)}, where {INDEX_FILE} says it is; "
                "fetch the model again."
            )
        stored[name] = shards[file][name]
    return stored


def no_weights_message(files: Iterable[str]) -> str:
    """Explains why a model with the given files cannot be loaded, and what to do."""
    files = list(files)
    if any(file.endswith((".bin", ".pt", ".pth")) for file in files):
        return (
            "the weights are there only as pickle files (.bin, .pt), which can run code when read, so llmcl "
            "never reads them. Convert them to safetensors (in transformers: model.save_pretrained(folder)), "
            "or use a version of the model that has model.safetensors."
        )
    if gguf_files := sorted(file for file in files if file.endswith(".gguf")):
        there = one_line(", ".join(gguf_files[:8]))
        return f"there is no {WEIGHTS_FILE}, but there are GGUF files: name one of them ({there})."
    return f"there is neither {WEIGHTS_FILE} nor {INDEX_FILE}. The model is incomplete or not a text model."


def read_file_tensors(path: Path) -> dict[str, StoredTensor]:
    """Reads all tensors in a safetensors file. Raises CheckpointError for any inconsistency."""
    from safetensors import SafetensorError, safe_open

    data = map_file(path)
    try:
        with reading(path), safe_open(path, framework="numpy") as file:
            slices = [(name, file.get_slice(name)) for name in file.offset_keys()]
            entries = [(name, tuple(one.get_shape()), one.get_dtype()) for name, one in slices]
    except SafetensorError as error:
        raise _refusal(path.name, data, str(error)) from error
    # The library silently keeps the last of two equal keys.
    parse_json(_header(data), f"the header of {path.name}", unique_keys=True)

    at, stored = 8 + len(_header(data)), {}
    for name, shape, dtype in entries:
        end = at + math.prod(shape) * _bits(dtype) // 8
        stored[name] = StoredTensor(shape, dtype, data[at:end])
        at = end
    if at != len(data):
        raise CheckpointError(f"{path.name} changed while it was opened. Wait until nothing writes to it.")
    return stored


def _header(data: np.ndarray) -> bytes:
    return read_view(data[8 : 8 + int.from_bytes(read_view(data[:8]).tobytes(), "little")]).tobytes()


def _bits(dtype: str) -> int:
    """Returns the bits per value, from the dtype name (BF16, F8_E4M3)."""
    size = re.match(r"[A-Z]+([0-9]+)", dtype)
    return int(size[1]) if size else 8  # BOOL


def _refusal(file: str, data: np.ndarray, reason: str) -> CheckpointError:
    """Returns the error for a file that the library refused, with the found and the expected value added."""
    n_header = int.from_bytes(read_view(data[:8]).tobytes(), "little")
    if len(data) < 8:
        return CheckpointError(f"{file} has {counted(len(data), 'byte')}, expected at least 8. Fetch it again.")
    if n_header > min(MAX_HEADER_BYTES, len(data) - 8):
        return CheckpointError(
            f"{file}: its header claims {n_header} bytes; the file has {len(data)} and a header at "
            f"most {MAX_HEADER_BYTES}. It is truncated or not a safetensors file; fetch it again."
        )
    header, reason = _header(data), reason.rpartition("deserializing header: ")[2]
    if unknown := re.search(r"unknown variant (`.*`), expected one of (.*) at line", reason, re.DOTALL):
        return UnsupportedModelError(
            f"{file}: a tensor has the dtype {one_line(unknown[1], 80)}, expected one of {one_line(unknown[2], 300)}. "
            "Use a version of the model in BF16, F16 or F32."
        )
    if place := re.search(r" at line (\d+) column (\d+)", reason):
        line = header.split(b"\n")[int(place[1]) - 1]
        before = line[: int(place[2])][-60:].decode("utf-8", "replace")
        return CheckpointError(
            f"{file}: its header is damaged behind {shown(before)}: {one_line(reason)}. Fetch the file again."
        )
    if "UTF-8" in reason:
        return CheckpointError(f"{file}: its header is not valid JSON: {one_line(reason)}. Fetch the file again.")
    sizes_differ, end_of_all = reason.endswith("tensor") or "overflow" in reason, 0
    for name, entry in parse_json(header, f"the header of {file}", unique_keys=True).items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        n_bytes = math.prod(entry["shape"][:_MAX_SIZES]) * _bits(entry["dtype"]) // 8
        if reason.endswith(f"tensor `{name}`") or (sizes_differ and end - begin != n_bytes):
            return CheckpointError(
                f"{file}: tensor {shown(name)} is {entry['dtype']} {shown(entry['shape'])} and lies at bytes "
                f"{shown(begin)} to {shown(end)}, expected {shown(n_bytes)} bytes that begin where the tensor before "
                "it ends. The file is damaged; fetch it again."
            )
        end_of_all = max(end_of_all, end)
    return CheckpointError(
        f"{file}: its tensors end at byte {shown(end_of_all)} of {len(data) - 8 - n_header}, expected the end of the "
        f"file ({one_line(reason)}). It is truncated or damaged; fetch it again."
    )
