"""A small model as files: a Hugging Face folder and a GGUF file, and the raw bytes of hostile ones."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_reference import write_out

# Every kind of tensor, and rows that are whole blocks of 32.
HF_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 50,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class HfFiles:
    """Writes Hugging Face folders."""

    config = HF_CONFIG

    def shapes(self, **changes: Any) -> dict[str, tuple[int, ...]]:
        """Name and shape of each tensor, from transformers and not from the code under test."""
        from transformers import LlamaConfig, LlamaForCausalLM

        model = LlamaForCausalLM(LlamaConfig(**{**HF_CONFIG, **changes}))
        return {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}

    def tensors(self, dtype: Any = np.float32, **changes: Any) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(1)
        return {name: rng.standard_normal(shape).astype(dtype) for name, shape in self.shapes(**changes).items()}

    def write(
        self,
        folder: Path,
        tensors: Mapping[str, np.ndarray] | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> Path:
        from safetensors.numpy import save_file

        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps({**HF_CONFIG, **(config or {})}))
        if tensors is not None:
            save_file(dict(tensors), folder / "model.safetensors")
        return folder


class GgufFiles:
    """Writes GGUF files: sound ones with the package `gguf`, unsound ones by hand."""

    metadata: Mapping[str, Any] = {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.context_length": 128,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 96,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.key_length": 16,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.vocab_size": 50,
    }

    def tensors(self, hf_tensors: Mapping[str, np.ndarray], n_heads: Mapping[str, int]) -> dict[str, np.ndarray]:
        """The tensors of a Hugging Face checkpoint as llama.cpp's converter names and permutes them."""
        names = {
            "model.embed_tokens": "token_embd",
            "model.norm": "output_norm",
            "lm_head": "output",
            "input_layernorm": "attn_norm",
            "self_attn.q_proj": "attn_q",
            "self_attn.k_proj": "attn_k",
            "self_attn.v_proj": "attn_v",
            "self_attn.o_proj": "attn_output",
            "post_attention_layernorm": "ffn_norm",
            "mlp.gate_proj": "ffn_gate",
            "mlp.up_proj": "ffn_up",
            "mlp.down_proj": "ffn_down",
        }
        result = {}
        for name, values in hf_tensors.items():
            module = name.removesuffix(".weight")
            prefix = ""
            if module.startswith("model.layers."):
                index, module = module.removeprefix("model.layers.").split(".", 1)
                prefix = f"blk.{index}."
            for projection, count in n_heads.items():
                if module == f"self_attn.{projection}":
                    halves = values.reshape(count, 2, -1, values.shape[1])
                    values = halves.swapaxes(1, 2).reshape(values.shape)
            result[f"{prefix}{names[module]}.weight"] = values
        return result

    def write(
        self,
        path: Path,
        tensors: Mapping[str, np.ndarray],
        formats: Mapping[str, str] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Path:
        """formats: GGUF tensor name -> format, where it is not F32."""
        from gguf import GGMLQuantizationType, GGUFWriter
        from gguf.quants import quantize

        writer = GGUFWriter(path, "llama")
        for key, value in {**self.metadata, **(metadata or {})}.items():
            if key == "general.architecture":
                continue  # the writer has it already
            if isinstance(value, (list, np.ndarray)):
                writer.add_array(key, value.tolist() if isinstance(value, np.ndarray) else value)
            elif isinstance(value, (str, bool, float)):
                {str: writer.add_string, bool: writer.add_bool, float: writer.add_float32}[type(value)](key, value)
            else:
                writer.add_uint32(key, value)
        for name, values in tensors.items():
            kind = GGMLQuantizationType[(formats or {}).get(name, "F32")]
            stored = quantize(np.ascontiguousarray(values, dtype=np.float32), kind)
            writer.add_tensor(name, stored, raw_dtype=kind)
        return write_out(writer, path)

    def string(self, text: str | bytes) -> bytes:
        data = text.encode() if isinstance(text, str) else text
        return struct.pack("<Q", len(data)) + data

    def entry(self, key: str | bytes, type_number: int, payload: bytes) -> bytes:
        return self.string(key) + struct.pack("<I", type_number) + payload

    def tensor(
        self,
        name: str,
        dimensions: Sequence[int],
        type_number: int,
        offset: int,
        n_dimensions: int | None = None,
    ) -> bytes:
        count = len(dimensions) if n_dimensions is None else n_dimensions
        sizes = struct.pack(f"<I{len(dimensions)}Q", count, *dimensions)
        return self.string(name) + sizes + struct.pack("<IQ", type_number, offset)

    def raw(
        self,
        entries: Sequence[bytes] = (),
        table: Sequence[bytes] = (),
        content: bytes = b"",
        *,
        magic: bytes = b"GGUF",
        version: int = 3,
        n_tensors: int | None = None,
        n_entries: int | None = None,
        alignment: int = 32,
    ) -> bytes:
        """A file from its parts, each of which may be wrong."""
        counts = (
            len(table) if n_tensors is None else n_tensors,
            len(entries) if n_entries is None else n_entries,
        )
        header = magic + struct.pack("<IQQ", version, *counts) + b"".join(entries) + b"".join(table)
        return header + bytes(-len(header) % alignment) + content


@pytest.fixture(scope="session")
def hf_files() -> HfFiles:
    return HfFiles()


@pytest.fixture(scope="session")
def gguf_files() -> GgufFiles:
    return GgufFiles()
