"""Writes a model as a Hugging Face folder: config.json, tokenizer, safetensors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any

from llmcl.architectures.config import ModelConfig
from llmcl.architectures.config.reader import Reader
from llmcl.architectures.families import FAMILIES, TEXT_PARTS
from llmcl.checkpoint import Checkpoint
from llmcl.checkpoint.files import read_json
from llmcl.checkpoint.formats import FLOAT_FORMATS
from llmcl.checkpoint.safetensors import WEIGHTS_FILE
from llmcl.convert.tensors import OutTensor, Pieces, checkpoint_rows, synced, write_safetensors
from llmcl.errors import UnsupportedModelError, shown
from llmcl.tokenizer import gguf_tokenizer

_KEPT_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".md")
_QUANTISERS_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")  # the result is not packed
_MAX_KEPT_BYTES = 64 << 20


@dataclass(frozen=True)
class FolderPlan:
    """The content for an empty folder."""

    tensors: list[OutTensor]
    files: dict[str, str | Path]  # name -> text, or the path of a file to copy

    def write(self, folder: Path, pieces: Pieces) -> None:
        for name, content in self.files.items():
            if isinstance(content, Path):
                shutil.copyfile(content, folder / name)
            else:
                (folder / name).write_text(content, encoding="utf-8")
            synced(folder / name)
        write_safetensors(folder / WEIGHTS_FILE, pieces, self.tensors)


def folder_plan(checkpoint: Checkpoint, chosen: Callable[[str, tuple[int, ...], str], str]) -> FolderPlan:
    """Plans a folder. chosen: see `gguf_plan`.

    Raises UnsupportedModelError for a GGUF file beyond what config.json or tokenizer.json can express.
    """
    family = FAMILIES[checkpoint.config.architecture]
    if family.stacked or family.interleaved or family.transposed:
        raise UnsupportedModelError(
            f"a folder cannot be made of the architecture {checkpoint.config.architecture!r}, whose tensors hold "
            "several matrices each; use --quantize while loading it, or a GGUF file"
        )
    if family.recurrent is not None or family.modules or family.shifted_norms:
        raise UnsupportedModelError(
            f"a folder cannot be made of the architecture {checkpoint.config.architecture!r}, whose tensors have other "
            "names or shapes there; use --quantize while loading it, or a GGUF file"
        )
    tensors = [
        OutTensor(
            name,
            info.shape,
            chosen(name, info.shape, info.format) if len(info.shape) == 2 else info.format,
            info.format,
            checkpoint_rows(checkpoint, name, interleaved=family.interleaves_rope),
        )
        for name, info in checkpoint.tensors.items()
    ]
    assert all(tensor.format in FLOAT_FORMATS for tensor in tensors)
    formats = [tensor.format for tensor in tensors if len(tensor.shape) == 2]
    dtype = FLOAT_FORMATS[max(FLOAT_FORMATS, key=formats.count)]
    files = _files_of_folder(checkpoint.path, dtype) if checkpoint.path.is_dir() else _files_of_gguf(checkpoint, dtype)
    return FolderPlan(tensors, files)


def is_kept(name: str) -> bool:
    """Whether a file with this name is copied from folder to folder."""
    is_hidden = name.startswith(".") or name.endswith(".index.json")
    return (
        not is_hidden
        and name not in _QUANTISERS_FILES
        and (name.endswith(_KEPT_SUFFIXES) or name.startswith("LICENSE"))
    )


def _files_of_folder(folder: Path, dtype: str) -> dict[str, str | Path]:
    """Returns the source's files; only the dtype in config.json changes."""
    config = read_json(folder / "config.json")
    if config["model_type"] in TEXT_PARTS:
        raise UnsupportedModelError(
            f"a folder cannot be made of the text part of {shown(config['model_type'])}, a model with images; use "
            "--quantize while loading it, or a GGUF file"
        )
    config.pop("quantization_config", None)  # the matrices are floats now
    config["dtype" if "dtype" in config else "torch_dtype"] = dtype
    files: dict[str, str | Path] = {}
    for path in sorted(folder.iterdir()):
        if is_kept(path.name) and path.is_file() and path.stat().st_size <= _MAX_KEPT_BYTES:
            files[path.name] = path
    return files | {"config.json": _json(config)}


def _files_of_gguf(checkpoint: Checkpoint, dtype: str) -> dict[str, str | Path]:
    """Returns config.json and the tokenizer, built from the metadata that llmcl itself uses."""
    metadata, config = checkpoint.gguf_metadata or {}, checkpoint.config
    read = Reader(metadata, "GGUF metadata")
    backend, adds_bos = gguf_tokenizer.build(metadata)
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    special = {"eos_token": next(iter(config.eos_token_ids), None)}
    for name, key in (("unk_token", "unknown_token_id"), ("pad_token", "padding_token_id")):
        special[name] = read.get(f"tokenizer.ggml.{key}")
        if type(special[name]) not in (int, NoneType):
            read.fail(f"tokenizer.ggml.{key}", special[name], "a token id")
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    if config.bos_token_id is not None:
        special["bos_token"] = config.bos_token_id
        bos = tokens[config.bos_token_id]
        if adds_bos:
            from tokenizers.processors import TemplateProcessing

            backend.post_processor = TemplateProcessing(
                single=[bos, "$A"], pair=[bos, "$A", bos, "$B"], special_tokens=[(bos, config.bos_token_id)]
            )
    settings |= {name: tokens[i] for name, i in special.items() if i is not None and 0 <= i < len(tokens)}
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        settings["chat_template"] = template
    return {
        "config.json": _json(hf_config(config, dtype)),
        "tokenizer.json": str(backend.to_str()),
        "tokenizer_config.json": _json(settings),
    }


def hf_config(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """Returns config.json for a Llama model. Raises UnsupportedModelError for settings it cannot express."""
    if config.architecture != "llama":
        raise UnsupportedModelError(
            f"a folder cannot be made from a GGUF file of the architecture {config.architecture!r}, only of llama; "
            "convert it to another GGUF file, or fetch the model's own folder"
        )
    if config.has_windows:
        raise UnsupportedModelError(
            "the GGUF file has attention windows, which config.json of a llama model cannot say; convert it to another "
            "GGUF file, or fetch the model's own folder"
        )
    if config.has_biases:
        raise UnsupportedModelError(
            "the GGUF file has biases, which a converted folder cannot say; convert it to another GGUF file, or fetch "
            "the model's own folder"
        )
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind != "linear":
        how = "as a factor for each frequency (rope_freqs.weight)" if scaling.kind == "factors" else scaling.kind
        raise UnsupportedModelError(
            f"the GGUF file gives its rotary scaling {how}, which a converted folder's config.json cannot say; convert "
            "it to another GGUF file, or fetch the model's own folder"
        )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_q_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if scaling is None else {"rope_type": "linear", "factor": scaling.factor},
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_act": "silu",
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids) or None,
        "torch_dtype": dtype,
    }


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
