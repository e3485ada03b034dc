"""The cache folder of the tests, away from the user's own."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".pytest_cache" / "llmcl"
if hasattr(os, "geteuid") and ROOT.stat().st_uid not in (0, os.geteuid()):
    FOLDER = Path(tempfile.gettempdir()) / f"llmcl-tests-{os.geteuid()}"  # no cache lies in what belongs to another


def use_own_cache() -> None:
    """Sets LLMCL_CACHE_DIR for this process and those that it starts, unless it is set.

    Compiled kernels are kept there between runs; tuned tiles and excluded kernels, which no test is to meet, are not.
    """
    if "LLMCL_CACHE_DIR" not in os.environ:
        os.environ["LLMCL_CACHE_DIR"] = str(FOLDER)
        shutil.rmtree(FOLDER / "devices", ignore_errors=True)
