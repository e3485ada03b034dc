"""Saves the prefix cache to a file for the next process: full pages of keys and values, and recurrent-state snapshots.

    magic | pages | snapshots | index, JSON | index digest, 32 bytes | index length, 8 bytes, little-endian

The index names the origin of the pages (`Origin`). It has a key, the previous page's key and a content digest for each
page, and a key and a digest for each snapshot. It holds no text: pages are found by a hash of tokens. Because keys and
values still reveal much about a text, only the owner may read the file.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from llmcl import __version__
from llmcl.errors import LlmclError, shown
from llmcl.kernels.common.attention import AttentionShape
from llmcl.models.model import Model
from llmcl.models.paged_kv_cache import PagedKVCache
from llmcl.runtime.cache_files import UnusableError, open_plain

MAGIC = b"llmcl prefix cache\n"
FORMAT = 2
MAX_INDEX_BYTES = 64 << 20
_DIGEST_BYTES = 32


class PrefixFileError(LlmclError):
    """An unusable file. may_replace: overwriting the file loses nothing useful."""

    def __init__(self, message: str, *, may_replace: bool):
        super().__init__(message)
        self.may_replace = may_replace


@dataclass(frozen=True)
class Origin:
    """Identifies the model and settings that pages belong to. Pages from another origin are rejected. Error messages
    use the field names.
    """

    version: str
    model: str
    kv_dtype: str
    page_tokens: int
    batch_invariant: bool

    @classmethod
    def of(cls, model: Model, shape: AttentionShape, *, batch_invariant: bool) -> Origin:
        """Returns the origin of a model and its cache: its sizes, and weight samples read from the device."""
        content = blake2b(repr(model.config).encode(), digest_size=16)
        samples = (sample for stage in model.stages for sample in stage.weights.samples(stage.device))
        for sample in samples:
            content.update(sample)
        content.update(repr((shape.scale, shape.exact_queries)).encode())
        return cls(f"{__version__}, {FORMAT}", content.hexdigest(), shape.kv_dtype, shape.page_tokens, batch_invariant)


@dataclass(frozen=True)
class _Index:
    """pages: (key, previous key, digest) each. snapshots: (key, digest) each. Sizes are in bytes."""

    origin: dict[str, Any]
    page_nbytes: int
    snapshot_nbytes: int
    pages: list[list[str]]
    snapshots: list[list[str]]

    @property
    def nbytes(self) -> int:
        """Returns the bytes of all pages and snapshots."""
        return len(self.pages) * self.page_nbytes + len(self.snapshots) * self.snapshot_nbytes

    def write(self, file: BinaryIO) -> None:
        text = json.dumps(asdict(self), separators=(",", ":")).encode()
        file.write(text + _digest(text) + len(text).to_bytes(8, "little"))

    @classmethod
    def read(cls, file: BinaryIO) -> _Index:
        """Reads the index. Raises ValueError if it is damaged."""
        end = file.seek(0, os.SEEK_END) - _DIGEST_BYTES - 8
        file.seek(max(len(MAGIC), end))
        digest, size = file.read(_DIGEST_BYTES), int.from_bytes(file.read(8), "little")
        if not 0 < size <= min(MAX_INDEX_BYTES, end - len(MAGIC)):
            raise ValueError("its end is missing")
        file.seek(end - size)
        text = file.read(size)
        if _digest(text) != digest:
            raise ValueError("its index is not what was written")
        index = cls(**json.loads(text))
        if index.nbytes != end - size - len(MAGIC):
            raise ValueError("its length is not what its index says")
        return index


def store(cache: PagedKVCache, file: Path, origin: Origin, max_bytes: int) -> int:
    """Writes findable pages and snapshots to a new file, most recently used first and at most max_bytes, and then
    replaces `file`. Returns the number of tokens saved. Raises OSError.
    """
    states, pages = cache.states, cache.findable()
    snapshot_nbytes = 0 if states is None else states.slot_nbytes
    snapshots = {} if states is None else states.findable()
    n_snapshots = min(len(snapshots), max_bytes // 2 // max(1, snapshot_nbytes))
    n_pages = min(len(pages), (max_bytes - n_snapshots * snapshot_nbytes) // max(1, cache.page_nbytes))
    index = _Index(asdict(origin), cache.page_nbytes, snapshot_nbytes, [], [])
    with _replacing(file) as new_file:
        new_file.write(MAGIC)
        for page, (key, before) in islice(pages.items(), n_pages):
            index.pages.append([key.hex(), before.hex(), _written(new_file, cache.read_page(page))])
        for key, slot in islice(snapshots.items(), n_snapshots):
            assert states is not None
            index.snapshots.append([key.hex(), _written(new_file, states.read_slot(slot))])
        index.write(new_file)
    return len(index.pages) * cache.page_tokens


def restore(cache: PagedKVCache, file: Path, origin: Origin) -> int:
    """Fills free cache pages from a file written by `store`, up to the cache's capacity. Returns the number of tokens
    restored: 0 if there is no file or it is empty.

    Raises PrefixFileError, and leaves the cache unchanged, if the file has another type or origin, is damaged, or can
    be owned or written by other users. Foreign pages would otherwise answer for this user's texts.
    """
    try:
        with open_plain(file, trusted=True) as content:
            magic = content.read(len(MAGIC))
            if not magic:
                return 0
            if magic != MAGIC:
                raise PrefixFileError(
                    f"{file} is no prefix cache of llmcl and stays as it is; give another file", may_replace=False
                )
            try:
                index = _Index.read(content)
                if index.origin.get("version") == origin.version:
                    _check_origin(file, index.origin, origin)
                    return _fill(cache, content, index)
            except (ValueError, TypeError, AttributeError, RecursionError) as error:
                raise PrefixFileError(
                    f"{file} is damaged ({error}); it is replaced when the server ends", may_replace=True
                ) from error
    except FileNotFoundError:
        return 0
    except UnusableError as error:
        raise PrefixFileError(
            f"{file} is not used and stays as it is: {error.strerror}; give another file, or remove it",
            may_replace=False,
        ) from error
    except OSError as error:
        raise PrefixFileError(
            f"{file} cannot be read ({error.strerror}) and stays as it is; give another file", may_replace=False
        ) from error
    raise PrefixFileError(
        f"{file} is of another version of llmcl; it is replaced when the server ends", may_replace=True
    )


def _check_origin(file: Path, found: Mapping[str, Any], expected: Origin) -> None:
    for field in fields(expected):
        has, wanted = found.get(field.name), getattr(expected, field.name)
        if has != wanted:
            what = f"{shown(has)} where this one has {shown(wanted)}" if field.name != "model" else "another one"
            raise PrefixFileError(
                f"{file} is of a server whose {field.name.replace('_', ' ')} is {what}, and stays as it is; give "
                "another file, or remove it",
                may_replace=False,
            )


def _fill(cache: PagedKVCache, content: BinaryIO, index: _Index) -> int:
    """Restores pages and snapshots. Raises ValueError, before any page is findable, if the file is damaged."""
    states = cache.states
    if index.page_nbytes != cache.page_nbytes or index.snapshot_nbytes != (0 if states is None else states.slot_nbytes):
        raise ValueError("its pages are of another size")
    content.seek(len(MAGIC))
    room = cache.free()
    pages: dict[int, tuple[bytes, bytes]] = {}
    for page, (key, before, digest) in zip(room, index.pages, strict=False):
        cache.write_page(page, _read(content, index.page_nbytes, digest))
        pages[page] = bytes.fromhex(key), bytes.fromhex(before)
    if states is not None:
        content.seek(len(MAGIC) + len(index.pages) * index.page_nbytes)
        snapshots = [(key, _read(content, index.snapshot_nbytes, digest)) for key, digest in index.snapshots]
        for key, data in snapshots:
            states.add_snapshot(bytes.fromhex(key), data)
    cache.add_findable(pages)
    return len(pages) * cache.page_tokens


def _read(content: BinaryIO, nbytes: int, digest: str) -> np.ndarray:
    data = content.read(nbytes)
    if len(data) != nbytes or _digest(data).hex() != digest:
        raise ValueError("a page is not what was written")
    return np.frombuffer(data, np.uint8)


def _written(to: BinaryIO, data: np.ndarray) -> str:
    to.write(data.data)
    return _digest(data).hex()


@contextmanager
def _replacing(file: Path) -> Iterator[BinaryIO]:
    """Yields a new file beside `file`, readable by the owner alone, and renames it to `file` when complete."""
    descriptor, name = tempfile.mkstemp(dir=file.absolute().parent, prefix=f".{file.name}.")
    partial = Path(name)
    try:
        with open(descriptor, "wb") as new_file:
            yield new_file
            new_file.flush()
            os.fsync(new_file.fileno())
        partial.replace(file)
    except BaseException:  # an incomplete file must not fill the disk
        partial.unlink(missing_ok=True)
        raise


def _digest(data: bytes | np.ndarray) -> bytes:
    return blake2b(data, digest_size=_DIGEST_BYTES).digest()  # type: ignore[arg-type]
