"""The file that keeps a server's prefix cache between runs (`--cache-file`)."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Protocol

from llmcl.errors import LlmclError, one_line

_log = logging.getLogger(__name__)


class Keeps(Protocol):
    """The methods that CacheFile needs from an engine."""

    def store_prefixes(self, file: Path, max_bytes: int) -> int: ...
    def restore_prefixes(self, file: Path) -> int: ...


class CacheFile:
    """Loads and saves the prefix cache. A problem with the file is only logged as a warning: the server runs on without
    it.

    max_bytes: largest file to write. A foreign file is left untouched.
    """

    def __init__(self, path: Path, max_bytes: int):
        self.path = path
        self._max_bytes = max_bytes
        self._may_write = True

    def restore(self, engine: Keeps) -> str:
        """Fills the engine's prefix cache from the file. Returns a message for the user, or ""."""
        from llmcl.models.prefix_file import PrefixFileError  # late: the server listens before the engine is loaded

        start = time.perf_counter()
        try:
            n_tokens = engine.restore_prefixes(self.path)
        except PrefixFileError as error:
            self._may_write = error.may_replace
            _log.warning("--cache-file: %s", error)
            return ""
        if not n_tokens:
            return ""
        return f"prefix cache: {n_tokens} tokens of {one_line(self.path)}, {time.perf_counter() - start:.1f} s"

    def store(self, engine: Keeps) -> None:
        """Writes the engine's prefix cache. Called before the engine closes."""
        if not self._may_write:
            return
        try:
            engine.store_prefixes(self.path, self._max_bytes)
        except OSError as error:
            _log.warning(
                "--cache-file %s: cannot be written (%s); what it held stays", one_line(self.path), error.strerror
            )
        except LlmclError as error:  # from an engine that failed
            _log.warning("--cache-file %s: not written: %s", one_line(self.path), error)
