"""Files of a checkpoint: mapped or parsed, with an answer for each way in which a file can be wrong."""

from __future__ import annotations

import json
import mmap
from pathlib import Path
from typing import Any

import numpy as np

from llmcl.errors import CheckpointError

# Headers describe tensors and vocabularies: 1 MB is common, 20 MB is the largest known. What is beyond is
# damage or an attack, and is refused before it is read.
MAX_HEADER_BYTES = 100_000_000

_LFS_POINTER = b"version https://git-lfs"


def map_file(path: Path) -> np.ndarray:
    """The whole file, mapped read-only: uint8 [file size]. The mapping ends with the last view of it.

    Raises CheckpointError for a file that is missing, unreadable, empty, or a Git LFS pointer.
    """
    _check_is_file(path)
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise CheckpointError(f"{path.name} is empty. Fetch it again.") from None
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error.strerror or error}.") from None
    if mapped[: len(_LFS_POINTER)] == _LFS_POINTER:
        raise CheckpointError(
            f"{path.name} is a Git LFS pointer, not the file itself. Run `git lfs pull` in its folder."
        )
    return np.frombuffer(mapped, dtype=np.uint8)


def drop_pages(view: np.ndarray) -> None:
    """Takes the pages of the mapped file that `view` is of out of the process; they come back if they are read again.

    As long as they are mapped they count as memory of the process. All of the file's: what is read is mapped together
    with its neighbours. No effect where the system cannot do it.
    """
    base: Any = view
    while isinstance(base, np.ndarray):
        base = base.base
    mapped = base.obj if isinstance(base, memoryview) else None
    if isinstance(mapped, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; raises as `parse_json` and `map_file` do."""
    _check_is_file(path)
    try:
        if (size := path.stat().st_size) > MAX_HEADER_BYTES:
            raise CheckpointError(
                f"{path.name} has {size} bytes, expected at most {MAX_HEADER_BYTES}. It is not what it claims to be."
            )
        return parse_json(path.read_bytes(), path.name)
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error.strerror or error}.") from None


def parse_json(data: bytes, what: str, unique_keys: bool = False) -> dict[str, Any]:
    """The JSON object in `data`. Raises CheckpointError if there is none.

    unique_keys: refuse a key that appears twice, on which readers differ which one counts.
    """
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique_keys if unique_keys else None)
    except _DuplicateKeyError as error:
        raise CheckpointError(f"{what}: {error} appears twice. The file is damaged or hostile.") from None
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]
        raise CheckpointError(f"{what} is not valid JSON ({reason}). Fetch it again.") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{what} holds a JSON {type(value).__name__}, expected an object. Fetch it again.")
    return value


class _DuplicateKeyError(Exception):
    pass


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        duplicate = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise _DuplicateKeyError(f"{duplicate!r:.80}")
    return result


def _check_is_file(path: Path) -> None:
    if not path.is_file():  # a pipe or a device would block or never end
        found = "is not a regular file" if path.exists() else "is missing"
        raise CheckpointError(f"{path.name} {found} (looked for {path}). Check the path, or fetch the model again.")
