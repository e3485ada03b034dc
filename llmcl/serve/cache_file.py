"""The file in which a server keeps its prefix cache from one start to the next (`--cache-file`)."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Protocol

from llmcl.errors import LlmclError, one_line

_log = logging.getLogger(__name__)


class Keeps(Protocol):
    """What an engine can do for it."""

    def store_prefixes(self, file: Path, max_bytes: int) -> int: ...
    def restore_prefixes(self, file: Path) -> int: ...


class CacheFile:
    """A server starts, and ends, with the file or without it: what is wrong with it is said in a warning.

    max_bytes: of what it holds. A file that is not this server's own stays as it is.
    """

    def __init__(self, path: Path, max_bytes: int):
        self.path = path
        self._max_bytes = max_bytes
        self._may_write = True

    def restore(self, engine: Keeps) -> str:
        """Gives the engine what the file holds. Returns what there is to say."""
        from llmcl.models.prefix_file import PrefixFileError  # the server listens before the engine is imported

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
        """Writes what the engine has, before it is closed."""
        if not self._may_write:
            return
        try:
            engine.store_prefixes(self.path, self._max_bytes)
        except OSError as error:
            _log.warning(
                "--cache-file %s: cannot be written (%s); what it held stays", one_line(self.path), error.strerror
            )
        except LlmclError as error:  # of an engine that failed
            _log.warning("--cache-file %s: not written: %s", one_line(self.path), error)
