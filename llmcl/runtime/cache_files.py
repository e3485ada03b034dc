"""The cache folder for everything llmcl can rebuild: compiled kernels, ICD files, probe results, tuned constants and
excluded kernels.

Drivers execute cached programs. So folders are created for their owner alone, and nothing is read from a folder or a
file that another user owns or may write.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

from llmcl.errors import UsageError, shown

_log = logging.getLogger(__name__)

MAX_BYTES = 256 << 20  # per file: several times the largest compiled program
NOBODY = 65534  # how a container shows an owner from outside, such as root
_named: set[str] = set()  # paths already named in a warning


class UnusableError(OSError):
    """A folder or file that is rejected for its type, size, owner or permissions."""


def cache_dir() -> Path:
    """Returns the folder `LLMCL_CACHE_DIR`, or the system's per-user cache folder. It need not exist yet."""
    chosen = os.environ.get("LLMCL_CACHE_DIR")
    if chosen:
        return expanded(chosen, "LLMCL_CACHE_DIR")
    from platformdirs import user_cache_dir

    try:
        folder = Path(user_cache_dir("llmcl", appauthor=False))
    except RuntimeError:  # a container without HOME and without a user entry; older versions return a folder named ~
        folder = Path("~")
    return folder if folder.is_absolute() else Path(tempfile.gettempdir()) / f"llmcl-{os.getuid()}"


def expanded(path: str | os.PathLike[str], name: str) -> Path:
    """Returns the path with `~` and `~user` expanded. Raises UsageError, beginning with `name`, for an unknown home
    folder or an invalid path.
    """
    if not isinstance(path, (str, os.PathLike)) or not _is_name(os.fspath(path)):
        raise UsageError(f"{name} is {shown(path)}; expected a path")
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UsageError(
            f"{name} is {shown(os.fspath(path))}, and no home folder is known for its ~; give a path without ~, or set "
            "HOME"
        ) from error


def _is_name(path: str) -> bool:
    """Returns whether this is a valid file name: no NUL, and encodable by the system."""
    try:
        return b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:  # half a surrogate pair
        return False


def is_trusted(folder: Path) -> bool:
    """Returns whether a cache folder's content may be used. Warns and returns False if other users may write there.
    Raises OSError if the folder does not exist or cannot be inspected.
    """
    root = cache_dir()
    if (flaw := distrust(folder, root)) is None:
        return True
    path, reason = flaw
    _warn(
        path,
        f"{reason}, so nothing is kept in {root.absolute()}, which makes starts slow; take others' rights away "
        "(chmod go-w), or set LLMCL_CACHE_DIR to a folder that only you may write",
    )
    return False


def distrust(folder: Path, root: Path) -> tuple[Path, str] | None:
    """Returns the path by which other users could change the folder's content, and the reason; None if there is none.

    root: the folder above which others may have rights, as in /tmp. Raises OSError if a folder cannot be inspected.
    """
    if not hasattr(os, "geteuid"):
        return None  # Windows itself protects a user's folders
    statuses = [path.stat() for path in (folder, *folder.absolute().parents)]
    marks = [(each.st_dev, each.st_ino, each.st_mode, each.st_uid) for each in statuses]
    return _judge(folder.absolute(), root.absolute(), os.geteuid(), *marks)


@lru_cache
def _judge(named: Path, root: Path, user: int, *marks: tuple[int, ...]) -> tuple[Path, str] | None:
    """Implements distrust() for a user. marks: stat values up to the root; a change is judged again."""
    # Checks both the path as named, whose links others may redirect, and the resolved path.
    real = Path(os.path.realpath(named))
    cache = [path for path in (*reversed(named.parents), named) if path == root or root in path.parents]
    ours = {*cache, *(Path(os.path.realpath(path)) for path in cache)}
    for path in dict.fromkeys((*reversed(named.parents), named, *reversed(real.parents), real)):
        if (reason := _distrust_reason(path.lstat(), is_ours=path in ours)) is not None:
            return path, reason
    return None


def read_cached(path: Path, most: int = MAX_BYTES) -> bytes | None:
    """Returns a cache file's content, at most `most` bytes. None if missing, or, with a warning, if not trusted."""
    try:
        return read_plain(path, most, trusted=True) if is_trusted(path.parent) else None
    except UnusableError as error:
        _warn(path, f"{error.strerror}; remove it")
    except OSError:
        pass
    return None


def read_plain(path: Path, most: int, *, trusted: bool = False) -> bytes:
    """Returns a file's content, opened with `open_plain`."""
    with open_plain(path, most, trusted=trusted) as content:
        return content.read()


@contextmanager
def open_plain(path: Path, most: int | None = None, *, trusted: bool = False) -> Iterator[BinaryIO]:
    """Opens a file of at most `most` bytes for reading. Never blocks on a pipe or device in its place.

    trusted: requires that nobody else could have written the file. Raises OSError, and UnusableError for an unsuitable
    file.
    """
    file = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        status = os.fstat(file)
        reason = None
        if not stat.S_ISREG(status.st_mode):
            reason = "it is no plain file"
        elif most is not None and status.st_size > most:
            reason = f"it has {status.st_size:,} bytes, expected at most {most:,}"
        elif trusted and hasattr(os, "geteuid"):
            reason = _distrust_reason(status, is_ours=True)
        if reason is not None:
            raise UnusableError(errno.EPERM, reason, str(path))
        with open(file, "rb", closefd=False) as content:
            yield content
    finally:
        os.close(file)


def make_folder(folder: Path) -> None:
    """Creates a cache folder for the owner alone. Raises OSError, and UnusableError if others may write there."""
    if not folder.exists():
        make_folder(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
    if not is_trusted(folder):
        raise UnusableError(errno.EPERM, "others could write to it", str(folder))


def write_cached(path: Path, data: bytes) -> None:
    """Writes a cache file. Safe with concurrent writers: a reader sees a whole file or none. Raises OSError."""
    make_folder(path.parent)
    write_atomically(path, data)


def write_atomically(path: Path, data: bytes) -> None:
    """Like `write_cached`, in an existing folder. Raises OSError."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        partial = Path(file.name)
    try:
        partial.write_bytes(data)
        partial.replace(path)
    except BaseException:  # an incomplete file must not fill the disk
        partial.unlink(missing_ok=True)
        raise


def _distrust_reason(found: os.stat_result, *, is_ours: bool) -> str | None:
    """Returns why a file, folder or link is not trusted; None if it is.

    is_ours: part of the cache, as opposed to a parent folder. Parent folders are checked less strictly. In a sticky
    world-writable folder, such as /tmp, nobody can rename another user's files. In a group-writable folder, anything
    that members put in the cache's place belongs to them and is rejected for its owner.
    """
    owners = {0, os.geteuid()} | (set() if is_ours else {NOBODY})
    if found.st_uid not in owners:
        return f"it belongs to user {found.st_uid} and not to user {os.geteuid()}, who runs this"
    if stat.S_ISLNK(found.st_mode):
        return None
    if is_ours:
        return "others may write to it" if found.st_mode & 0o022 else None
    return "all may write to it" if found.st_mode & 0o002 and not found.st_mode & stat.S_ISVTX else None


def _warn(path: Path, reason: str) -> None:
    if str(path) not in _named:
        _named.add(str(path))
        _log.warning("%s is not used: %s", path, reason)
