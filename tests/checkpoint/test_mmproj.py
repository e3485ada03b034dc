"""Which file has the vision tower of a GGUF model: names as they are published."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmcl.checkpoint.mmproj import choose_mmproj, find_mmproj
from llmcl.errors import CheckpointError


@pytest.mark.parametrize(
    ("model", "files", "chosen"),
    [
        # ggml-org/gemma-3-4b-it-GGUF, ggml-org/SmolVLM-500M-Instruct-GGUF, unsloth's and bartowski's names
        ("gemma-3-4b-it-Q4_K_M.gguf", ["gemma-3-4b-it-Q8_0.gguf", "mmproj-model-f16.gguf"], "mmproj-model-f16.gguf"),
        (
            "SmolVLM-500M-Instruct-Q8_0.gguf",
            ["mmproj-SmolVLM-500M-Instruct-Q8_0.gguf", "mmproj-SmolVLM-500M-Instruct-f16.gguf"],
            "mmproj-SmolVLM-500M-Instruct-f16.gguf",
        ),
        ("x-UD-Q4_K_XL.gguf", ["mmproj-BF16.gguf", "mmproj-F16.gguf", "mmproj-F32.gguf"], "mmproj-F16.gguf"),
        (
            "google_gemma-3-12b-it-Q4_0.gguf",
            ["mmproj-google_gemma-3-4b-it-f16.gguf", "mmproj-google_gemma-3-12b-it-f16.gguf"],
            "mmproj-google_gemma-3-12b-it-f16.gguf",
        ),
        ("gemma-3-4b-it-Q4_K_M.gguf", ["mmproj-Qwen2.5-VL-7B-Instruct-f16.gguf"], None),
        ("gemma-3-4b-it-Q4_K_M.gguf", ["gemma-3-4b-it-Q8_0.gguf", "mmproj.json"], None),
    ],
)
def test_the_file_is_chosen_by_its_name(model: str, files: list[str], chosen: str | None) -> None:
    assert choose_mmproj(files, model) == chosen


def test_two_files_that_fit_alike_are_named() -> None:
    with pytest.raises(CheckpointError, match=r"fit a.gguf: mmproj-f16.gguf, mmproj-model-f16.gguf; choose one"):
        choose_mmproj(["mmproj-model-f16.gguf", "mmproj-f16.gguf"], "a.gguf")


def test_the_file_lies_beside_a_local_model(tmp_path: Path) -> None:
    model, tower = tmp_path / "a-Q8_0.gguf", tmp_path / "mmproj-a-f16.gguf"
    model.touch()
    assert find_mmproj(str(model), model, offline=True) is None
    tower.touch()
    assert find_mmproj(str(model), model, offline=True) == tower
