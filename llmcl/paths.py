"""Where llmcl keeps what it can make again: compiled kernels, ICD files, probe results."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """The folder `LLMCL_CACHE_DIR`, or the per-user cache folder of this system. It may not exist yet."""
    chosen = os.environ.get("LLMCL_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser()
    from platformdirs import user_cache_dir

    return Path(user_cache_dir("llmcl", appauthor=False))
