"""Decides what a conversion may replace, and makes the result appear in a single step.

The result is written beside the target under a temporary name, `.NAME.PID.part`, locked by its process, and renamed at
the end; a folder trades places with the folder it replaces. A killed process leaves only the temporary file or folder,
and the next conversion to the same target removes it.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import logging
import os
import re
import stat
import sys
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from llmcl.checkpoint.safetensors import WEIGHTS_FILE
from llmcl.convert.folder import is_kept
from llmcl.errors import UsageError

_log = logging.getLogger(__name__)

_LONGEST_PART = 200  # bytes of the target's name used in a temporary name; file systems limit names to 255
_NO_REPLACE, _EXCHANGE = 1, 2  # flags for Linux's renameat2
_AT_FDCWD = -100
_NOT_THERE = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP}  # errors from a file system without such a flag


def check_target(target: Path, is_gguf: bool, force: bool) -> None:
    """Removes leftovers from a killed conversion. Raises UsageError if `target` must not or cannot be written."""
    if not target.parent.is_dir():
        raise UsageError(f"{target}: there is no folder {target.parent}; make it first")
    try:
        tempfile.TemporaryFile(dir=target.parent).close()
    except OSError as error:
        raise UsageError(
            f"{target}: the folder {target.parent} cannot be written ({error.strerror}); write the result elsewhere"
        ) from error
    _remove_left_over(target)
    try:
        there = target.lstat()
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(f"{target}: {error.strerror}; give another name for the result") from error
    if not force:
        raise UsageError(f"{target} exists; give another name, or --force to replace it")
    if stat.S_ISLNK(there.st_mode):
        raise UsageError(f"{target} is a link to {os.readlink(target)}; give the name of what is to be replaced itself")
    if is_gguf != stat.S_ISREG(there.st_mode) or not (is_gguf or target.is_dir()):
        actual = "a folder" if target.is_dir() else "a file" if target.is_file() else "neither a file nor a folder"
        wanted = "a file" if is_gguf else "a folder (a name that ends with .gguf makes a file)"
        raise UsageError(f"{target} is {actual}; --force would not replace it with {wanted}: give another name")
    if os.path.ismount(target):
        raise UsageError(f"{target} is where a disk is mounted, which cannot be replaced; give a folder on it")
    if not is_gguf:
        check_replaceable(target)


def check_replaceable(folder: Path, names: Collection[str] | None = None) -> None:
    """Raises UsageError if an existing folder holds files that the conversion would not rewrite.

    names: the files this conversion writes; None: all files any conversion may write.
    """
    if not folder.exists():
        return
    there = sorted(folder.iterdir())
    existing = [file.name for file in there]
    if existing and not {"config.json", WEIGHTS_FILE} <= set(existing):
        raise UsageError(
            f"{folder} is a folder without a model as a conversion writes it (config.json and {WEIGHTS_FILE}); --force "
            "replaces only such folders: give another name"
        )
    others = [file.name for file in there if not is_written(file) or (names is not None and file.name not in names)]
    if others:
        listed = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
        raise UsageError(
            f"{folder} holds {listed}, which this conversion would not write, so that --force would lose it; move it "
            "elsewhere, or give another name"
        )


@contextmanager
def appearing(target: Path, is_gguf: bool, force: bool) -> Iterator[Path]:
    """Yields an empty file or folder beside `target`. Renames it to `target` at the end, or removes it on any
    exception.

    Raises UsageError if the disk is full or cannot be written.
    """
    temporary = target.with_name(f"{_temporary_start(target)}{os.getpid()}.part")
    lock: int | None = None
    is_ours = False
    try:
        if is_gguf:
            temporary.touch(exist_ok=False)
        else:
            temporary.mkdir()
        is_ours = True
        lock = _locked(temporary)
        yield temporary
        _put_in_place(temporary, target, force)
    except OSError as error:
        reason = error.strerror or error  # NumPy gives no number for a full disk
        raise UsageError(
            f"{target}: writing stopped ({reason}), and nothing of it is left; free some space, or write it elsewhere"
        ) from error
    finally:
        if lock is not None:
            os.close(lock)
        if is_ours:
            _remove(temporary)


def _put_in_place(temporary: Path, target: Path, force: bool) -> None:
    """Renames `temporary` to `target`. A replaced folder gets the temporary name."""
    if not force:
        if _rename(temporary, target, _NO_REPLACE):
            return
        if target.exists():  # made by someone else meanwhile
            raise UsageError(f"{target} exists; give another name, or --force to replace it")
    elif target.is_dir():
        if _rename(temporary, target, _EXCHANGE):
            return
        old = temporary.with_suffix(".old")
        target.rename(old)
        try:
            temporary.rename(target)
        except BaseException:
            old.rename(target)
            raise
        old.rename(temporary)
        return
    temporary.rename(target)


def _rename(source: Path, target: Path, flag: int) -> bool:
    """Renames atomically with `flag`. Returns False if the system cannot. Raises OSError."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    if rename(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flag) == 0:
        return True
    number = ctypes.get_errno()
    if number == errno.EEXIST:
        raise UsageError(f"{target} exists; give another name, or --force to replace it")
    if number in _NOT_THERE:
        return False
    raise OSError(number, os.strerror(number), str(target))


def _temporary_start(target: Path) -> str:
    name = target.name
    if len(os.fsencode(name)) > _LONGEST_PART:
        name = hashlib.sha256(os.fsencode(name)).hexdigest()[:32]
    return f".{name}."


def _locked(path: Path) -> int | None:
    """Locks `path` and returns the descriptor; closing it or ending the process unlocks. None without lock support.

    Raises BlockingIOError if another process holds the lock.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    file = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise
    except OSError:  # a file system without locks
        os.close(file)
        return None
    return file


def _remove_left_over(target: Path) -> None:
    """Removes leftovers from killed processes beside `target`, or restores the target's old folder."""
    pattern = re.compile(re.escape(_temporary_start(target)) + r"\d+\.(part|old)")
    for path in [path for path in target.parent.iterdir() if pattern.fullmatch(path.name)]:
        with suppress(OSError):
            lock = _locked(path)
            if lock is None:
                continue
            os.close(lock)
            if path.suffix == ".old" and not os.path.lexists(target):  # killed between the two steps of _put_in_place
                path.rename(target)
                continue
            _remove(path)
            _log.info("removed %s, which a conversion that was ended had left", path)


def _remove(path: Path) -> None:
    """Removes a temporary file, or a folder's converted files. Warns about a folder with other files and
    leaves them."""
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return
    for file in path.iterdir():
        if is_written(file):
            file.unlink()
    try:
        path.rmdir()
    except OSError:
        _log.warning("%s is left: it holds files that no conversion wrote; move them elsewhere", path)


def is_written(path: Path) -> bool:
    """Whether conversions write files with this name to a folder."""
    return (path.name == WEIGHTS_FILE or is_kept(path.name)) and stat.S_ISREG(path.lstat().st_mode)
