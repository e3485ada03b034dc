"""GGUF files with random weights: what is in them, and the formats of their tensors."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import random_gguf
from family_configs import FAMILIES
from llama_cpp_configs import as_llama_cpp_reads

from llmcl.checkpoint import open_checkpoint
from llmcl.checkpoint.formats import dequantize
from llmcl.errors import UsageError
from llmcl.models.random_shapes import random_shape_config


@pytest.mark.parametrize("format", random_gguf.BLOCKS)
def test_random_blocks_are_numbers_of_the_usual_size(format: str) -> None:
    blocks = random_gguf.BLOCKS[format](np.random.default_rng(1), 4096)
    values = dequantize(format, blocks)
    assert np.isfinite(values).all() and abs(values.mean()) < 0.15 * random_gguf.DEVIATION
    assert values.std() == pytest.approx(random_gguf.DEVIATION, rel=0.15)


@pytest.mark.parametrize("name", ["llama-biases", "gemma3_text", "gpt_oss", "lfm2", "qwen3_5_text", "glm4_moe_lite"])
@pytest.mark.parametrize("quantization", ["Q8_0", "MXFP4"])
def test_a_file_has_what_the_model_has(tmp_path: Path, name: str, quantization: str) -> None:
    config = as_llama_cpp_reads(FAMILIES[name])
    path = random_gguf.write_random(tmp_path / f"{name}.gguf", config, quantization)
    assert [*tmp_path.iterdir()] == [path]
    with open_checkpoint(str(path)) as checkpoint:
        assert sorted(checkpoint.config.tensors().values()) == sorted(config.tensors().values())
        assert sorted(info.shape for info in checkpoint.tensors.values()) == sorted(config.tensors().values())
        formats = {info.format for name, info in checkpoint.tensors.items() if len(info.shape) == 2}
        assert quantization in formats or "gpt_oss" not in name


def test_formats_are_those_of_llama_cpp() -> None:
    of = {name: format for name, (_, format) in random_gguf.tensors_of(random_shape_config("qwen3-4b"), "Q4_0").items()}
    assert of["token_embd.weight"] == "Q6_K" and of["blk.3.ffn_down.weight"] == "Q4_0"
    assert of["blk.3.attn_norm.weight"] == "F32"
    tensors = random_gguf.tensors_of(random_shape_config("gpt-oss-20b"), "MXFP4")
    of = {name: format for name, (_, format) in tensors.items()}
    assert of["blk.0.ffn_up_exps.weight"] == "MXFP4" and of["blk.0.attn_q.weight"] == of["output.weight"] == "Q8_0"
    assert of["blk.0.ffn_gate_inp.weight"] == of["blk.0.ffn_up_exps.bias"] == "F32"
    of = {
        name: format for name, (_, format) in random_gguf.tensors_of(random_shape_config("lfm2-1.2b"), "BF16").items()
    }
    assert of["blk.0.shortconv.conv.weight"] == "F32" and of["blk.0.shortconv.in_proj.weight"] == "BF16"


def test_a_full_disk_is_seen_before_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10**9))
    with pytest.raises(UsageError, match=r"has 1\.0 GB free; 4b\.gguf needs 2\.4 GB"):
        random_gguf.write_random(tmp_path / "4b.gguf", random_shape_config("qwen3-4b"), "Q4_0")
    assert not [*tmp_path.iterdir()]
