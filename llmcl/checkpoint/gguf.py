"""GGUF files: metadata, tensor table and tensors in one file, read without running any code in the file.

Layout (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), all little endian: magic, version, number of
tensors, number of metadata entries; the entries (key, type, value); the tensor table (name, dimensions with the
innermost first, type, offset); padding to `general.alignment`; the tensors. Every count and length is checked against
the remaining file size before use.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from llmcl.architectures.config import GgufFactors, config_from_gguf
from llmcl.architectures.config.gguf import checked_architecture
from llmcl.architectures.families import FAMILIES
from llmcl.architectures.families.family import Family
from llmcl.checkpoint.files import MAX_HEADER_BYTES, map_file, read_view
from llmcl.checkpoint.formats import FLOAT_FORMATS, FORMATS, dequantize, row_bytes
from llmcl.checkpoint.latent import split_latents
from llmcl.checkpoint.pre_tokenizers import words_of
from llmcl.checkpoint.stacked import parts_of
from llmcl.checkpoint.tensors import JUDGING_TENSORS, Checkpoint, StoredTensor
from llmcl.errors import CheckpointError, UnsupportedModelError, shown

MAGIC = b"GGUF"
_VERSIONS = (2, 3)

_SUPPORTED_TYPES = {format.gguf: name for name, format in FORMATS.items()}
_OTHER_TYPES = {9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 41: "Q1_0"}

# Metadata types: numbers with their NumPy name, then the remaining three.
_NUMBERS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_BOOL, _STRING, _ARRAY = 7, 8, 9

# Many times larger than in real files. The limits bound the Python objects that a hostile file can create.
_MAX_ENTRIES = 1 << 16
_MAX_TENSORS = 1 << 16
_MAX_ARRAY_DEPTH = 3
_MAX_DIMENSIONS = 4

MODULE_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "position_embd": "model.embed_positions",
    "token_types": "model.embed_types",
    "token_embd_norm": "model.embed_norm",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
LAYER_MODULE_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    # A name with {} holds the tensors of all experts.
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
# Tensors that stack several modules' tensors: later llama.cpp converters write experts in this form.
_FUSED = {"ffn_gate_up_exps": ("ffn_gate_exps", "ffn_up_exps")}
_LAYER_TENSOR = re.compile(r"blk\.(0|[1-9][0-9]{0,8})\.(.+)\.(weight|bias|scale)")
_OF_LAYER = re.compile(r"blk\.(0|[1-9][0-9]{0,8})\.(.+)")
_PART = re.compile(r"(.+)-[0-9]{5}-of-([0-9]{5})\.gguf")
_ROPE_FACTORS = {
    "rope_freqs.weight": "of_all",
    "rope_factors_short.weight": "short",
    "rope_factors_long.weight": "long",
}  # GgufFactors field by tensor


def open_file(path: Path, name: str) -> Checkpoint:
    """Opens the checkpoint in a GGUF file. Raises CheckpointError or UnsupportedModelError."""
    metadata, stored = _read_parts(path)
    config = config_from_gguf(metadata, stored.keys(), GgufFactors(**_rope_factors(stored)))
    family = FAMILIES[config.architecture]
    by_hf_name: dict[str, StoredTensor] = {}
    shapes = config.tensors()
    for gguf_name, tensor in stored.items():
        if gguf_name in _ROPE_FACTORS or _is_drafting(gguf_name, family, config.n_layers):
            continue
        if gguf_name in JUDGING_TENSORS and family.judges:
            by_hf_name[gguf_name] = tensor
            continue
        hf_names = model_names(gguf_name, family)
        hf_name = hf_names[0]
        parts = [(hf_name, tensor)]
        shape = shapes.get(hf_name, tensor.shape)
        is_row = shape == (1, *tensor.shape)  # a one-row matrix, which converters store as a vector
        # Mamba's scalars and its norm are vectors, which converters store as matrices.
        if is_row or (hf_name.startswith("model.") and shape == (math.prod(tensor.shape),)):
            parts = [(hf_name, replace(tensor, shape=shape))]
        if "{}" in hf_name:
            parts = [*parts_of(gguf_name, tensor, hf_names, config)]
        if any(name in by_hf_name for name, _ in parts):
            raise CheckpointError(f"tensor {shown(gguf_name)} is there twice. The file is damaged; fetch it again.")
        by_hf_name.update(parts)
    by_hf_name |= _values_of_layers(metadata, family, config.n_layers)
    return Checkpoint(name, path, config, split_latents(by_hf_name, config), gguf_metadata=metadata)


def _values_of_layers(metadata: Mapping[str, Any], family: Family, n_layers: int) -> dict[str, StoredTensor]:
    """Returns metadata with a number per layer as tensors (`Family.gguf_values`)."""
    tensors = {}
    for key, name in family.gguf_values.items():
        values = metadata.get(key)
        if not isinstance(values, np.ndarray) or values.dtype.kind != "f" or values.shape != (n_layers,):
            _fail(f"{key} is {shown(values)}, expected a number for each of {n_layers} layers")
        for i, value in enumerate(values.astype(np.float32)):
            tensors[f"model.layers.{i}.{name}"] = StoredTensor((1,), "F32", np.atleast_1d(value).view(np.uint8))
    return tensors


def part_names(name: str) -> list[str]:
    """Returns the names of all parts if `name` is part of a split file, otherwise [name]."""
    match = _PART.fullmatch(name)
    if match is None:
        return [name]
    return [f"{match[1]}-{i:05d}-of-{match[2]}.gguf" for i in range(1, int(match[2]) + 1)]


def _read_parts(path: Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """Runs `read_gguf` on a file and, if it is split, on the other parts beside it. The first part has the metadata."""
    metadata, stored = read_gguf(path)
    n_parts = metadata.get("split.count", 1)
    if type(n_parts) is not int:
        _fail(f"split.count is {shown(n_parts)}, expected a whole number")
    if n_parts < 2:
        return metadata, stored
    names = part_names(path.name)
    if len(names) != n_parts:
        raise CheckpointError(
            f"the file is one of {n_parts} parts of a split GGUF, and its name does not say which. Give the "
            f"parts their names again: ...-00001-of-{n_parts:05d}.gguf and so on."
        )
    if missing := next((name for name in names if not path.with_name(name).exists()), None):
        raise CheckpointError(
            f"the file is one of {n_parts} parts of a split GGUF, and {missing} is missing beside it."
        )
    parts = [(metadata, stored) if name == path.name else read_gguf(path.with_name(name)) for name in names]
    every: dict[str, StoredTensor] = {}
    for i, (of_part, tensors) in enumerate(parts):
        if (of_part.get("split.no"), of_part.get("split.count")) != (i, n_parts):
            raise CheckpointError(f"{names[i]} is not part {i + 1} of {n_parts} of the same file. Fetch it again.")
        if twice := every.keys() & tensors.keys():
            _fail(f"tensor {shown(min(twice))} is in two parts")
        every |= tensors
    metadata = parts[0][0]
    if (expected := metadata.get("split.tensors.count", len(every))) != len(every):
        _fail(f"its parts have {len(every)} tensors, expected {shown(expected)}")
    return metadata, every


def check_header(data: bytes) -> bool:
    """Raises UnsupportedModelError if a file with the header `data` is unsupported. Returns False if `data` is too
    short.
    """
    try:
        metadata, table, _ = _read_header(_Cursor(np.frombuffer(data, np.uint8)))
        names = [name for name, *_ in table]
        factors = {_ROPE_FACTORS[name]: [1.0] * shape[-1] for name, shape, *_ in table if name in _ROPE_FACTORS}
        if metadata.get("tokenizer.ggml.model") == "gpt2":
            words_of(metadata.get("tokenizer.ggml.pre"))
        if metadata.get("split.count", 1) == 1:  # the first part of a split file does not name all tensors
            config_from_gguf(metadata, names, GgufFactors(**factors))
        else:
            checked_architecture(metadata)
    except UnsupportedModelError:
        raise
    except CheckpointError:
        return False
    return True


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """Reads (metadata, tensors by GGUF name) from a file. Shapes are row-major. Raises CheckpointError."""
    data = map_file(path)
    n_header, (metadata, table, alignment) = _header_of_file(data)
    content = data[-(-n_header // alignment) * alignment :]

    stored: dict[str, StoredTensor] = {}
    ranges = []
    for name, shape, format, offset in table:
        end = offset + math.prod(shape[:-1]) * row_bytes(shown(name), format, shape[-1])
        if offset % alignment:
            _fail(f"tensor {shown(name)} begins at {offset}, which is not a multiple of {alignment}")
        if end > len(content):
            _fail(f"tensor {shown(name)} ends at byte {end} of {len(content)}, so the file is truncated")
        if name in stored:
            _fail(f"tensor {shown(name)} is there twice")
        stored[name] = StoredTensor(shape, format, content[offset:end])
        ranges.append((offset, end, name))
    behind = -(-max((end for _, end, _ in ranges), default=0) // alignment) * alignment
    if "split.count" in metadata and read_view(content[behind : behind + len(MAGIC)]).tobytes() == MAGIC:
        raise CheckpointError(
            "the file is parts of a split GGUF one behind the other. Keep each in its own file, "
            "...-00001-of-00003.gguf and so on, or merge them with llama.cpp's `llama-gguf-split --merge`."
        )
    _check_no_holes(ranges, len(content), alignment)
    return metadata, stored


def _header_of_file(data: np.ndarray) -> tuple[int, tuple[dict[str, Any], list[_Entry], int]]:
    """Reads (header size in bytes, header) from a mapped file. Its beginning is read anew, longer, until it holds the
    header.
    """
    n_bytes, largest = FIRST_HEADER_BYTES, min(len(data), MAX_HEADER_BYTES)
    while True:
        cursor = _Cursor(read_view(data[: min(n_bytes, largest)]))
        try:
            header = _read_header(cursor)
            return cursor.at, header
        except CheckpointError:
            if n_bytes >= largest:
                raise
        n_bytes *= 4


FIRST_HEADER_BYTES = 16 << 20  # most headers are shorter; reading them takes milliseconds

_Entry = tuple[str, tuple[int, ...], str, int]  # tensor table entry: name, row-major shape, format, offset


def _read_header(cursor: _Cursor) -> tuple[dict[str, Any], list[_Entry], int]:
    """Reads (metadata, tensor table, alignment). Raises CheckpointError, also if the header exceeds the cursor."""
    if bytes(cursor.take(4, "the magic number")) != MAGIC:
        raise CheckpointError("it is not a GGUF file (it does not begin with the letters GGUF). Check the path.")
    version = cursor.number("<I", "the version")
    if version not in _VERSIONS:
        if int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS:
            raise UnsupportedModelError("llmcl does not support big-endian GGUF files; use the little-endian one.")
        raise UnsupportedModelError(
            f"llmcl does not support GGUF version {version}; it supports {_VERSIONS[0]} and {_VERSIONS[1]}."
        )
    n_tensors = cursor.count(32, "the number of tensors", _MAX_TENSORS)
    n_entries = cursor.count(13, "the number of metadata entries", _MAX_ENTRIES)

    metadata: dict[str, Any] = {}
    for index in range(n_entries):
        key = cursor.text(f"the key of metadata entry {index}")
        if key in metadata:
            _fail(f"the metadata key {shown(key)} appears twice")
        metadata[key] = _read_value(cursor, cursor.number("<I", f"the type of {shown(key)}"), f"{shown(key)}")

    table = [_read_tensor_entry(cursor, index) for index in range(n_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        _fail(f"general.alignment is {shown(alignment)}, expected a power of two")
    return metadata, table, alignment


def _check_no_holes(ranges: list[tuple[int, int, str]], n_content: int, alignment: int) -> None:
    """Raises CheckpointError unless the byte ranges (begin, end, tensor name) fill the content without holes.

    Only padding to the alignment may lie between two ranges and at the end. Otherwise a type, a shape or an offset
    differs from the values the file was written with.
    """
    expected, before = 0, "the header"
    for begin, end, name in sorted(ranges):
        if begin != expected:
            how = "overlap" if begin < expected else "leave a hole"
            _fail(f"tensor {shown(name)} begins at {begin}, expected {expected}: it and {before} {how}")
        expected, before = -(-end // alignment) * alignment, f"tensor {shown(name)}"
    if ranges and n_content > expected:
        _fail(f"{before} ends at byte {expected} and the file at {n_content}, expected nothing behind the last tensor")


class _Cursor:
    """A position in the header. Every read is checked against the end first."""

    def __init__(self, data: np.ndarray):
        self.view = data.data
        self.end = len(data)
        self.at = 0

    def take(self, n_bytes: int, what: str) -> memoryview:
        if n_bytes > self.end - self.at:
            _fail(f"{what} needs {n_bytes} bytes at {self.at}, but the header can end at {self.end} at the latest")
        taken = self.view[self.at : self.at + n_bytes]
        self.at += n_bytes
        return taken

    def number(self, code: str, what: str) -> Any:
        return struct.unpack(code, self.take(struct.calcsize(code), what))[0]

    def count(self, min_bytes: int, what: str, maximum: int = MAX_HEADER_BYTES) -> int:
        """Reads a count of items with at least `min_bytes` each. Refuses counts that exceed the remaining bytes."""
        count = int(self.number("<Q", what))
        if count > maximum or count * min_bytes > self.end - self.at:
            _fail(f"{what} is {count}, more than the file can hold")
        return count

    def text(self, what: str) -> str:
        return self.texts(1, what)[0]

    def texts(self, count: int, what: str) -> list[str]:
        """Reads `count` strings. One flat loop: a vocabulary has about 100 000, and start-up waits for them."""
        view, at, end = self.view, self.at, self.end
        unpack_length = struct.Struct("<Q").unpack_from
        texts = []
        try:
            for _ in range(count):
                start = at + 8
                at = start + unpack_length(view, at)[0] if start <= end else end + 1
                if at > end:
                    _fail(f"a string of {what} goes beyond the end of the file or of the header")
                texts.append(str(view[start:at], "utf-8"))
        except UnicodeDecodeError:
            _fail(f"a string of {what} is not UTF-8")
        self.at = at
        return texts


def _read_value(cursor: _Cursor, type_number: int, what: str, depth: int = 0) -> Any:
    """Reads a metadata value. `what` names the value in errors."""
    if type_number in _NUMBERS:
        dtype = np.dtype(_NUMBERS[type_number])
        number = np.frombuffer(cursor.take(dtype.itemsize, what), dtype)[0]
        # Shortest decimal (1e-05, not 9.999999747378752e-06): same value as in a folder's config.json, so kernels are
        # shared.
        return float(str(number)) if dtype == np.float32 else number.item()
    if type_number == _BOOL:
        return cursor.take(1, what)[0] != 0
    if type_number == _STRING:
        return cursor.text(what)
    if type_number != _ARRAY:
        _fail(f"{what} has the unknown metadata type {type_number}")
    item_type = cursor.number("<I", what)
    if item_type in _NUMBERS or item_type == _BOOL:
        dtype = np.dtype(_NUMBERS.get(item_type, "?"))
        n_items = cursor.count(dtype.itemsize, f"the length of {what}")
        raw = np.frombuffer(cursor.take(n_items * dtype.itemsize, what), np.uint8)
        return raw != 0 if item_type == _BOOL else raw.view(dtype).copy()
    if item_type == _STRING:
        return cursor.texts(cursor.count(8, f"the length of {what}"), what)
    if item_type != _ARRAY:
        _fail(f"{what} is an array of the unknown metadata type {item_type}")
    if depth == _MAX_ARRAY_DEPTH:
        _fail(f"{what} nests arrays too deeply")
    n_items = cursor.count(12, f"the length of {what}", _MAX_ENTRIES)
    return [_read_value(cursor, _ARRAY, what, depth + 1) for _ in range(n_items)]


def _read_tensor_entry(cursor: _Cursor, index: int) -> _Entry:
    """Reads the tensor table's next entry: (name, row-major shape, format, offset)."""
    name = cursor.text(f"the name of tensor {index}")
    what = f"tensor {shown(name)}"
    n_dimensions = cursor.number("<I", what)
    if not 1 <= n_dimensions <= _MAX_DIMENSIONS:
        _fail(f"{what} has {n_dimensions} dimensions, expected 1 to {_MAX_DIMENSIONS}")
    shape = struct.unpack(f"<{n_dimensions}Q", cursor.take(8 * n_dimensions, what))[::-1]
    if 0 in shape:
        _fail(f"{what} has a dimension of 0")
    type_number = cursor.number("<I", what)
    if type_number not in _SUPPORTED_TYPES:
        raise UnsupportedModelError(
            f"{what} has the type {_OTHER_TYPES.get(type_number, type_number)}; llmcl supports "
            f"{', '.join(FORMATS)}. Use another quantisation of the model."
        )
    return name, shape, _SUPPORTED_TYPES[type_number], cursor.number("<Q", what)


