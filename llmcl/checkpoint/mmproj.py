"""Finds the vision tower of a GGUF model: an mmproj file, as llama.cpp's converter writes it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from llmcl.checkpoint import hub_model
from llmcl.checkpoint.hub import quantisation
from llmcl.errors import CheckpointError, one_line
from llmcl.progress import Progress

_TYPES = "F16", "BF16", "F32"  # the first is preferred; then quantised files
_GENERAL = {"mmproj", "model"}


def find_mmproj(name: str, path: Path, *, offline: bool, progress: Progress | None = None) -> Path | None:
    """Returns the mmproj file for the GGUF model `name` at `path`: beside it, or on the hub where it came from.

    Raises CheckpointError if several files fit, HubError if the hub does not answer.
    """
    if (hub := hub_model(name, offline, progress)) is not None:
        return hub.fetch_mmproj(lambda files: choose_mmproj(files, path.name))
    beside = choose_mmproj([file.name for file in path.parent.glob("*.gguf")], path.name)
    return None if beside is None else path.parent / beside


def choose_mmproj(files: Iterable[str], model: str) -> str | None:
    """Returns the mmproj file that belongs to a model's file, or None. Names with the model's words go first.

    Raises CheckpointError if several files fit equally well.
    """
    words = _words(model)
    ranked: list[tuple[int, int, str]] = []
    for file in sorted(file for file in files if file.endswith(".gguf") and "mmproj" in file.lower()):
        named = _words(PurePosixPath(file).name) - _GENERAL
        if named and not named & words:  # another model's
            continue
        kind = quantisation(file) or ""
        ranked.append((-len(named & words), _TYPES.index(kind) if kind in _TYPES else len(_TYPES), file))
    ranked.sort()
    best = [file for *rank, file in ranked if rank == list(ranked[0][:2])]
    if len(best) > 1:
        raise CheckpointError(
            f"several vision towers fit {one_line(model)}: {one_line(', '.join(best))}; choose one of them "
            "(--mmproj FILE, mmproj)"
        )
    return best[0] if best else None


def _words(file: str) -> set[str]:
    """Returns the words of a file's name, without its quantisation."""
    stem = file.lower().removesuffix(".gguf")
    kind = (quantisation(file) or "").lower()
    return {word for word in re.split(r"[-._]+", stem.removesuffix(kind)) if word}
