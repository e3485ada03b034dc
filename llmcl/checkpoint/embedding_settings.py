"""The embedding settings of a checkpoint: the files of sentence-transformers, or a GGUF key."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from llmcl.architectures.config import limits
from llmcl.architectures.config.reader import Reader, unsupported
from llmcl.architectures.embedding import NO_SETTINGS, EmbeddingSettings, Pooling, RankingHead
from llmcl.architectures.families.encoder import RANKING
from llmcl.checkpoint.files import check_is_file, optional_json, read_bytes, reading
from llmcl.checkpoint.tensors import Checkpoint
from llmcl.errors import CheckpointError, shown

MODULES_FILE = "modules.json"
SETTINGS_FILE = "config_sentence_transformers.json"
_LENGTH_FILE = "sentence_bert_config.json"
EMBEDDING_FILES = (MODULES_FILE, SETTINGS_FILE, _LENGTH_FILE)
_POOLING_FLAGS: dict[str, Pooling] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
}
_RANK = 4  # a reranker
_GGUF_POOLINGS: dict[int, Pooling | None] = {0: None, 1: "mean", 2: "cls", 3: "last", _RANK: "cls"}
_IDENTITY = "torch.nn.modules.linear.Identity"


def embedding_settings(checkpoint: Checkpoint) -> EmbeddingSettings:
    """Returns the settings. Raises CheckpointError or UnsupportedModelError for damaged or unknown ones."""
    metadata = checkpoint.gguf_metadata
    if metadata is not None:
        return _from_gguf(metadata)
    folder, encoder = checkpoint.path, checkpoint.config.encoder
    if encoder is not None and encoder.ranks:
        return EmbeddingSettings(ranking=RankingHead(*map(checkpoint.array, RANKING)))
    return _from_folder(folder) if (folder / MODULES_FILE).is_file() else NO_SETTINGS


def module_files(data: bytes) -> list[str]:
    """Returns the files that the modules in modules.json need beside the model's. Raises CheckpointError."""
    files = []
    for path, kind in _modules(data):
        if kind in ("Pooling", "Dense"):
            files.append(f"{path}/config.json")
        if kind == "Dense":
            files.append(f"{path}/model.safetensors")
    return files


def _modules(data: bytes) -> list[tuple[str, str]]:
    """Returns path and kind of each module in modules.json, such as ("1_Pooling", "Pooling")."""
    try:
        modules = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{MODULES_FILE} is not JSON. Fetch it again.") from error
    if not isinstance(modules, list):
        raise CheckpointError(f"{MODULES_FILE} is {shown(modules)}, expected a list of modules. Fetch it again.")
    pairs = []
    for module in modules:
        path, kind = (module.get(key) if isinstance(module, dict) else None for key in ("path", "type"))
        if not isinstance(path, str) or not isinstance(kind, str):
            raise CheckpointError(f"{MODULES_FILE}: a module is {shown(module)}, expected one with path and type.")
        if (pure := PurePosixPath(path)).is_absolute() or len(pure.parts) > 1 or ".." in pure.parts or "\\" in path:
            raise CheckpointError(f"{MODULES_FILE}: the path {shown(path)}, expected the name of a folder beside it.")
        pairs.append((path, kind.rpartition(".")[2]))
    return pairs


def _from_folder(folder: Path) -> EmbeddingSettings:
    pooling: Pooling | None = None
    dense: list[np.ndarray] = []
    for path, kind in _modules(read_bytes(folder / MODULES_FILE)):
        if kind == "Pooling":
            pooling = _pooling(Reader(optional_json(folder / path / "config.json"), f"{path}/config.json"))
        elif kind == "Dense":
            dense.append(_dense(folder / path, path))
        elif kind not in ("Transformer", "Normalize"):
            unsupported(f"the module {shown(kind)} ({MODULES_FILE})", "it supports pooling, dense and normalisation")
    settings = Reader(optional_json(folder / SETTINGS_FILE), SETTINGS_FILE)
    prompts = settings.get("prompts", {})
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        settings.fail("prompts", prompts, "texts by name")
    default = settings.get("default_prompt_name")
    if default is not None and default not in prompts:
        settings.fail("default_prompt_name", default, "the name of a prompt, or null")
    length = Reader(optional_json(folder / _LENGTH_FILE), _LENGTH_FILE)
    longest = None
    if length.get("max_seq_length") is not None:
        longest = length.size("max_seq_length", limits.MAX_POSITION)
    names: dict[str, Any] = {"prompts": prompts, "default_prompt": default}
    return EmbeddingSettings(pooling, tuple(dense), max_tokens=longest, **names)


def _pooling(read: Reader) -> Pooling:
    mode = read.get("pooling_mode")
    chosen = [mode] if mode is not None else [key for key, value in read.values.items() if _is_mode(key, value)]
    known: dict[str, Pooling] = {"mean": "mean", "cls": "cls", "lasttoken": "last"}
    if mode is None:
        known = _POOLING_FLAGS
    if len(chosen) != 1 or chosen[0] not in known:
        unsupported(f"the pooling {shown(chosen)} ({read.source})", f"it supports one of {', '.join(known)}")
    if read.get("include_prompt", True) is not True:
        unsupported(f"pooling without the prompt's rows (include_prompt false in {read.source})")
    return known[chosen[0]]


def _is_mode(key: str, value: object) -> bool:
    return key.startswith("pooling_mode_") and value is True


def _dense(folder: Path, path: str) -> np.ndarray:
    """Returns the matrix of a dense layer, float32 [out, in]."""
    read = Reader(optional_json(folder / "config.json"), f"{path}/config.json")
    shape = tuple(read.size(f"{side}_features", limits.MAX_HIDDEN) for side in ("out", "in"))
    if read.flag("bias", default=True):
        unsupported(f"a dense layer with a bias ({path}/config.json)")
    if (activation := read.text("activation_function", default="torch.nn.modules.activation.Tanh")) != _IDENTITY:
        unsupported(f"a dense layer with the activation {shown(activation)} ({path}/config.json)")
    return _matrix(folder / "model.safetensors", shape, path)


def _matrix(file: Path, shape: tuple[int, ...], path: str) -> np.ndarray:
    from safetensors.numpy import load_file

    check_is_file(file)
    with reading(file):
        tensors: Mapping[str, np.ndarray] = load_file(file)
    weight = tensors.get("linear.weight")
    if weight is None or weight.shape != shape:
        raise CheckpointError(
            f"{path}/model.safetensors has no tensor linear.weight of the shape {list(shape)}, which its config.json "
            "asks for. Fetch it again."
        )
    return weight.astype(np.float32)


def _from_gguf(metadata: Mapping[str, Any]) -> EmbeddingSettings:
    read = Reader(metadata, "GGUF metadata")
    key = f"{read.text('general.architecture')}.pooling_type"
    value = read.get(key)
    end = None
    if read.flag("tokenizer.ggml.add_eos_token", default=False):
        end = read.get("tokenizer.ggml.eos_token_id")
    if value is None:
        return EmbeddingSettings(end_token=end)
    if value == _RANK and "tokenizer.chat_template.rerank" in metadata:  # a decoder that judges, see `judging_head`
        return NO_SETTINGS
    if type(value) is not int or value not in _GGUF_POOLINGS:
        read.fail(key, value, "0 (none), 1 (mean), 2 (cls), 3 (last) or 4 (rank)")
    return EmbeddingSettings(_GGUF_POOLINGS[value], end_token=end)
