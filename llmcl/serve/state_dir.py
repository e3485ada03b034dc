"""The folder that keeps responses of /v1/responses between runs (`--state-dir`)."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from llmcl.errors import UsageError, one_line
from llmcl.runtime.cache_files import UnusableError, distrust, expanded, read_plain, write_atomically
from llmcl.serve.kept import MOST_CHARACTERS, KeptResponse

_OPTION = "--state-dir"
_FILE = re.compile(r"(resp_[0-9a-f]{24})\.json")
_MAX_BYTES = 8 * MOST_CHARACTERS  # a character in JSON has up to six
_log = logging.getLogger(__name__)


class StateDir:
    """A folder with a file for each kept response. Files are written and removed in a thread, in order.

    A problem with a file is only logged as a warning. Raises UsageError if the folder cannot be made or other users
    could write there.
    """

    def __init__(self, folder: Path):
        self._folder = expanded(folder, _OPTION)
        self._files = ThreadPoolExecutor(1, "files of kept responses")
        self._has_failed = False  # whether the last change failed: a full disk is logged once
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            flaw = distrust(self._folder, self._folder)
        except OSError as error:
            raise UsageError(f"{_OPTION} {one_line(folder)}: {error.strerror}; give another folder") from error
        if flaw is not None:
            path, reason = flaw
            raise UsageError(
                f"{_OPTION} {one_line(folder)}: {one_line(path)} is not safe: {reason}; take others' rights away "
                "(chmod go-w), or give another folder"
            )

    def load(self) -> Iterator[tuple[str, KeptResponse]]:
        """Yields names and responses, the oldest first. Skips unusable files with a warning."""
        files = [(path.lstat().st_mtime_ns, path) for path in self._folder.iterdir() if _FILE.fullmatch(path.name)]
        for _, path in sorted(files):
            try:
                yield path.stem, _decode(path.stem, read_plain(path, _MAX_BYTES, trusted=True))
            except UnusableError as error:
                _log.warning("%s %s is not used: %s", _OPTION, one_line(path), error.strerror)
            except (OSError, ValueError, RecursionError):
                _log.warning("%s %s is not used: it is damaged; remove it", _OPTION, one_line(path))

    def write(self, name: str, kept: KeptResponse) -> None:
        self._files.submit(self._attempt, lambda: write_atomically(self._path(name), _encode(kept)))

    def remove(self, name: str) -> None:
        self._files.submit(self._attempt, lambda: self._path(name).unlink(missing_ok=True))

    def close(self) -> None:
        """Returns once all files are written."""
        self._files.shutdown()

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.json"

    def _attempt(self, change: Callable[[], None]) -> None:
        try:
            change()
            self._has_failed = False
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                where = one_line(self._folder)
                _log.warning("%s %s: responses cannot be kept there (%s)", _OPTION, where, error.strerror)


def _encode(kept: KeptResponse) -> bytes:
    values = {"messages": kept.messages, "response": kept.response, "items": kept.items}
    return json.dumps(values, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _decode(name: str, data: bytes) -> KeptResponse:
    """Raises ValueError for anything that `_encode` does not write under this name."""
    values = json.loads(data.decode("utf-8", "surrogatepass"))
    if not isinstance(values, dict) or {*values} != {"messages", "response", "items"}:
        raise ValueError
    messages, response, items = values["messages"], values["response"], values["items"]
    if not isinstance(response, dict) or response.get("id") != name or not isinstance(response.get("output"), list):
        raise ValueError
    for part, mark in (messages, "role"), (items, "id"):
        if not isinstance(part, list) or not all(isinstance(each, dict) and mark in each for each in part):
            raise ValueError
    return KeptResponse(messages, response, items)
