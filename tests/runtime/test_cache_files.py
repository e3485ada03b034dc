"""The cache folder: made for its owner alone, and nothing read from it that others could have written."""

from __future__ import annotations

import json
import math
import os
import pwd
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from llmcl.errors import UsageError
from llmcl.runtime import icd
from llmcl.runtime.cache_files import UnusableError, cache_dir, read_cached, write_cached
from llmcl.runtime.platforms import DeviceEntry
from llmcl.runtime.probe import remembered

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such owners and rights")


@pytest.fixture
def file(empty_cache: Path) -> Path:
    path = empty_cache / "kind" / "file"
    write_cached(path, b"data")
    return path


def belongs_to_another(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A superuser gives it away; another user becomes one whom nothing of his own belongs to."""
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)


def test_only_the_owner_can_open_what_is_kept(empty_cache: Path, file: Path) -> None:
    rights = {path: path.stat().st_mode & 0o777 for path in (empty_cache, file.parent, file)}
    assert rights == {empty_cache: 0o700, file.parent: 0o700, file: 0o600}
    assert read_cached(file) == b"data" and list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("rights", [0o720, 0o702, 0o777])
def test_a_folder_that_others_may_write_is_not_used(
    empty_cache: Path, file: Path, part: int, rights: int, caplog: pytest.LogCaptureFixture
) -> None:
    folder = (empty_cache, file.parent)[part]
    folder.chmod(rights)
    for _ in range(2):
        assert read_cached(file) is None
        with pytest.raises(UnusableError):
            write_cached(file, b"new")
    (message,) = caplog.messages
    assert message.startswith(f"{folder} is not used: others may write to it")
    assert "chmod go-w" in message and "LLMCL_CACHE_DIR" in message
    folder.chmod(0o755)
    assert read_cached(file) == b"data"


def test_a_file_that_others_may_write_is_not_used(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    file.chmod(0o660)
    assert read_cached(file) is None and f"{file} is not used: others may write to it" in caplog.text
    write_cached(file, b"new")
    assert read_cached(file) == b"new"


def test_what_belongs_to_another_is_not_used(
    empty_cache: Path, file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    belongs_to_another(file.parent, monkeypatch)
    assert read_cached(file) is None
    assert "belongs to user" in caplog.text
    with pytest.raises(UnusableError):
        write_cached(file, b"new")


def test_nothing_is_made_in_the_home_of_another(
    tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with sudo, which may leave HOME as it was."""
    belongs_to_another(tmp_path, monkeypatch)
    with pytest.raises(UnusableError):
        write_cached(empty_cache / "kind" / "file", b"data")
    assert not empty_cache.exists()


def test_a_folder_on_the_way_that_all_may_write(tmp_path: Path, file: Path) -> None:
    tmp_path.chmod(0o777)
    assert read_cached(file) is None
    tmp_path.chmod(0o1777)
    assert read_cached(file) == b"data"
    tmp_path.chmod(0o770)  # a group's folder, whose members could only put files of their own there
    assert read_cached(file) == b"data"


def test_a_link_leads_where_the_rule_holds_too(
    tmp_path: Path, file: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    link = tmp_path / "link"
    link.symlink_to(empty_cache)
    monkeypatch.setenv("LLMCL_CACHE_DIR", str(link))
    assert read_cached(link / "kind" / "file") == b"data"
    empty_cache.chmod(0o770)
    assert read_cached(link / "kind" / "file") is None
    assert caplog.messages[0].startswith(f"{empty_cache} is not used")


def a_pipe(path: Path) -> None:
    os.mkfifo(path, 0o600)


def a_sparse_file(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(3 << 30)
    path.chmod(0o600)


@pytest.mark.parametrize(
    ("make", "reason"),
    [(a_pipe, "no plain file"), (Path.mkdir, "no plain file"), (a_sparse_file, "3,221,225,472 bytes")],
)
def test_what_is_no_file_to_read_is_neither_waited_for_nor_read(
    file: Path, make: Callable[[Path], None], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    file.unlink()
    make(file)
    assert read_cached(file) is None
    assert f"{file} is not used: it " in caplog.text and reason in caplog.text


def test_a_pipe_among_the_icd_files(empty_cache: Path) -> None:
    folder = icd.write_entries(empty_cache / "icd", {"a.icd": "liba.so"})
    (folder / "a.icd").unlink()
    for name in ("a.icd", "b.icd"):
        os.mkfifo(folder / name)
    assert icd.read_vendor_folder(folder) == {}
    assert icd.write_entries(empty_cache / "icd", {"a.icd": "liba.so"}) == folder
    assert icd.read_vendor_folder(folder) == {"a.icd": "liba.so"}


def test_icd_files_do_not_lie_where_others_may_write(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # a process of tests/run.py ends without what atexit holds
    first = icd.write_entries(empty_cache / "icd", {"a.icd": "liba.so"})
    first.chmod(0o770)
    other = icd.write_entries(empty_cache / "icd", {"a.icd": "liba.so"})
    assert empty_cache not in other.parents and other.stat().st_mode & 0o777 == 0o700
    assert icd.read_vendor_folder(other) == {"a.icd": "liba.so"}


@pytest.mark.parametrize("text", [b"", b"9", b"-1", b"many", b"1" * 17])
def test_an_answer_that_is_none_is_asked_for_again(cl_entry: DeviceEntry, empty_cache: Path, text: bytes) -> None:
    def ask() -> str:
        return remembered("kind", cl_entry, answer=lambda: ("yes", math.inf))

    ask()
    (stored,) = (empty_cache / "kind").iterdir()
    whole = stored.read_bytes()
    assert json.loads(whole)["answer"] == "yes"
    write_cached(stored, text)
    assert (ask(), stored.read_bytes()) == ("yes", whole)


def test_a_user_without_a_home_has_a_temporary_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object) -> None:
        raise KeyError

    for name in ("LLMCL_CACHE_DIR", "HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert cache_dir().parent == Path(tempfile.gettempdir())


def test_a_home_that_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMCL_CACHE_DIR", "~nobody-of-that-name/cache")
    with pytest.raises(UsageError, match="LLMCL_CACHE_DIR is '~nobody-of-that-name/cache'"):
        cache_dir()
