"""The cache folder of the tests, away from the user's own."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / ".pytest_cache" / "llmcl"


def use_own_cache() -> None:
    """Sets LLMCL_CACHE_DIR for this process and those that it starts, unless it is set.

    Compiled kernels are kept there between runs; tuned tiles and excluded kernels, which no test is to meet, are not.
    """
    if "LLMCL_CACHE_DIR" not in os.environ:
        os.environ["LLMCL_CACHE_DIR"] = str(FOLDER)
        shutil.rmtree(FOLDER / "findings", ignore_errors=True)