def _is_drafting(gguf_name: str, family: Family, n_layers: int) -> bool:
    """Returns whether a tensor belongs to an extra drafting layer after the last layer."""
    match = _LAYER_TENSOR.fullmatch(gguf_name)
    return family.gguf_drafting_layers and match is not None and int(match[1]) >= n_layers


def model_names(gguf_name: str, family: Family) -> tuple[str, ...]:
    """Returns blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight, or several for an entry in _FUSED."""
    layer_names = {**LAYER_MODULE_NAMES, **family.gguf_modules}
    if (match := _OF_LAYER.fullmatch(gguf_name)) and match[2] in family.gguf_tensors:
        return (f"model.layers.{match[1]}.{family.gguf_tensors[match[2]]}",)
    if match := _LAYER_TENSOR.fullmatch(gguf_name):
        index, module, suffix = match.groups()
        hf_modules = (layer_names.get(part, part) for part in _FUSED.get(module, (module,)))
        return tuple(f"model.layers.{index}.{name}.{suffix}" for name in hf_modules)
    module, _, suffix = gguf_name.rpartition(".")
    names = {**MODULE_NAMES, **layer_names}
    if module not in names or names[module] not in MODULE_NAMES.values():
        raise UnsupportedModelError(f"tensor {shown(gguf_name)} is not part of any architecture that llmcl supports.")
    return (f"{names[module]}.{suffix}",)


def _rope_factors(stored: dict[str, StoredTensor]) -> dict[str, list[float]]:
    factors = {}
    for name, field in _ROPE_FACTORS.items():
        if (tensor := stored.get(name)) is None:
            continue
        if tensor.format not in FLOAT_FORMATS or len(tensor.shape) != 1 or tensor.shape[0] > 1 << 16:
            raise CheckpointError(
                f"tensor {name} is {tensor.format} {list(tensor.shape)}, expected F32 [head_dim / 2]."
            )
        factors[field] = [float(value) for value in dequantize(tensor.format, read_view(tensor.data)[np.newaxis])[0]]
    return factors


def _fail(problem: str) -> NoReturn:
    raise CheckpointError(f"not a sound GGUF file: {problem}. Fetch it again.")
