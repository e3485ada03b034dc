"""Writes a model as a GGUF file with the package `gguf`."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmcl.architectures.config import ModelConfig
from llmcl.checkpoint import Checkpoint
from llmcl.checkpoint.files import read_view
from llmcl.checkpoint.gguf import LAYER_MODULE_NAMES, MODULE_NAMES, read_gguf
from llmcl.checkpoint.imatrix import importance_of
from llmcl.checkpoint.pre_tokenizers import PRE_TOKENIZERS
from llmcl.checkpoint.quantize import is_vector
from llmcl.convert.tensors import OutTensor, Pieces, checkpoint_rows, synced
from llmcl.errors import UnsupportedModelError, counted, shown
from llmcl.tokenizer import Tokenizer, gguf_tokenizer

_log = logging.getLogger(__name__)

ROPE_FACTORS = "rope_freqs.weight"
_FOLDER_ARCHITECTURES = ("llama", "mistral")
# general.file_type, keyed by the most common matrix format.
_FILE_TYPES = {"F32": 0, "F16": 1, "BF16": 32, "Q4_0": 2, "Q8_0": 7, "Q4_K": 14}
_FILE_TYPE_KEYS = ("general.file_type", "general.quantization_version", "general.alignment")

# Probe texts: a folder's tokenizer and the tokenizer rebuilt from its GGUF metadata must agree on them.
PROBES = (
    "Hello, world! It's 12345.67 o'clock; isn't it?",
    "  two spaces,\ttabs\n\n\nand lines \r\n of   text ",
    "na\u00efve fa\u00e7ade \u2014 \u4f60\u597d\uff0c\u4e16\u754c \U0001f642\U0001f642 \u0645\u0631\u062d\u0628\u0627",
    "\u0939\u093f\u0928\u094d\u0926\u0940 e\u0301 \u00bd \u2075",
    "def f(x): return x**2 + 3.14e-10  # A1b2C3 don'T WE'LL",
)
N_TOKEN_PROBES = 1000


# key -> (value, package gguf's value type, array item type); Packed: bytes copied from another file.
Metadata = dict[str, tuple[Any, Any, Any]]


class Packed(bytes):
    """A metadata entry's type and value as bytes in a GGUF file."""


@dataclass(frozen=True)
class GgufPlan:
    """The content for a GGUF file."""

    architecture: str
    metadata: Metadata
    tensors: list[OutTensor]

    def weighted(self, columns: Mapping[str, np.ndarray]) -> GgufPlan:
        """Returns the plan with an importance matrix (`read_imatrix`). Warns of matrices that it lacks.

        Raises UsageError if it is another model's.
        """
        tensors, without = [], []
        for tensor in self.tensors:
            if len(tensor.shape) > 1 and tensor.format in ("Q4_0", "Q4_K"):
                importance = importance_of(columns, tensor.name, tensor.shape)
                without += [tensor.name] if importance is None else []
                tensor = dataclasses.replace(tensor, importance=importance)
            tensors.append(tensor)
        if without:
            _log.warning(
                "the importance matrix has no values for %s, such as %s; quantising without it there",
                counted(len(without), "tensor"),
                without[0],
            )
        return dataclasses.replace(self, tensors=tensors)

    def write(self, path: Path, pieces: Pieces) -> None:
        from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter

        class Writer(GGUFWriter):
            """Supports empty arrays and arrays of arrays, which the package cannot write."""

            def _pack_val(self, val: Any, *args: Any, **options: Any) -> bytes:
                return val if isinstance(val, Packed) else super()._pack_val(val, *args, **options)

        writer = Writer(path, self.architecture)
        try:
            for key, (value, kind, item_kind) in self.metadata.items():
                writer.add_key_value(key, value, kind, sub_type=item_kind)
            formats = [tensor.format for tensor in self.tensors if len(tensor.shape) > 1]
            most = max(_FILE_TYPES, key=formats.count)
            writer.add_key_value("general.file_type", _FILE_TYPES[most], GGUFValueType.UINT32)
            writer.add_key_value("general.quantization_version", 2, GGUFValueType.UINT32)
            for tensor in self.tensors:
                stored = (*tensor.shape[:-1], tensor.row_bytes)
                kind = GGMLQuantizationType[tensor.format]
                writer.add_tensor_info(tensor.name, stored, np.dtype(np.uint8), tensor.nbytes, raw_dtype=kind)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for tensor, parts in pieces:
                data = np.empty((tensor.n_rows, tensor.row_bytes), np.uint8)
                row = 0
                for part in parts:
                    data[row : row + len(part)] = part
                    row += len(part)
                writer.write_tensor_data(data)
        finally:
            writer.close()
        synced(path)


