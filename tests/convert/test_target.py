"""The file or folder that llmcl convert writes: the whole result, or what was there before."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from programs import ROOT

from llmcl import convert as convert_module
from llmcl.checkpoint import open_checkpoint
from llmcl.checkpoint.gguf import read_gguf
from llmcl.convert import convert
from llmcl.convert import target as target_module
from llmcl.errors import UsageError


def left_over(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_nothing_is_left_of_a_conversion_that_fails(folder: Path, tmp_path: Path) -> None:
    for name in ("model.gguf", "folder"):
        for error in (KeyboardInterrupt, RuntimeError):

            def fail(what: str, done: int, total: int, error: type[BaseException] = error) -> None:
                raise error

            with pytest.raises(error):
                convert(str(folder), tmp_path / name, progress=fail)
            assert left_over(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize(("number", "left"), [(signal.SIGTERM, 0), (signal.SIGKILL, 1)])
def test_a_killed_conversion_leaves_nothing_under_the_name(tmp_path: Path, number: int, left: int) -> None:
    command = [sys.executable, "-m", "llmcl", "convert", "smollm2", str(tmp_path / "model.gguf"), "-q"]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)})
    end = time.monotonic() + 60
    while not any(path.stat().st_size > 1 << 20 for path in tmp_path.glob(".model.gguf.*")):
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.01)
    process.send_signal(number)
    assert process.wait(60) in (128 + number, -number)
    assert not (tmp_path / "model.gguf").exists() and len(left_over(tmp_path)) == left  # SIGKILL leaves .NAME.PID.part


def test_what_exists_is_replaced_only_by_force_and_only_by_the_whole_result(folder: Path, tmp_path: Path) -> None:
    file, copy = tmp_path / "model.gguf", tmp_path / "copy"
    file.write_text("precious")
    convert(str(folder), copy)
    old = (copy / "model.safetensors").read_bytes()
    for target in (file, copy):
        with pytest.raises(UsageError, match="exists; give another name, or --force"):
            convert(str(folder), target)

        def fail(what: str, done: int, total: int) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            convert(str(folder), target, force=True, progress=fail)
    assert file.read_text() == "precious" and (copy / "model.safetensors").read_bytes() == old
    convert(str(folder), file, force=True)
    convert(str(folder), copy, force=True, dtype="float16")
    assert read_gguf(file)[0]["general.architecture"] == "llama"
    assert (copy / "model.safetensors").read_bytes() != old
    assert left_over(tmp_path) == ["copy", "model.gguf"]


def test_targets_that_make_no_sense_are_refused(folder: Path, gguf_file: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "letters.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    os.mkfifo(tmp_path / "pipe.gguf")
    (tmp_path / "link").symlink_to("plain")
    (tmp_path / "link.gguf").symlink_to("file")
    for target, options, message in [
        (tmp_path / "none" / "model.gguf", {}, "there is no folder"),
        (Path("/proc/model.gguf"), {}, r"the folder /proc cannot be written \(.+\); write the result elsewhere"),
        (plain, {"force": True}, "is a folder without a model"),
        (tmp_path / "file", {"force": True}, "is a file; --force would not replace it with a folder"),
        (tmp_path / ("x" * 300 + ".gguf"), {}, "File name too long"),
        (tmp_path / "pipe.gguf", {"force": True}, "is neither a file nor a folder"),
        (tmp_path / "link", {"force": True}, "is a link to plain; give the name"),
        (tmp_path / "link.gguf", {"force": True}, "is a link to file; give the name"),
        (Path("~nobody-of-that-name/new"), {}, "no home folder is known for its ~"),
        (tmp_path / "new.safetensors", {}, "what is written is a folder with config.json.*or one that ends with .gguf"),
        (tmp_path / "new", {"quantize": "q8_0"}, "a safetensors folder holds no q8_0 blocks"),
        (tmp_path / "new.gguf", {"quantize": "q3_k"}, "expected one of q8_0, q4_0, q4_k"),
        (tmp_path / "new.gguf", {"dtype": "int4"}, "expected auto, float32, float16, bfloat16"),
        (tmp_path / "new.gguf", {"dtype": []}, r"dtype is \[\]; expected auto, float32"),
        (
            tmp_path / "new.gguf",
            {"imatrix": "x.gguf"},
            "has no use without --quantize; expected --quantize q4_0 or q4_k",
        ),
        (tmp_path / "new.gguf", {"imatrix": "x.gguf", "quantize": "q8_0"}, "has no use with --quantize q8_0"),
        (tmp_path / "new.gguf", {"force": "no"}, "force is 'no'; expected True or False"),
        (tmp_path / "new.gguf", {"progress": 5}, "progress is 5; expected a function"),
        (5, {}, "the target is 5; expected a path"),
        ("a\0b.gguf", {}, r"the target is 'a\\x00b.gguf'; expected a path"),
        ("\ud800.gguf", {}, r"the target is '\\ud800.gguf'; expected a path"),
    ]:
        with pytest.raises(UsageError, match=message):
            convert(str(folder), target, **options)  # type: ignore[arg-type]
    for source in (folder, gguf_file):
        with pytest.raises(UsageError, match="is the model that is to be read"):
            convert(str(source), source, force=True)
    assert left_over(tmp_path) == ["file", "link", "link.gguf", "pipe.gguf", "plain"]
    assert (plain / "letters.txt").read_text() == "mine"


def add_notes(folder: Path) -> None:
    (folder / "notes.md").write_text("mine")


def add_hidden(folder: Path) -> None:
    (folder / ".git").mkdir()


def add_link(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to(folder.parent / "elsewhere")


def add_shard(folder: Path) -> None:
    (folder / "model-00001-of-00002.safetensors").write_text("mine")


@pytest.mark.parametrize(
    ("add", "named"),
    [
        (add_notes, "holds notes.md,"),
        (add_hidden, "holds .git,"),
        (add_link, "holds tokenizer.json,"),
        (add_shard, "holds model-00001-of-00002.safetensors,"),
    ],
)
def test_a_folder_that_holds_anything_else_is_not_replaced(
    folder: Path, tmp_path: Path, add: Callable[[Path], None], named: str
) -> None:
    target = convert(str(folder), tmp_path / "copy")
    add(target)
    before = sorted(os.listdir(target))
    with pytest.raises(UsageError, match=f"{named} which this conversion would not write"):
        convert(str(folder), target, force=True)
    assert sorted(os.listdir(target)) == before


def test_a_folder_that_holds_its_source_is_not_replaced(folder: Path, tmp_path: Path) -> None:
    """Neither the file's folder nor the folder's; what lies in the source folder and is no part of it is fine."""
    outer = convert(str(folder), tmp_path / "outer")
    file = convert(str(folder), outer / "model.gguf")
    inner = convert(str(folder), outer / "inner")
    for source in (file, inner):
        with pytest.raises(UsageError, match=r"holds inner, model\.gguf, which"):
            convert(str(source), outer, force=True)
    os.link(file, tmp_path / "same.gguf")
    with pytest.raises(UsageError, match="is the model that is to be read"):
        convert(str(file), tmp_path / "same.gguf", force=True)
    with open_checkpoint(str(inner)), open_checkpoint(str(file)):
        pass


def test_an_empty_folder_is_replaced(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    convert(str(folder), tmp_path / "empty", force=True)
    with open_checkpoint(str(tmp_path / "empty")):
        assert left_over(tmp_path) == ["empty"]


@pytest.mark.parametrize("at_once", [True, False])
def test_a_folder_that_is_replaced_is_whole_at_any_moment(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    """Where the system cannot let two folders trade places, one killed between two steps leaves the old one beside."""
    copy = convert(str(folder), tmp_path / "copy")
    old = (copy / "model.safetensors").read_bytes()
    if not at_once:
        monkeypatch.setattr(target_module, "_rename", lambda *_: False)
    rename = Path.rename
    seen: list[bytes] = []

    def renamed(source: Path, target: Path) -> Path:
        result = rename(source, target)
        (whole,) = (path for path in tmp_path.iterdir() if (path / "model.safetensors").read_bytes() == old)
        seen.append((whole / "model.safetensors").read_bytes())
        return result

    monkeypatch.setattr(Path, "rename", renamed)
    convert(str(folder), copy, force=True, dtype="float16")
    assert len(seen) == (0 if at_once else 3)
    assert (copy / "model.safetensors").read_bytes() != old and left_over(tmp_path) == ["copy"]


def test_what_a_killed_conversion_left_is_cleared_up_by_the_next(folder: Path, tmp_path: Path) -> None:
    copy = convert(str(folder), tmp_path / "copy")
    weights = (copy / "model.safetensors").read_bytes()
    part, old, other = (tmp_path / f".copy.{name}" for name in ("123.part", "124.old", "x.part"))
    copy.rename(old)  # killed before the new folder got the name
    part.mkdir()
    (part / "config.json").write_text("{")
    other.write_text("mine")
    with pytest.raises(UsageError, match="exists; give another name"):
        convert(str(folder), copy)
    assert (copy / "model.safetensors").read_bytes() == weights
    assert left_over(tmp_path) == [".copy.x.part", "copy"]
    part.mkdir()
    (part / "mine.txt.bak").write_text("mine")
    convert(str(folder), copy, force=True)
    assert left_over(tmp_path) == [".copy.123.part", ".copy.x.part", "copy"] and os.listdir(part) == ["mine.txt.bak"]


def test_another_conversion_to_the_same_name_is_left_alone(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "model.gguf"
    other = tmp_path / ".model.gguf.1.part"
    begun = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"import fcntl; f = open({str(other)!r}, 'w'); fcntl.flock(f, 2); print(1, flush=True); input()",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert begun.stdout is not None and begun.stdout.read(1) == b"1"
    convert(str(folder), target)
    assert left_over(tmp_path) == [other.name, target.name]
    begun.communicate(b"\n")
    convert(str(folder), target, force=True)
    assert left_over(tmp_path) == [target.name]


@pytest.mark.parametrize("name", ["model.gguf", "folder", "y" * 250 + ".gguf"])
def test_a_disk_that_fills_up_while_writing_leaves_what_was_there(folder: Path, tmp_path: Path, name: str) -> None:
    """A limit of the file size stands in for the end of the disk: it, too, makes a write fail in the middle."""
    import resource

    target = convert(str(folder), tmp_path / name)
    before = target.stat().st_ino
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(
            UsageError, match=r"writing stopped \((File too large|\d+ requested and .*)\), and nothing of it is left"
        ):
            convert(str(folder), target, force=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert left_over(tmp_path) == [name] and target.stat().st_ino == before
    with open_checkpoint(str(target)):
        pass


def test_a_full_disk_is_found_before_anything_is_written(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = convert_module.shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(convert_module.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(UsageError, match=r"needs 0.07 GB, but its disk has 0.00 GB free"):
        convert(str(folder), tmp_path / "model.gguf")
    assert left_over(tmp_path) == []
