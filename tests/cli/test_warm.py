"""`llmcl warm`: what it keeps spares later starts all compiling, also in a copy of the folder."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from helpers import random_weights, save_folder, small_config
from programs import Run

import llmcl
from llmcl.runtime.device import Device
from llmcl.runtime.program import ProgramCache


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(save_folder(tmp_path / "model", small_config(), random_weights(small_config(), seed=7)))


@pytest.fixture
def kept(model: str, default_device: Device, run_here: Run, tmp_path: Path) -> Path:
    if not ProgramCache(default_device.context, default_device.entry.device).keeps_binaries:
        pytest.skip("PoCL keeps its programs itself")
    folder = tmp_path / "warmed"
    done = run_here(
        "llmcl", "warm", "-m", model, "--cache-dir", str(folder), "--ctx-size", "128", LLMCL_COMPILE_JOBS="1"
    )
    assert done.returncode == 0, done.stderr
    last = done.stderr.splitlines()[-1]
    assert " programs, " in last and " compiled in " in last and f"; {folder} has " in last and last.endswith(" MB")
    return folder


@pytest.mark.slow
def test_later_starts_compile_nothing(model: str, kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(kept, copy)
    monkeypatch.setenv("LLMCL_CACHE_DIR", str(copy))
    with llmcl.load(model, max_context=256) as llm:
        llm.generate("What is rain?", max_tokens=4, temperature=0.7, top_k=10, logprobs=2)
        llm.generate(["What is rain?", "Why?", "Who are you, and what is your name?"], max_tokens=4)
        assert llm.device.programs.compiled == 0 and len(llm.device.programs) > 10
    for path in (copy, *copy.rglob("*")):
        path.chmod(path.stat().st_mode | 0o022)  # as others could have written it
    with llmcl.load(model, max_context=256, compile_kernels=False) as llm:  # those that load weights are enough here
        assert llm.device.programs.compiled == len(llm.device.programs) > 0


@pytest.mark.parametrize("where", ["a file", "in a file"])
def test_a_folder_that_cannot_be_written(run_here: Run, tmp_path: Path, where: str) -> None:
    file = tmp_path / "file"
    file.touch()
    folder = file if where == "a file" else file / "folder"
    done = run_here("llmcl", "warm", "-m", "smollm2", "--cache-dir", str(folder))
    assert done.returncode == 2 and f"cannot be kept in {folder}; give a folder" in done.stderr


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="folders of Windows")
def test_a_folder_that_others_may_write(run_here: Run, tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o777)
    done = run_here("llmcl", "warm", "-m", "smollm2", "--cache-dir", str(folder))
    assert done.returncode == 2 and "others may write to it" in done.stderr
