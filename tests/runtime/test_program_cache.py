"""Compiled programs on disk: damaged files, and folders that cannot be written."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmcl.runtime.cache_files import write_atomically
from llmcl.runtime.device import Device
from llmcl.runtime.icd import remembered_probe
from llmcl.runtime.program import KernelSource, ProgramCache

ROOT = Path(__file__).parents[2]
FILE = "portable/arithmetic_peak.cl"
CONSTANTS = {"WIDTH": 1, "CHAINS": 1, "ROUNDS": 16}


def compiled(device: Device) -> int:
    """Loads one kernel with nothing in memory; how many programs had to be compiled for it."""
    return compiled_with(device, 16)


def compiled_with(device: Device, rounds: int) -> int:
    programs = ProgramCache(device.context, device.entry.device)
    programs.kernel(KernelSource(FILE, "arithmetic_peak", CONSTANTS | {"ROUNDS": rounds}))
    return programs.compiled


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("LLMCL_CACHE_DIR", str(folder))
    return folder


def damage(data: bytes, how: str) -> bytes:
    middle = len(data) // 2
    flipped = data[:middle] + bytes([data[middle] ^ 255]) + data[middle + 1 :]
    return {"flipped": flipped, "truncated": data[:middle], "empty": b"", "without digest": data[16:]}[how]


@pytest.mark.parametrize("how", ["flipped", "truncated", "empty", "without digest"])
def test_a_damaged_program_is_compiled_anew(device: Device, cache: Path, how: str) -> None:
    """Intel's compiler crashes on a binary with one wrong byte: the driver must not be given it."""
    if not ProgramCache(device.context, device.entry.device).keeps_binaries:
        pytest.skip("PoCL keeps its programs itself")
    assert (compiled(device), compiled(device)) == (1, 0)
    (file,) = (cache / "programs").iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage(whole, how))
    assert (compiled(device), compiled(device)) == (1, 0)


def test_a_program_under_another_ones_name_is_compiled_anew(device: Device, cache: Path) -> None:
    if not ProgramCache(device.context, device.entry.device).keeps_binaries:
        pytest.skip("PoCL keeps its programs itself")
    for rounds in (16, 32):
        programs = ProgramCache(device.context, device.entry.device)
        programs.kernel(KernelSource(FILE, "arithmetic_peak", CONSTANTS | {"ROUNDS": rounds}))
    first, second = (cache / "programs").iterdir()
    first.write_bytes(second.read_bytes())
    assert sum(compiled_with(device, rounds) for rounds in (16, 32)) == 1


def test_programs_that_others_could_have_written_are_compiled_anew(
    default_device: Device, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if not ProgramCache(default_device.context, default_device.entry.device).keeps_binaries:
        pytest.skip("PoCL keeps its programs itself")
    assert (compiled(default_device), compiled(default_device)) == (1, 0)
    programs = ProgramCache(default_device.context, default_device.entry.device)
    sources = [KernelSource(FILE, "arithmetic_peak", CONSTANTS)]
    assert programs.missing(sources) == []
    cache.chmod(0o770)
    assert (len(programs.missing(sources)), compiled(default_device), compiled(default_device)) == (1, 1, 1)
    (message,) = caplog.messages
    assert message.startswith(f"{cache} is not used: others may write to it") and "LLMCL_CACHE_DIR" in message


def test_a_cache_that_cannot_be_written_is_named_once(
    default_device: Device, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.touch()  # where its folder should be
    with caplog.at_level(logging.WARNING, "llmcl"):
        programs = ProgramCache(default_device.context, default_device.entry.device)
        if not programs.keeps_binaries:
            pytest.skip("PoCL keeps its programs itself")
        for rounds in (16, 32):
            programs.kernel(KernelSource(FILE, "arithmetic_peak", CONSTANTS | {"ROUNDS": rounds}))
    assert programs.compiled == 2
    (message,) = caplog.messages
    assert str(cache) in message and "LLMCL_CACHE_DIR" in message


def test_a_file_that_cannot_be_finished_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(tmp_path / "file", b"data")
    assert list(tmp_path.iterdir()) == []


def test_a_home_that_cannot_be_written_costs_only_time(tmp_path: Path) -> None:
    """pyopencl keeps a database in the home folder; it must not be needed. A file stands in for the home, since
    a superuser writes into any folder."""
    home = tmp_path / "home"
    home.touch()
    code = (
        "from llmcl.runtime.device import Device; from llmcl.runtime.program import KernelSource, ProgramCache;"
        "d = Device.open();"
        f"ProgramCache(d.context, d.entry.device).kernel(KernelSource({FILE!r}, 'arithmetic_peak', {CONSTANTS!r}))"
    )
    variables = {"HOME": str(home), "LLMCL_CACHE_DIR": str(tmp_path / "cache")}
    left_out = "XDG_CACHE_HOME", "PYOPENCL_NO_CACHE"
    environment = {name: value for name, value in os.environ.items() if name not in left_out} | variables
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_cache_that_cannot_be_read_is_probed_again(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "libintelocl.so"
    library.touch()

    def denied(path: Path, most: int, *, trusted: bool = False) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("llmcl.runtime.cache_files.read_plain", denied)
    monkeypatch.setattr("llmcl.runtime.icd.probe_in_child", lambda path: None)
    assert remembered_probe(str(library)) is None
    monkeypatch.setattr("llmcl.runtime.icd.probe_in_child", lambda path: "probed")
    assert remembered_probe(str(library)) == "probed"