def gguf_plan(checkpoint: Checkpoint, chosen: Callable[[str, tuple[int, ...], str], str]) -> GgufPlan:
    """Plans a GGUF file. chosen(Hugging Face name, shape, stored format) returns a matrix format.

    Raises UnsupportedModelError for a folder with a model or tokenizer that GGUF metadata cannot express.
    """
    if checkpoint.gguf_metadata is not None:
        return _from_gguf(checkpoint, chosen)
    return _from_folder(checkpoint, chosen)


# ---- from another GGUF file --------------------------------------------------------------------------------------


def _from_gguf(checkpoint: Checkpoint, chosen: Callable[[str, tuple[int, ...], str], str]) -> GgufPlan:
    """Copies everything except the matrix formats. `checkpoint` has checked the file."""
    from gguf import GGUFReader

    hf_names = {f"{gguf}.weight": f"{hf}.weight" for gguf, hf in MODULE_NAMES.items()}
    _, stored = read_gguf(checkpoint.path)
    tensors = []
    for name, tensor in stored.items():
        is_matrix = len(tensor.shape) > 1 and not is_vector(name)
        rows = tensor.data.reshape(math.prod(tensor.shape[:-1]), -1)
        format = chosen(hf_names.get(name, name), tensor.shape, tensor.format) if is_matrix else tensor.format
        tensors.append(OutTensor(name, tensor.shape, format, tensor.format, _slices(rows)))
    metadata: Metadata = {}
    for key, field in GGUFReader(checkpoint.path).fields.items():
        if key.startswith("GGUF.") or key == "general.architecture" or key in _FILE_TYPE_KEYS:
            continue
        _key_length, _key, *entry = field.parts
        metadata[key] = Packed(b"".join(part.tobytes() for part in entry)), field.types[0], None
    assert checkpoint.gguf_metadata is not None
    return GgufPlan(checkpoint.gguf_metadata["general.architecture"], metadata, tensors)


def _slices(rows: np.ndarray) -> Callable[[int, int], np.ndarray]:
    return lambda start, stop: read_view(rows[start:stop])


# ---- from a folder -----------------------------------------------------------------------------------------------


def _from_folder(checkpoint: Checkpoint, chosen: Callable[[str, tuple[int, ...], str], str]) -> GgufPlan:
    from gguf import GGUFValueType as Kind

    config = checkpoint.config
    if config.architecture not in _FOLDER_ARCHITECTURES or config.has_windows or config.has_biases:
        more = " with attention windows" if config.has_windows else " with biases" if config.has_biases else ""
        raise UnsupportedModelError(
            f"a GGUF file cannot be made from a folder of the architecture {config.architecture!r}{more}, only "
            f"of {' and '.join(_FOLDER_ARCHITECTURES)} without windows and biases; use llama.cpp's "
            "convert_hf_to_gguf.py instead"
        )
    metadata = {"general.name": (checkpoint.path.name, Kind.STRING, None), **model_metadata(config)}
    tensors = []
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind not in ("linear", "llama3"):
        raise UnsupportedModelError(
            f"a GGUF file cannot be made from a folder with the rotary scaling {scaling.kind!r}, only with linear or "
            "llama3; use llama.cpp's convert_hf_to_gguf.py instead"
        )
    if scaling is not None and scaling.kind == "linear":
        metadata["llama.rope.scaling.type"] = "linear", Kind.STRING, None
        metadata["llama.rope.scaling.factor"] = scaling.factor, Kind.FLOAT32, None
    elif scaling is not None:
        # GGUF stores each frequency's scaling factor; only the quotient's rounding is lost.
        plain = dataclasses.replace(config, rope_scaling=None).inv_freq()
        factors = (plain / config.inv_freq()).astype(np.float32)
        rows = factors.view(np.uint8).reshape(1, -1)
        tensors.append(OutTensor(ROPE_FACTORS, factors.shape, "F32", "F32", _slices(rows)))
    for name, info in checkpoint.tensors.items():
        is_matrix = len(info.shape) == 2
        tensors.append(
            OutTensor(
                gguf_name(name),
                info.shape,
                chosen(name, info.shape, info.format) if is_matrix else "F32",
                info.format,
                checkpoint_rows(checkpoint, name, interleaved=True),
            )
        )
    return GgufPlan("llama", metadata | tokenizer_metadata(checkpoint), tensors)


