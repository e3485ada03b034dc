"""Where llmcl keeps what it can make again: compiled kernels, ICD files, probe results, findings about devices."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from llmcl.errors import UsageError, shown


def cache_dir() -> Path:
    """The folder `LLMCL_CACHE_DIR`, or the per-user cache folder of this system. It may not exist yet."""
    chosen = os.environ.get("LLMCL_CACHE_DIR")
    if chosen:
        return expanded(chosen, "LLMCL_CACHE_DIR")
    from platformdirs import user_cache_dir

    try:
        return Path(user_cache_dir("llmcl", appauthor=False)).expanduser()  # some versions leave a ~ that means nothing
    except RuntimeError as error:
        raise UsageError(
            "there is no folder for compiled kernels, because no home folder is known; set LLMCL_CACHE_DIR or HOME"
        ) from error


def expanded(path: str | os.PathLike[str], name: str) -> Path:
    """The path with `~` and `~user` replaced. Raises UsageError, which begins with `name`, if there is no such home."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UsageError(
            f"{name} is {shown(os.fspath(path))}, and no home folder is known for its ~; give a path without ~, or set "
            "HOME"
        ) from error


def write_atomically(path: Path, data: bytes) -> None:
    """Concurrent processes may write the same file; each reader sees a whole one or none. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        partial = Path(file.name)
    try:
        partial.write_bytes(data)
        partial.replace(path)
    except BaseException:  # a full disk is not filled further by what could not be finished
        partial.unlink()
        raise
