"""Finds a model's vision part, in its folder or in an mmproj file, and makes processor and tower from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmcl.architectures.config.reader import Reader
from llmcl.checkpoint import Checkpoint
from llmcl.checkpoint.files import optional_json, read_json
from llmcl.checkpoint.gguf import read_gguf
from llmcl.checkpoint.safetensors import read_folder_tensors
from llmcl.checkpoint.tensors import StoredTensor
from llmcl.errors import CheckpointError, UnsupportedModelError, UsageError, shown
from llmcl.runtime.device import Device
from llmcl.vision import gemma3, idefics3, pixtral, qwen_vl
from llmcl.vision.files import VisionFiles
from llmcl.vision.tensors import VisionTensors
from llmcl.vision.vision import Vision


@dataclass(frozen=True)
class VisionFamily:
    """How a family's vision part is found and made."""

    from_folder: Callable[[VisionFiles], Vision]
    from_mmproj: Callable[[VisionFiles], Vision] | None = None  # None: llmcl reads folders only
    # Returns an mmproj file's tensors under the names that from_mmproj reads.
    mmproj_tensors: Callable[[Mapping[str, StoredTensor]], dict[str, StoredTensor]] = dict
    projectors: tuple[str, ...] = ()  # clip.projector_type in mmproj files
    text: tuple[str, ...] = ()  # architectures of text models that an mmproj file may belong to
    # Beginning of a tensor's name in a folder, without "model." -> beginning of its name in VisionFiles.tensors, None
    # for parts that images do not need. The first that fits counts. Other tensors belong to the text part.
    prefixes: Mapping[str, str | None] = field(default_factory=dict)


_GEMMA3 = VisionFamily(
    gemma3.from_folder,
    gemma3.from_mmproj,
    gemma3.mmproj_tensors,
    projectors=("gemma3",),
    text=("gemma3_text",),
    prefixes={
        "vision_tower.vision_model.head.": None,  # SigLIP's own pooling
        "vision_tower.head.": None,
        "vision_tower.vision_model.": "vision.",
        "vision_tower.": "vision.",
        "multi_modal_projector.": "projector.",
    },
)
_IDEFICS3 = VisionFamily(
    idefics3.from_folder,
    idefics3.from_mmproj,
    idefics3.mmproj_tensors,
    projectors=("idefics3",),
    text=("llama",),
    prefixes={"vision_model.": "vision.", "connector.": "projector."},
)
_QWEN = VisionFamily(qwen_vl.from_folder, prefixes={"visual.": "vision."})
_MISTRAL3 = VisionFamily(
    pixtral.from_folder, prefixes={"vision_tower.": "vision.", "multi_modal_projector.": "projector."}
)
# Keyed by config.json's model_type.
VISION_FAMILIES: dict[str, VisionFamily] = {
    "gemma3": _GEMMA3,
    "idefics3": _IDEFICS3,
    "smolvlm": _IDEFICS3,
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN,
    "qwen3_vl_moe": _QWEN,
    "mistral3": _MISTRAL3,
}


def load_vision(device: Device, checkpoint: Checkpoint, mmproj: Path | None = None) -> Vision | None:
    """Loads the vision part of a checkpoint: from `mmproj`, or from the checkpoint's folder.

    Returns None if there is none. Raises CheckpointError, UnsupportedModelError or UsageError for a part that cannot be
    read, is incomplete, or belongs to another model.
    """
    if mmproj is not None:
        return _from_mmproj(device, checkpoint, mmproj)
    if checkpoint.gguf_metadata is not None:
        return None
    config = read_json(checkpoint.path / "config.json")
    family = VISION_FAMILIES.get(str(config.get("model_type")))
    if family is None:
        return None
    stored = _named(read_folder_tensors(checkpoint.path), family.prefixes)
    if not stored:
        return None  # the text part was saved alone
    preprocessing: dict[str, Any] = {}
    for file in ("preprocessor_config.json", "processor_config.json"):
        values = optional_json(checkpoint.path / file)
        preprocessing |= values | (values.get("image_processor") or {})
    tensors = VisionTensors(device, stored, checkpoint.path.name)
    files = VisionFiles(
        Reader(config, "config.json"),
        Reader(preprocessing, "preprocessor_config.json"),
        tensors,
        checkpoint.config.hidden_size,
    )
    vision = family.from_folder(files)
    tensors.finish()
    return vision


def _named(stored: Mapping[str, StoredTensor], prefixes: Mapping[str, str | None]) -> dict[str, StoredTensor]:
    """Returns the vision part's tensors under their short names."""
    tensors: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        bare = name.removeprefix("model.")
        prefix = next((prefix for prefix in prefixes if bare.startswith(prefix)), None)
        if prefix is None or (short_prefix := prefixes[prefix]) is None:
            continue
        short = short_prefix + bare.removeprefix(prefix)
        if short in tensors:
            raise CheckpointError(f"tensor {shown(name)} is there under two names. Fetch the model again.")
        tensors[short] = tensor
    return tensors


def _from_mmproj(device: Device, checkpoint: Checkpoint, path: Path) -> Vision:
    metadata, stored = read_gguf(path)
    if (architecture := metadata.get("general.architecture")) != "clip":
        raise UsageError(
            f"{path.name} is a GGUF file with general.architecture {shown(architecture)}; expected clip, an mmproj "
            "file with the model's vision part"
        )
    projector = metadata.get("clip.vision.projector_type", metadata.get("clip.projector_type"))
    family = next((family for family in VISION_FAMILIES.values() if projector in family.projectors), None)
    if family is None or family.from_mmproj is None:
        known = ", ".join(sorted({name for family in VISION_FAMILIES.values() for name in family.projectors}))
        raise UnsupportedModelError(f"{path.name} has the projector {shown(projector)}; llmcl supports {known}.")
    hidden, text = checkpoint.config.hidden_size, checkpoint.config.architecture
    columns = Reader(metadata, path.name).size("clip.vision.projection_dim", 1 << 20)
    if columns != hidden or text not in family.text:
        raise UsageError(
            f"{path.name} is for another model: its projector {projector} gives rows of {columns} values for "
            f"{' or '.join(family.text)}, and {checkpoint.name} is {text} with a hidden size of {hidden}; give the "
            "mmproj file that was converted from the same model"
        )
    tensors = VisionTensors(device, family.mmproj_tensors(stored), path.name)
    vision = family.from_mmproj(VisionFiles(Reader(metadata, path.name), Reader({}, path.name), tensors, hidden))
    tensors.finish()
    return vision
