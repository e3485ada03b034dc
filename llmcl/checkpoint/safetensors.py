"""Hugging Face folders: config.json and one or several safetensors files.

A safetensors file is a header length (8 bytes, little endian), a JSON object of that length, which gives each
tensor its dtype, shape and byte range, and then the bytes (https://huggingface.co/docs/safetensors). Nothing
that the header says is believed before it is checked against the size of the file.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeGuard

from llmcl.checkpoint.files import MAX_HEADER_BYTES, map_file, parse_json, read_json
from llmcl.checkpoint.tensors import Checkpoint, StoredTensor
from llmcl.config import config_from_hf
from llmcl.errors import CheckpointError, UnsupportedModelError

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# Bytes of one value; also of dtypes that no model tensor may have, so that every byte range can be checked.
_ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip
_MAX_DIMENSIONS = 8
_MAX_COUNT = 1 << 62  # keeps sizes within what a file offset can be


def open_folder(folder: Path, name: str) -> Checkpoint:
    """The checkpoint in a Hugging Face folder. Raises CheckpointError or UnsupportedModelError."""
    if not (folder / "config.json").is_file():
        hint = "Give the folder that holds config.json and model.safetensors."
        if gguf_files := sorted(path.name for path in folder.glob("*.gguf")):
            hint = f"It holds {', '.join(gguf_files[:5])}: give the path of that file."
        raise CheckpointError(f"the folder has no config.json. {hint}")
    generation_path = folder / "generation_config.json"
    generation_config = read_json(generation_path) if generation_path.is_file() else None
    config = config_from_hf(read_json(folder / "config.json"), generation_config)
    return Checkpoint(name, folder, config, _read_folder_tensors(folder))


def shard_files(index_path: Path) -> dict[str, str]:
    """The index of a sharded checkpoint, {tensor name: file name}; each name is that of a file beside the "
    "index."""
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index_path.name}: weight_map is missing or empty. Fetch the file again.")
    for file in weight_map.values():
        is_plain = isinstance(file, str) and file.endswith(".safetensors") and not set(file) & set("/\\:\0")
        if not is_plain or file.startswith("."):
            raise CheckpointError(
                f"{index_path.name}: weight_map names the file {file!r:.100}, expected the plain name of a "
                ".safetensors file beside it. The checkpoint is damaged or hostile."
            )
    return weight_map


def _read_folder_tensors(folder: Path) -> dict[str, StoredTensor]:
    if (folder / WEIGHTS_FILE).exists():
        return read_file_tensors(folder / WEIGHTS_FILE)
    if not (folder / INDEX_FILE).exists():
        raise CheckpointError(no_weights_message(path.name for path in folder.iterdir()))
    weight_map = shard_files(folder / INDEX_FILE)
    files = sorted(set(weight_map.values()))
    if missing := [file for file in files if not (folder / file).is_file()]:
        raise CheckpointError(
            f"{len(missing)} of {len(files)} weight files are missing, the first is {missing[0]}. Fetch the "
            "model again."
        )
    shards = {file: read_file_tensors(folder / file) for file in files}
    stored = {}
    for name, file in weight_map.items():
        if name not in shards[file]:
            raise CheckpointError(f"tensor {name!r:.100} is not in {file}, where {INDEX_FILE} says it is.")
        stored[name] = shards[file][name]
    return stored


def no_weights_message(files: Iterable[str]) -> str:
    """Why a model with these files cannot be loaded, and what to do about it."""
    files = list(files)
    if any(file.endswith((".bin", ".pt", ".pth")) for file in files):
        return (
            "the weights are there only as pickle files (.bin, .pt), which can run code when read, so llmcl "
            "never reads them. Convert them to safetensors (in transformers: model.save_pretrained(folder)), "
            "or use a version of the model that has model.safetensors."
        )
    if gguf_files := sorted(file for file in files if file.endswith(".gguf")):
        there = ", ".join(gguf_files[:8])
        return f"there is no {WEIGHTS_FILE}, but there are GGUF files: name one of them ({there})."
    return f"there is neither {WEIGHTS_FILE} nor {INDEX_FILE}. The model is incomplete or not a text model."


def read_file_tensors(path: Path) -> dict[str, StoredTensor]:
    """All tensors of one safetensors file. Raises CheckpointError for anything that does not add up."""
    data = map_file(path)
    if len(data) < 8:
        raise CheckpointError(f"{path.name} has {len(data)} bytes, expected at least 8. Fetch it again.")
    header_bytes = int.from_bytes(data[:8].tobytes(), "little")
    if header_bytes > min(MAX_HEADER_BYTES, len(data) - 8):
        raise CheckpointError(
            f"{path.name}: its header claims {header_bytes} bytes; the file has {len(data)} and a header at "
            f"most {MAX_HEADER_BYTES}. It is truncated or not a safetensors file; fetch it again."
        )
    header = parse_json(data[8 : 8 + header_bytes].tobytes(), f"the header of {path.name}", unique_keys=True)
    header.pop("__metadata__", None)
    content = data[8 + header_bytes :]

    stored, ranges = {}, []
    for name, entry in header.items():
        where = f"{path.name}: tensor {name!r:.100}"
        dtype, shape, begin, end = _checked_entry(entry, where)
        if end > len(content):
            raise CheckpointError(
                f"{where} ends at byte {end} of {len(content)}. The file is truncated; fetch it again."
            )
        if end - begin != math.prod(shape) * _ITEM_BYTES[dtype]:
            raise CheckpointError(
                f"{where} has {end - begin} bytes, expected {math.prod(shape) * _ITEM_BYTES[dtype]} for "
                f"{dtype} {list(shape)}. The file is damaged."
            )
        stored[name] = StoredTensor(shape, dtype, content[begin:end])
        ranges.append((begin, end, name))
    check_no_overlap(ranges, path.name)
    return stored


def _checked_entry(entry: Any, where: str) -> tuple[str, tuple[int, ...], int, int]:
    """(dtype, shape, begin, end) of a header entry, its types and signs checked."""
    if not isinstance(entry, dict):
        raise CheckpointError(f"{where}: its entry is {entry!r:.80}, expected an object. The file is damaged.")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        raise UnsupportedModelError(f"{where} has the dtype {dtype!r:.80}; llmcl supports BF16, F16 and F32.")
    if not _is_list_of_counts(shape) or len(shape) > _MAX_DIMENSIONS:
        raise CheckpointError(f"{where} has no sensible shape. The file is damaged.")
    if not _is_list_of_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where} has no sensible data_offsets. The file is damaged.")
    return dtype, tuple(shape), offsets[0], offsets[1]


def _is_list_of_counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and 0 <= item <= _MAX_COUNT for item in value)


def check_no_overlap(ranges: list[tuple[int, int, str]], file: str) -> None:
    """Raises CheckpointError if two byte ranges (begin, end, tensor name) share a byte."""
    end_before, name_before = 0, ""
    for begin, end, name in sorted(item for item in ranges if item[0] < item[1]):
        if begin < end_before:
            raise CheckpointError(
                f"{file}: tensors {name_before!r:.100} and {name!r:.100} overlap. The file is damaged."
            )
        end_before, name_before = end, name
