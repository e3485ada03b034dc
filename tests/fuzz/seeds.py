"""The sound files that cases begin with: one small model as a Hugging Face folder, as a sharded one, and as GGUF.

All have the same shapes, so that kernels are compiled once. GGUF files are kept in parts, to be changed and packed.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from helpers import random_weights, small_config
from made_tokenizers import gguf_of, sentencepiece_gguf, trained
from tokenizers import decoders, models, normalizers

from llmcl.checkpoint.gguf import LAYER_MODULE_NAMES, MODULE_NAMES

EPS = 1e-5
VOCAB = 576  # of the larger of the two tokenizers, and some
CHATML = (
    "{% for message in messages %}{{ '<|user|>' + message['role'] + '\\n' + message.content | trim + eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|user|>assistant\\n' }}{% endif %}"
)
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "rms_norm_eps": EPS,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 0,
    "torch_dtype": "float32",
}
SETTINGS = {
    "tokenizer_config.json": {"eos_token": "<|end|>", "bos_token": {"content": "<|user|>"}, "chat_template": CHATML},
    "special_tokens_map.json": {"eos_token": "<|end|>", "pad_token": {"content": "<|end|>", "lstrip": False}},
    "generation_config.json": {"eos_token_id": [0], "bos_token_id": 1},
}


@cache
def weights() -> dict[str, np.ndarray]:
    return random_weights(small_config(n_layers=1, vocab_size=VOCAB, tie_embeddings=True), seed=1)


def json_bytes(value: Any) -> bytes:
    return json.dumps(value).encode()


@cache
def tokenizers_json() -> dict[str, bytes]:
    """tokenizer.json of each kind."""
    byte_level = trained("llama-bpe")
    metadata = sentencepiece_gguf()
    vocabulary = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    joined = [(t[:1], t[1:]) for t in vocabulary if len(t) == 2 and t[0] in vocabulary and t[1] in vocabulary]
    from tokenizers import AddedToken, Tokenizer

    pieces = Tokenizer(models.BPE(vocabulary, joined, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    pieces.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    as_space = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    pieces.decoder = decoders.Sequence(as_space)
    pieces.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return {"byte-level": byte_level.to_str().encode(), "pieces": pieces.to_str().encode()}


def safetensors(tensors: dict[str, np.ndarray]) -> tuple[dict[str, Any], bytes]:
    """(header, content) of a safetensors file of float32 tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    content = b""
    for name, values in tensors.items():
        data = values.astype("<f4").tobytes()
        header[name] = {
            "dtype": "F32",
            "shape": list(values.shape),
            "data_offsets": [len(content), len(content + data)],
        }
        content += data
    return header, content


