"""Maps and parses checkpoint files, with an error for each way in which a file can be wrong."""

from __future__ import annotations

import errno
import json
import mmap
import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from llmcl.errors import CheckpointError, one_line, shown

# Headers describe tensors and vocabularies: 1 MB is common, 35 MB is the largest known. A larger header means damage or
# an attack, and is refused before reading.
MAX_HEADER_BYTES = 100_000_000
MAX_SETTINGS_BYTES = 16_000_000  # same, for files without a vocabulary; 1 MB is the largest known

_LFS_POINTER = b"version https://git-lfs"


def map_file(path: Path) -> np.ndarray:
    """Maps the whole file read-only: uint8 [file size]. The mapping ends with its last view.

    Raises CheckpointError for a file that is missing, unreadable, empty, or a Git LFS pointer.
    """
    check_is_file(path)
    try:
        with reading(path):
            mapped = _MappedFile.of(path)
    except ValueError:
        raise CheckpointError(f"{path.name} is empty. Fetch it again.") from None
    if mapped.file.read(len(_LFS_POINTER)) == _LFS_POINTER:
        raise CheckpointError(
            f"{path.name} is a Git LFS pointer, not the file itself. Run `git lfs pull` in its folder."
        )
    return np.frombuffer(mapped, dtype=np.uint8)


class _MappedFile(mmap.mmap):
    """A mapping together with its open file, so that `read_view` can read the file directly."""

    file: BinaryIO
    lock: threading.Lock

    @classmethod
    def of(cls, path: Path) -> _MappedFile:
        """Maps a file. Raises OSError, and ValueError for an empty file."""
        file = path.open("rb", buffering=0)
        try:
            mapped = cls(file.fileno(), 0, access=mmap.ACCESS_READ)
        except BaseException:
            file.close()
            raise
        mapped.file, mapped.lock = file, threading.Lock()
        return mapped

    def __del__(self) -> None:
        if hasattr(self, "file"):
            self.file.close()


def read_view(view: np.ndarray) -> np.ndarray:
    """Reads a mapped file's view from the file: an array with the same shape and strides.

    A mapped read beyond the end of a file kills the process (SIGBUS). Reading the file instead raises CheckpointError
    if the file has become shorter since it was opened. Views of unmapped memory are returned unchanged. Strides must
    not be negative.
    """
    mapped = _mapping(view)
    if mapped is None or not view.size:
        return view
    start = view.ctypes.data - np.frombuffer(mapped, np.uint8).ctypes.data
    span = view.itemsize + sum((n - 1) * stride for n, stride in zip(view.shape, view.strides, strict=True))
    content = memoryview(np.empty(span, np.uint8))  # type: ignore[arg-type]
    with mapped.lock:
        mapped.file.seek(start)
        done = 0
        while done < len(content) and (n_bytes := mapped.file.readinto(content[done:])):  # type: ignore[attr-defined]
            done += n_bytes
    if done < len(content) or mapped.size() < len(mapped):
        raise CheckpointError(
            f"the file had {len(mapped)} bytes when it was opened and has {mapped.size()} now: something writes to it. "
            "Wait until that is done, or fetch the file again."
        )
    return np.ndarray(view.shape, view.dtype, content, 0, view.strides)


def _mapping(view: np.ndarray) -> _MappedFile | None:
    base: Any = view
    while isinstance(base, np.ndarray):
        base = base.base
    mapped = base.obj if isinstance(base, memoryview) else None
    return mapped if isinstance(mapped, _MappedFile) else None


def read_json(path: Path, limit: int = MAX_SETTINGS_BYTES) -> dict[str, Any]:
    """Returns the object in a JSON file with at most `limit` bytes. Raises the errors of `parse_json` and
    `read_bytes`.
    """
    return parse_json(read_bytes(path, limit), path.name)


def optional_json(path: Path) -> dict[str, Any]:
    """Runs `read_json`, or returns {} if the file does not exist."""
    return read_json(path) if os.path.lexists(path) else {}


def read_bytes(path: Path, limit: int = MAX_SETTINGS_BYTES) -> bytes:
    """Reads a small file. Raises CheckpointError if it is missing, unreadable, not a regular file, or longer than
    `limit`.
    """
    check_is_file(path, limit)
    with reading(path), path.open("rb") as file:
        return file.read(limit)


def parse_json(data: bytes, what: str, unique_keys: bool = False) -> dict[str, Any]:
    """Returns the JSON object in `data`. Raises CheckpointError if there is none, or if a string is not valid Unicode.

    unique_keys: refuse a repeated key, because readers differ on which value counts.
    """
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique_keys if unique_keys else None)
        damaged = _half_pair(value) if b"\\u" in data else None  # only an escape can produce half a pair
    except _DuplicateKeyError as error:
        raise CheckpointError(
            f"{what}: {error} appears twice. The file is damaged or hostile; fetch it again."
        ) from None
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else one_line(error)
        raise CheckpointError(f"{what} is not valid JSON ({reason}). Fetch it again.") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{what} holds a JSON {type(value).__name__}, expected an object. Fetch it again.")
    if damaged is not None:
        raise CheckpointError(
            f"{what} holds {shown(damaged)}, with half a surrogate pair, expected Unicode. Fetch it again."
        )
    return value


def _half_pair(value: Any) -> str | None:
    """Returns a string in a JSON value that UTF-8 cannot encode, because an escape is half a surrogate pair."""
    if isinstance(value, str):
        return None if value.isascii() or is_unicode(value) else value
    items = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next((text for item in items if (text := _half_pair(item)) is not None), None)


def is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class _DuplicateKeyError(Exception):
    pass


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        ((duplicate, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise _DuplicateKeyError(shown(duplicate))
    return result


def check_is_file(path: Path, limit: int | None = None) -> None:
    """Raises CheckpointError unless `path` is a regular file with at most `limit` bytes."""
    with reading(path):
        if not path.is_file():  # a pipe or a device would block or never end
            problem = "is not a regular file" if path.exists() else "is missing"
            raise CheckpointError(
                f"{path.name} {problem} (looked for {one_line(path)}). Check the path, or fetch the model again."
            )
        if limit is not None and (size := path.stat().st_size) > limit:
            raise CheckpointError(
                f"{path.name} has {size} bytes, expected at most {limit}. It is damaged or hostile; fetch it again."
            )


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns OSError (no permission, a name too long) into a CheckpointError with the file name."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise MemoryError from error
        raise CheckpointError(
            f"{one_line(path.name, 80)} cannot be read: {error.strerror or error}. Check the path."
        ) from None
