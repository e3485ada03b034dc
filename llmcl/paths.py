"""Where llmcl keeps what it can make again: compiled kernels, ICD files, probe results, findings about devices."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache_dir() -> Path:
    """The folder `LLMCL_CACHE_DIR`, or the per-user cache folder of this system. It may not exist yet."""
    chosen = os.environ.get("LLMCL_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser()
    from platformdirs import user_cache_dir

    return Path(user_cache_dir("llmcl", appauthor=False))


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