def pack_safetensors(header: bytes, content: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", (len(header) if length is None else length) & (1 << 64) - 1) + header + content


def shards() -> list[dict[str, np.ndarray]]:
    names = sorted(weights())
    return [{name: weights()[name] for name in part} for part in (names[:5], names[5:])]


@dataclass
class Folders:
    """The folder of a session with the large files of the seeds, for cases to link to."""

    path: Path
    files: dict[str, Path] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        contents = {
            "model.safetensors": pack_safetensors(*_header_and_content(weights())),
            "tokenizer.json": tokenizers_json()["byte-level"],
            "model.gguf": gguf_file("gpt2").pack(),
        }
        for name, content in contents.items():
            self.files[name] = (self.path / name).resolve()
            self.files[name].write_bytes(content)

    def folder(self) -> dict[str, bytes | Path]:
        """The files of the sound model."""
        small = {"config.json": CONFIG, **SETTINGS}
        linked: dict[str, bytes | Path] = {n: self.files[n] for n in ("model.safetensors", "tokenizer.json")}
        return linked | {name: json_bytes(value) for name, value in small.items()}


def _header_and_content(tensors: dict[str, np.ndarray]) -> tuple[bytes, bytes]:
    header, content = safetensors(tensors)
    return json_bytes(header), content


# ---- GGUF -----------------------------------------------------------------------------------------------

UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9
_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
F32, Q8_0 = 0, 8


@dataclass
class Entry:
    """A metadata entry. value: of the type; of an array (type of its items, items)."""

    key: str
    type: int
    value: Any


@dataclass
class Tensor:
    """A row of the tensor table; dimensions with the innermost first."""

    name: str
    dimensions: list[int]
    type: int
    offset: int


@dataclass
class GgufFile:
    """A GGUF file in parts, each of which may be wrong; what does not fit its type is cut to it."""

    entries: list[Entry]
    tensors: list[Tensor]
    content: bytes
    magic: bytes = b"GGUF"
    version: int = 3
    n_tensors: int | None = None
    n_entries: int | None = None

    def header(self) -> bytes:
        counts = (
            len(self.tensors) if self.n_tensors is None else self.n_tensors,
            len(self.entries) if self.n_entries is None else self.n_entries,
        )
        parts = [self.magic, packed(UINT32, self.version), *(packed(10, count) for count in counts)]
        for entry in self.entries:
            parts += [packed(STRING, entry.key), packed(UINT32, entry.type), packed(entry.type, entry.value)]
        for tensor in self.tensors:
            parts += [packed(STRING, tensor.name), packed(UINT32, len(tensor.dimensions))]
            parts += [*(packed(10, size) for size in tensor.dimensions), packed(UINT32, tensor.type)]
            parts.append(packed(10, tensor.offset))
        header = b"".join(parts)
        return header + bytes(-len(header) % 32)

    def pack(self) -> bytes:
        return self.header() + self.content


def packed(type: int, value: Any) -> bytes:
    """A value as the type has it; an unknown type takes bytes."""
    if type == STRING:
        data = value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")
        return struct.pack("<Q", len(data)) + data
    if type == BOOL:
        return bytes([int(value) & 255])
    if type == ARRAY:
        item_type, items = value
        head = struct.pack("<IQ", item_type & 0xFFFFFFFF, len(items))
        return head + b"".join(packed(item_type, item) for item in items)
    code = _CODES.get(type)
    if code is None:
        return bytes(value)
    if code in "fd":
        with np.errstate(over="ignore"):
            return np.array([value]).astype(f"<f{struct.calcsize(code)}").tobytes()
    size = struct.calcsize(code)
    return (int(value) & (1 << 8 * size) - 1).to_bytes(size, "little")


@cache
def gguf_file(kind: str) -> GgufFile:
    """The model with a tokenizer of this kind: "gpt2", or "llama", whose matrices are Q8_0."""
    metadata = gguf_of(trained("smollm"), "smollm") if kind == "gpt2" else sentencepiece_gguf()
    sizes = {
        "block_count": 1,
        "context_length": 512,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 32,
        "vocab_size": VOCAB,
    }
    entries = [Entry("general.architecture", STRING, "llama")]
    entries += [Entry(f"llama.{key}", UINT32, value) for key, value in sizes.items()]
    entries += [Entry("llama.attention.layer_norm_rms_epsilon", FLOAT32, EPS)]
    entries += [Entry("llama.rope.freq_base", FLOAT32, 10000.0)]
    entries += [_entry(key, value) for key, value in metadata.items()]
    entries += [Entry("tokenizer.ggml.bos_token_id", UINT32, 1), Entry("tokenizer.ggml.eos_token_id", UINT32, 0)]
    entries += [Entry("tokenizer.chat_template", STRING, CHATML)]
    return GgufFile(entries, *_tensors(weights().items(), quantized=kind == "llama"))


def _entry(key: str, value: Any) -> Entry:
    if isinstance(value, (list, np.ndarray)):
        items = list(value)
        item_type = STRING if isinstance(items[0], str) else INT32 if value.dtype.kind == "i" else FLOAT32
        return Entry(key, ARRAY, (item_type, items if item_type == STRING else [item.item() for item in items]))
    return Entry(key, BOOL if isinstance(value, bool) else STRING, value)


def _tensors(named: Iterable[tuple[str, np.ndarray]], *, quantized: bool) -> tuple[list[Tensor], bytes]:
    short = {long: name for name, long in (MODULE_NAMES | LAYER_MODULE_NAMES).items()}
    tensors, content = [], b""
    for hf_name, values in named:
        module = hf_name.removesuffix(".weight")
        if module.startswith("model.layers.0."):
            name = f"blk.0.{short[module.removeprefix('model.layers.0.')]}.weight"
        else:
            name = f"{short[module]}.weight"
        stored, type = values.astype("<f4"), F32
        if quantized and values.ndim == 2:
            from gguf import GGMLQuantizationType
            from gguf.quants import quantize

            stored, type = quantize(np.ascontiguousarray(values), GGMLQuantizationType.Q8_0), Q8_0
        tensors.append(Tensor(name, list(values.shape[::-1]), type, len(content)))
        content += stored.tobytes()
        content += bytes(-len(content) % 32)
    return tensors, content