def model_metadata(config: ModelConfig) -> Metadata:
    """Returns a model's `llama.*` keys, without rotary scaling."""
    from gguf import GGUFValueType as Kind

    numbers: dict[str, int | float] = {
        "block_count": config.n_layers,
        "context_length": config.max_position,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.n_q_heads,
        "attention.head_count_kv": config.n_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.dimension_count": config.head_dim,
        "rope.freq_base": config.rope_theta,
        "vocab_size": config.vocab_size,
    }
    kinds = {int: Kind.UINT32, float: Kind.FLOAT32}
    return {f"llama.{key}": (value, kinds[type(value)], None) for key, value in numbers.items()}


def gguf_name(hf_name: str) -> str:
    """model.layers.3.self_attn.q_proj.weight -> blk.3.attn_q.weight."""
    module, _, suffix = hf_name.rpartition(".")
    if module.startswith("model.layers."):
        index, layer_module = module.removeprefix("model.layers.").split(".", 1)
        name = next(gguf for gguf, hf in LAYER_MODULE_NAMES.items() if hf == layer_module)
        return f"blk.{index}.{name}.{suffix}"
    return f"{next(gguf for gguf, hf in MODULE_NAMES.items() if hf == module)}.{suffix}"


def tokenizer_metadata(checkpoint: Checkpoint) -> Metadata:
    """Returns the `tokenizer.*` keys for a folder's tokenizer.json.

    Raises UnsupportedModelError if no known set of keys reproduces the token ids.
    """
    from gguf import GGUFValueType as Kind

    tokenizer = Tokenizer.from_checkpoint(checkpoint)
    source = json.loads((checkpoint.path / "tokenizer.json").read_text(encoding="utf-8"))
    model = source["model"]
    if model.get("type") != "BPE":
        raise _unsayable(f"its algorithm is {model.get('type')!r}, expected BPE")
    tokens, types = _vocabulary(source, checkpoint.config.vocab_size)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    adds_bos = tokenizer.bos_token_id is not None and tokenizer.encode("a")[:1] == [tokenizer.bos_token_id]
    values: dict[str, Any] = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.add_bos_token": adds_bos,
    }
    if model.get("byte_fallback"):
        values |= {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": _scores(tokens, types, merges)}
        prefixes = "Prepend" in json.dumps(source["normalizer"]) or '"prepend_scheme"' in json.dumps(source)
        values["tokenizer.ggml.add_space_prefix"] = prefixes
        candidates = [values]
    else:
        values |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": merges}
        names = {words: name for name, words in reversed(PRE_TOKENIZERS.items())}  # the first name of each rule
        candidates = [values | {"tokenizer.ggml.pre": name} for name in reversed(names.values())]
    probes = (*PROBES, *_token_texts(tokenizer))
    matching = next((values for values in candidates if _agrees(tokenizer, values, probes)), None)
    if matching is None:
        raise _unsayable("no pre-tokenizer known here cuts texts into words as it does")
    for token in source.get("added_tokens", []):
        flags = [flag for flag in ("lstrip", "rstrip", "single_word") if token.get(flag)]
        text = token["content"]
        if flags and not _agrees(tokenizer, matching, [f"a {text} b", f"a{text}b"]):
            raise _unsayable(f"its token {shown(text)} has {' and '.join(flags)}, which has no key")
    ids = {"bos": tokenizer.bos_token_id}
    ends = checkpoint.config.eos_token_ids or tuple(tokenizer.eos_token_ids)
    ids |= dict(zip(("eos", "eot"), ends, strict=False))
    result = typed(matching)
    result |= {f"tokenizer.ggml.{name}_token_id": (i, Kind.UINT32, None) for name, i in ids.items() if i is not None}
    if tokenizer.chat_template is not None:
        result["tokenizer.chat_template"] = tokenizer.chat_template, Kind.STRING, None
    return result


def _unsayable(reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"the folder's tokenizer cannot be told in GGUF metadata: {reason}; use llama.cpp's convert_hf_to_gguf.py, "
        "then `llmcl convert`"
    )


def _vocabulary(source: Mapping[str, Any], vocab_size: int) -> tuple[list[str], list[int]]:
    """Returns (token texts, token types) by id. An id without a token gets a placeholder text and the type UNUSED."""
    tokens = [f"[PAD{i}]" for i in range(vocab_size)]
    types = [gguf_tokenizer.UNUSED] * vocab_size
    unknown = source["model"].get("unk_token")
    for token, i in source["model"]["vocab"].items():
        is_byte = bool(source["model"].get("byte_fallback")) and len(token) == 6 and token.startswith("<0x")
        tokens[i] = token
        types[i] = gguf_tokenizer.BYTE if is_byte else gguf_tokenizer.NORMAL
    for added in source.get("added_tokens", []):
        tokens[added["id"]] = added["content"]
        types[added["id"]] = gguf_tokenizer.CONTROL if added["special"] else gguf_tokenizer.USER_DEFINED
    if unknown in tokens:
        types[tokens.index(unknown)] = gguf_tokenizer.UNKNOWN
    return tokens, types


def _scores(tokens: list[str], types: list[int], merges: list[str]) -> list[float]:
    """Returns SentencePiece scores: the earlier the merge that makes a token, the higher. Characters need no merge."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault(merge.replace(" ", "", 1), rank)
    return [
        -float(ranks.get(token, len(merges))) if kind == gguf_tokenizer.NORMAL else 0.0
        for token, kind in zip(tokens, types, strict=True)
    ]


def _token_texts(tokenizer: Tokenizer) -> list[str]:
    """Returns the texts of up to N_TOKEN_PROBES tokens: a rule that cuts inside words gives other ids for some."""
    step = max(1, tokenizer.n_vocab // N_TOKEN_PROBES)
    return [tokenizer.decode([i]) for i in range(0, tokenizer.n_vocab, step)]


def _agrees(tokenizer: Tokenizer, values: Mapping[str, Any], probes: Sequence[str]) -> bool:
    """Whether the tokenizer rebuilt from the metadata gives the same ids for the probes."""
    rebuilt, _ = gguf_tokenizer.build(values)
    return all(
        rebuilt.encode(text, add_special_tokens=False).ids == tokenizer.encode(text, add_special_tokens=False)
        for text in probes
    )


def typed(values: Mapping[str, Any]) -> Metadata:
    """Adds GGUF types to bools, strings and lists."""
    from gguf import GGUFValueType as Kind

    def one(value: Any) -> tuple[Any, Any, Any]:
        if value == []:  # a vocabulary without merges
            return Packed(struct.pack("<IIQ", Kind.ARRAY, Kind.STRING, 0)), Kind.ARRAY, None
        if isinstance(value, list):
            return value, Kind.ARRAY, {str: Kind.STRING, int: Kind.INT32, float: Kind.FLOAT32}[type(value[0])]
        return value, Kind.BOOL if isinstance(value, bool) else Kind.STRING, None

    return {key: one(value) for key, value in values.items()}
