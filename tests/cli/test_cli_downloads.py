"""`llmcl list` and `llmcl rm`, on a cache folder as huggingface_hub lays it out."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import constants

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, files in {
        "many": {"m-Q4_K_M.gguf": 3000, "sub/m-Q8_0.gguf": 5000},
        "plain": {"model.safetensors": 2_000_000, "config.json": 10},
        "half": {"config.json": 10},
    }.items():
        repo = tmp_path / f"models--org--{name}"
        (repo / "refs").mkdir(parents=True)
        (repo / "refs" / "main").write_text(COMMIT)
        (repo / "blobs").mkdir()
        for at, (file, size) in enumerate(files.items()):
            blob, link = repo / "blobs" / f"{at:040}", repo / "snapshots" / COMMIT / file
            blob.write_bytes(b"x" * size)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(blob)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def listed(invoke: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> dict[str, tuple[str, int]]:
    assert invoke("list", "--format", "json") == 0
    return {model["name"]: (model["format"], model["size"]) for model in json.loads(capsys.readouterr().out)}


def test_list_names_what_can_be_run(
    cache: Path, invoke: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert listed(invoke, capsys) == {
        "org/many:m-Q4_K_M.gguf": ("GGUF Q4_K_M", 3000),
        "org/many:sub/m-Q8_0.gguf": ("GGUF Q8_0", 5000),
        "org/plain": ("safetensors", 2_000_010),
    }
    assert invoke("list") == 0
    assert "2.0 MB" in capsys.readouterr().out


def test_rm_deletes_what_is_named_and_nothing_else(
    cache: Path, invoke: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke("rm", "org/many:m-Q4_K_M.gguf", "--yes") == 0
    assert "1 model deleted, 3 KB free again" in capsys.readouterr().out
    assert [*listed(invoke, capsys)] == ["org/many:sub/m-Q8_0.gguf", "org/plain"]
    assert len([*(cache / "models--org--many" / "blobs").iterdir()]) == 1
    assert invoke("rm", "https://huggingface.co/org/plain", "--yes") == 0
    capsys.readouterr()
    assert [*listed(invoke, capsys)] == ["org/many:sub/m-Q8_0.gguf"] and not (cache / "models--org--plain").exists()


def test_rm_asks(
    cache: Path,
    invoke: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert invoke("rm", "org/none") == 2
    assert "org/none is not downloaded; there are: org/many:m-Q4_K_M.gguf" in capsys.readouterr().err
    for terminal, answer, code, left in ((False, "y", 2, 3), (True, "\n", 0, 3), (True, "y\n", 0, 2)):
        stdin = io.StringIO(answer)
        monkeypatch.setattr(stdin, "isatty", lambda terminal=terminal: terminal, raising=False)
        monkeypatch.setattr(sys, "stdin", stdin)
        assert invoke("rm", "org/plain") == code
        capsys.readouterr()
        assert len(listed(invoke, capsys)) == left
