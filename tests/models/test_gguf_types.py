"""Models in each of ggml's block formats: files as llama.cpp's converter writes them, values by the package `gguf`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from family_files import gguf_architecture, gguf_tensors, write_metadata
from gguf_reference import write_out
from helpers import random_weights, relative_error, small_config, transformers_logits, transformers_model
from late_kernels import compile_when_used
from parameters import slow_except

import llmcl
from llmcl.architectures.config import ModelConfig
from llmcl.checkpoint import open_checkpoint
from llmcl.checkpoint.quantize import QUANTIZE_FORMATS
from llmcl.convert import convert
from llmcl.errors import UsageError
from llmcl.kernels.common.dtype import QUANTIZED
from llmcl.runtime.device import Device
from llmcl.tools.trials import random_blocks

pytestmark = pytest.mark.usefixtures("separate_launches_in_module")
compiled_when_used = pytest.fixture(compile_when_used, scope="module", autouse=True)

BOUND = 1e-4
CONFIG = small_config(hidden_size=256, intermediate_size=512, head_dim=64, n_q_heads=4, n_kv_heads=2)
NEW = ("IQ4_NL", "IQ4_XS", "Q2_K", "Q3_K", "IQ3_S", "IQ3_XXS", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ1_S", "IQ1_M")
NEW += ("TQ1_0", "TQ2_0", "NVFP4")
ANSWERED = ("IQ4_XS", "Q2_K", "IQ1_M", "NVFP4")
# One layer of a mix, as dynamic quantisation chooses formats tensor by tensor.
MIX = {
    "token_embd": "Q5_K",
    "attn_q": "IQ4_XS",
    "attn_k": "IQ4_NL",
    "attn_v": "Q6_K",
    "attn_output": "F16",
    "ffn_gate": "IQ3_S",
    "ffn_up": "IQ3_S",
    "ffn_down": "Q3_K",
    "output": "BF16",
}


def blocks(format: str, rows: int, k: int, seed: int) -> np.ndarray:
    """Random blocks whose values have about the deviation of a trained matrix: uint8 [rows, row bytes]."""
    kind = gguf.GGMLQuantizationType[format]
    if format in ("F16", "BF16"):
        values = np.random.default_rng(seed).standard_normal((rows, k)) / np.sqrt(k)
        return gguf.quants.quantize(values.astype(np.float32), kind).view(np.uint8).reshape(rows, -1)
    data = random_blocks(format, rows, k, seed).data.reshape(-1, gguf.GGML_QUANT_SIZES[kind][1]).copy()
    if format == "IQ1_M":  # d = 2^-7
        data[:, 49::2] = data[:, 49::2] & 15 | np.array([0, 0, 0, 0x20], np.uint8)
    elif format == "NVFP4":
        data[:, :4] = 8 + data[:, :4] % 16
    else:
        at = {"Q2_K": 80, "Q3_K": 108, "Q6_K": 208, "TQ1_0": 52, "TQ2_0": 64}.get(format, 0)
        n_halves = 2 if format in ("Q2_K", "Q5_K") else 1
        data[:, at : at + 2 * n_halves] = np.full(n_halves, 1, "<f2").view(np.uint8)
        deviation = gguf.quants.dequantize(data, kind).std()
        d = np.full(n_halves, 1 / np.sqrt(k) / deviation, "<f2")
        data[:, at : at + 2 * n_halves] = d.view(np.uint8)
    return data.reshape(rows, -1)


def save(path: Path, config: ModelConfig, formats: dict[str, str]) -> dict[str, np.ndarray]:
    """Writes a model with random blocks. formats: by tensor name in the file, without layer; "" for the others.

    Returns the values by Hugging Face name.
    """
    weights = random_weights(config, seed=3)
    names = [name for name in weights if weights[name].ndim == 2]
    stored: dict[str, tuple[np.ndarray, Any]] = {}
    for i, name in enumerate(names):
        [[in_file, _]] = gguf_tensors(config, {name: weights[name]})
        format = formats.get(in_file.removesuffix(".weight").split(".")[-1]) or formats[""]
        kind = gguf.GGMLQuantizationType[format]
        data = blocks(format, *weights[name].shape, seed=i)
        values = gguf.quants.dequantize(data, kind).reshape(weights[name].shape)
        stored[in_file] = data, kind
        if in_file.endswith(("attn_q.weight", "attn_k.weight")):  # the file has rotary pairs next to each other
            heads = values.reshape(-1, config.head_dim // 2, 2, values.shape[1])
            values = heads.swapaxes(1, 2).reshape(values.shape)
        weights[name] = values
    writer = gguf.GGUFWriter(path, gguf_architecture(config))
    write_metadata(writer, config)
    for in_file, values in gguf_tensors(config, weights):
        if in_file in stored:
            data, kind = stored[in_file]
            writer.add_tensor(in_file, data, raw_dtype=kind)
        else:
            writer.add_tensor(in_file, values)
    write_out(writer, path)
    return weights


def check_logits(path: Path, device: Device, weights: dict[str, np.ndarray], n_answer: int = 8) -> None:
    ids = np.random.default_rng(1).integers(0, CONFIG.vocab_size, 40).tolist()
    expected = transformers_logits(transformers_model(CONFIG, weights), ids)
    options: dict[str, Any] = {"device": device, "max_context": 64, "kv_dtype": "float32"}
    with llmcl.load(str(path), activation_dtype="float32", **options) as llm:
        assert relative_error(llm.logits(ids), expected) < BOUND
        answer = llm.generate(ids, max_tokens=n_answer, ignore_eos=True)
    choices = transformers_logits(transformers_model(CONFIG, weights), [*ids, *answer.token_ids])
    assert answer.token_ids == choices[len(ids) - 1 : -1].argmax(axis=-1).tolist()


@pytest.mark.parametrize("format", slow_except(NEW, "IQ4_XS", "Q2_K"))
def test_logits_of_a_file_in_one_format(format: str, default_device: Device, tmp_path: Path) -> None:
    """Answers, whose products are compiled for a single row, are those of some formats; test_linear_quantized.py has
    the products of all.
    """
    weights = save(tmp_path / "model.gguf", CONFIG, {"": format})
    with open_checkpoint(str(tmp_path / "model.gguf")) as checkpoint:
        assert {info.format for info in checkpoint.tensors.values()} == {format, "F32"}
        for name in weights:
            if not checkpoint.tensors[name].rope_interleaved:
                np.testing.assert_array_equal(checkpoint.array(name), weights[name])
    check_logits(tmp_path / "model.gguf", default_device, weights, 8 if format in ANSWERED else 1)


def test_logits_of_a_mix_of_formats(default_device: Device, tmp_path: Path) -> None:
    weights = save(tmp_path / "model.gguf", CONFIG, MIX)
    check_logits(tmp_path / "model.gguf", default_device, weights)


def test_gate_and_up_in_two_formats(default_device: Device, tmp_path: Path) -> None:
    weights = save(tmp_path / "model.gguf", CONFIG, {"": "IQ4_NL", "ffn_up": "Q2_K", "attn_v": "NVFP4"})
    check_logits(tmp_path / "model.gguf", default_device, weights)


@pytest.mark.parametrize("dtype", [name for name in QUANTIZED if name not in QUANTIZE_FORMATS])
def test_formats_without_a_quantiser_are_refused_by_name(dtype: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"quantize is '{dtype}'; expected one of q8_0, q4_0, q4_k"):
        convert(str(tmp_path / "model.gguf"), tmp_path / "other.gguf", quantize=dtype)
