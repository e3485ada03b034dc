"""Where llmcl keeps what it can make again: compiled kernels, ICD files, probe results, tuning and exclusions of
devices.

Drivers run what lies there as their own code. So the folders are made for their owner alone, and nothing is taken from
a folder or a file that others own or may write.
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

MAX_BYTES = 256 << 20  # of a file: several times the largest compiled program
NOBODY = 65534  # how a container shows what belongs to a user outside of it, such as root
_named: set[str] = set()  # the paths that a warning has named


class UnusableError(OSError):
    """A folder or a file that is not used because of what it is, or of what others could do to it."""


def cache_dir() -> Path:
    """The folder `LLMCL_CACHE_DIR`, or the per-user cache folder of this system. It may not exist yet."""
    chosen = os.environ.get("LLMCL_CACHE_DIR")
    if chosen:
        return expanded(chosen, "LLMCL_CACHE_DIR")
    from platformdirs import user_cache_dir

    try:
        folder = Path(user_cache_dir("llmcl", appauthor=False))
    except RuntimeError:  # a container without HOME whose user has no entry; older versions give a folder named ~
        folder = Path("~")
    return folder if folder.is_absolute() else Path(tempfile.gettempdir()) / f"llmcl-{os.getuid()}"


def expanded(path: str | os.PathLike[str], name: str) -> Path:
    """The path with `~` and `~user` replaced. Raises UsageError, which begins with `name`, if there is no such home, or
    for what no path is.
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
    """Whether a file can have this name: without NUL, and in the system's encoding."""
    try:
        return b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:  # half a surrogate pair
        return False


def is_trusted(folder: Path) -> bool:
    """Whether what lies in this folder of the cache may be used. False, after a warning, where others may write to it.

    Raises OSError where it does not exist or cannot be looked at.
    """
    if not hasattr(os, "geteuid"):
        return True  # Windows keeps a user's folders from others itself
    found = [path.stat() for path in (folder, *folder.absolute().parents)]
    marks = [(each.st_dev, each.st_ino, each.st_mode, each.st_uid) for each in found]
    return _judge(folder.absolute(), cache_dir().absolute(), os.geteuid(), *marks)


@lru_cache
def _judge(named: Path, root: Path, user: int, *marks: tuple[int, ...]) -> bool:
    """is_trusted() for a user. marks: what is known of the folder and of those around it; a change is judged anew."""
    # Both paths count: the one that is named, whose links others may turn elsewhere, and the one it leads to.
    real = Path(os.path.realpath(named))
    cache = [path for path in (*reversed(named.parents), named) if path == root or root in path.parents]
    ours = {*cache, *(Path(os.path.realpath(path)) for path in cache)}
    for path in dict.fromkeys((*reversed(named.parents), named, *reversed(real.parents), real)):
        if (reason := _distrust_reason(path.lstat(), is_ours=path in ours)) is not None:
            _warn(
                path,
                f"{reason}, so nothing is kept in {root}, which makes starts slow; take others' rights away "
                "(chmod go-w), or set LLMCL_CACHE_DIR to a folder that only you may write",
            )
            return False
    return True


def read_cached(path: Path, most: int = MAX_BYTES) -> bytes | None:
    """The content of a file of the cache, of at most `most` bytes; None, with a warning, if it may not be used."""
    try:
        return read_plain(path, most, trusted=True) if is_trusted(path.parent) else None
    except UnusableError as error:
        _warn(path, f"{error.strerror}; remove it")
    except OSError:
        pass
    return None


def read_plain(path: Path, most: int, *, trusted: bool = False) -> bytes:
    """The content of a file, opened as `open_plain` does."""
    with open_plain(path, most, trusted=trusted) as content:
        return content.read()


@contextmanager
def open_plain(path: Path, most: int | None = None, *, trusted: bool = False) -> Iterator[BinaryIO]:
    """Opens a file of at most `most` bytes to be read; a pipe or a device in its place is not waited for.

    trusted: only if no one else could have written it. Raises OSError, and UnusableError for what is not such a file.
    """
    file = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        found = os.fstat(file)
        reason = None
        if not stat.S_ISREG(found.st_mode):
            reason = "it is no plain file"
        elif most is not None and found.st_size > most:
            reason = f"it has {found.st_size:,} bytes, expected at most {most:,}"
        elif trusted and hasattr(os, "geteuid"):
            reason = _distrust_reason(found, is_ours=True)
        if reason is not None:
            raise UnusableError(errno.EPERM, reason, str(path))
        with open(file, "rb", closefd=False) as content:
            yield content
    finally:
        os.close(file)


def make_folder(folder: Path) -> None:
    """Makes a folder of the cache, for its owner alone. Raises OSError, and UnusableError where others may write."""
    if not folder.exists():
        make_folder(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
    if not is_trusted(folder):
        raise UnusableError(errno.EPERM, "others could write to it", str(folder))


def write_cached(path: Path, data: bytes) -> None:
    """Concurrent processes may write the same file; each reader sees a whole one or none. Raises OSError."""
    make_folder(path.parent)
    write_atomically(path, data)


def write_atomically(path: Path, data: bytes) -> None:
    """As `write_cached`, in a folder that exists. Raises OSError."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        partial = Path(file.name)
    try:
        partial.write_bytes(data)
        partial.replace(path)
    except BaseException:  # what is not complete must not fill a full disk
        partial.unlink(missing_ok=True)
        raise


def _distrust_reason(found: os.stat_result, *, is_ours: bool) -> str | None:
    """What speaks against a file, a folder or a link; None if nothing does.

    is_ours: it is part of the cache, and not a folder on the way to it. Two folders on the way are accepted. In one
    that all may write, such as /tmp, nobody can rename what belongs to others. In one that a group may write, whatever
    its members put in the cache's place belongs to them, and is refused for that.
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
