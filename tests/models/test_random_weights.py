"""Models of a real shape with random weights: `load_random`, and the shapes that it knows."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from late_kernels import compile_when_used
from programs import TINY_SHAPE

import llmcl
from llmcl.checkpoint import open_checkpoint
from llmcl.checkpoint.mixes import mixed_format
from llmcl.errors import UnsupportedModelError, UsageError
from llmcl.models.random_shapes import RANDOM_SHAPES, random_shape_config
from llmcl.models.weights import random_types
from llmcl.progress import Progress
from llmcl.runtime.device import Device

pytestmark = pytest.mark.usefixtures("separate_launches_in_module")
compiled_when_used = pytest.fixture(compile_when_used, scope="module", autouse=True)


def test_random_weights_of_a_config_file(default_device: Device, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    shape = {key: value for key, value in TINY_SHAPE.items() if key != "torch_dtype"}
    file.write_text(json.dumps({**shape, "max_position_embeddings": 512}))
    calls: list[tuple[str, int, int]] = []
    progress: Progress = lambda *call: calls.append(call)  # noqa: E731
    with llmcl.load_random(str(file), device=default_device.entry.index, progress=progress) as llm:
        last = [call for call in calls if call[0] == "making random weights"][-1]
        assert 0 < last[1] == last[2]
        assert not llm.has_tokenizer and (llm.dtype, llm.max_context) == ("bfloat16", 512)
        answer = llm.generate([1, 2, 3], max_tokens=5, ignore_eos=True)
        assert len(answer.token_ids) == 5 and answer.text == "" and answer.finish_reason == "length"
        logits = llm.logits([1, 2, 3])
        assert np.isfinite(logits).all() and 0.1 < logits.std() < 10
        assert llm.bench_prefill(100) > 0 and llm.sequence.position == 100
        times = llm.bench_decode(5, depth=30)
        assert len(times) == 5 and min(times) > 0 and llm.sequence.position == 35
        with pytest.raises(UsageError, match="no tokenizer"):
            llm.generate("text")
        with pytest.raises(UsageError, match="no tokenizer"):
            llm.chat()
        with llmcl.load_random(str(file), device=default_device.entry.index, seed=1) as other:
            assert not np.allclose(other.logits([1, 2, 3]), logits)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["q4_0", "q6_k"])
def test_random_quantized_weights(default_device: Device, tmp_path: Path, dtype: str) -> None:
    file = tmp_path / "config.json"
    shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 131}
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
    if dtype == "q6_k":
        sizes = {"hidden_size": 256, "intermediate_size": 512}
    shape |= {"max_position_embeddings": 512, "rms_norm_eps": 1e-5}
    file.write_text(json.dumps({"model_type": "llama", "torch_dtype": "bfloat16"} | shape | sizes))
    options: dict[str, Any] = {"device": default_device.entry.index, "dtype": dtype}
    with llmcl.load_random(str(file), **options, activation_dtype="float32") as llm:
        assert llm.dtype == dtype and llm.model.weights.head.dtype == "q8_0"
        logits = llm.logits([1, 2, 3])
        assert np.isfinite(logits).all() and 0.1 < logits.std() < 10
        with llmcl.load_random(str(file), **options) as rounded:
            error = np.abs(rounded.logits([1, 2, 3]) - logits).max() / np.abs(logits).max()
            assert 0 <= error < 0.05
    file.write_text(
        json.dumps({"model_type": "llama", "torch_dtype": "bfloat16"} | shape | sizes | {"intermediate_size": 528})
    )
    with pytest.raises(UsageError, match=r"528 values.*multiple of"):
        llmcl.load_random(str(file), **options)
    with pytest.raises(UsageError, match=r"q9_0.*q4_0"):
        llmcl.load_random(str(file), device=default_device.entry.index, dtype="q9_0")


@pytest.mark.slow
def test_random_weights_of_a_mix(default_device: Device, tmp_path: Path) -> None:
    """Layer 0 of 2 has 4 bits in all products, layer 1 other values and another down projection."""
    file = tmp_path / "config.json"
    shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 131}
    sizes = {"hidden_size": 256, "intermediate_size": 512, "max_position_embeddings": 512, "rms_norm_eps": 1e-5}
    file.write_text(json.dumps({"model_type": "llama", "torch_dtype": "bfloat16"} | shape | sizes))
    with llmcl.load_random(str(file), device=default_device.entry.index, dtype="q4_k_m") as llm:
        weights = llm.model.weights
        assert (llm.dtype, weights.embedding.dtype, weights.head.dtype) == ("q4_k", "q4_k", "q6_k")
        of_layers = [[weight for block in layer for weight in block.matrices] for layer in weights.layers]
        found = [[[part.dtype for part in weight.parts] for weight in of_layer] for of_layer in of_layers]
        few, more = ["q4_k"], ["q6_k"]
        assert found == [[few, few, few, few], [few + more, few, few, more]]
        logits = llm.logits([1, 2, 3])
        assert np.isfinite(logits).all() and 0.1 < logits.std() < 10


def test_which_tensors_of_a_mix_have_more_bits() -> None:
    """As llama.cpp chooses them, of 32 layers 16."""
    chosen = {0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31}
    for i in range(32):
        for part in ("self_attn.v_proj", "mlp.down_proj", "mlp.experts.7.down_proj", "block_sparse_moe.experts.0.w2"):
            format = mixed_format(f"model.layers.{i}.{part}.weight", 512, "q4_k_m", 32, tied=False)
            assert format == ("Q6_K" if i in chosen else "Q4_K"), (i, part)
        assert mixed_format(f"model.layers.{i}.self_attn.k_proj.weight", 512, "q5_k_m", 32, tied=False) == "Q5_K"
    assert mixed_format("model.layers.9.self_attn.qkv_proj.weight", 512, "q4_k_m", 32, tied=False) == "Q5_K"
    for tied, format in ((False, "Q4_K"), (True, "Q6_K")):
        assert mixed_format("model.embed_tokens.weight", 512, "q4_k_m", 32, tied=tied) == format
    assert mixed_format("lm_head.weight", 512, "q4_k_m", 32, tied=False) == "Q6_K"


def test_a_mix_of_a_model_whose_rows_are_no_whole_blocks() -> None:
    """The shares of SmolLM2-135M's file in notes/quantization.md."""
    config = random_shape_config("smollm2-135m")
    types, sizes = random_types(config, "q4_k_m"), Counter[str]()
    for name, shape in config.tensors().items():
        if len(shape) == 2:
            sizes[types.formats[name]] += shape[0] * shape[1]
    shares = {format: round(100 * n / sizes.total()) for format, n in sizes.items()}
    assert shares == {"Q5_0": 58, "Q8_0": 22, "Q4_K": 11, "Q6_K": 9}


PUBLISHED_SIZES = {
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.1-8b": 8_030_261_248,
    "mistral-7b": 7_241_732_096,
    "smollm3-3b": 3_075_098_624,
    "phi-4-mini": 3_836_021_760,
    "olmo-2-7b": 7_298_617_344,
    "olmoe-1b-7b": 6_919_161_856,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-4b": 4_022_468_096,
    "qwen3-30b-a3b": 30_532_122_624,
    "gpt-oss-20b": 20_914_757_184,
    "gemma-2-2b": 2_614_341_888,
    "gemma-3-4b": 3_880_263_168,
    "gemma-3-12b": 11_766_034_176,
    "lfm2-1.2b": 1_170_340_608,
}


def test_random_shapes_have_the_published_sizes() -> None:
    for shape, n_parameters in PUBLISHED_SIZES.items():
        assert random_shape_config(shape).n_parameters() == n_parameters, shape
    with open_checkpoint("smollm2") as demo:
        assert random_shape_config("smollm2-135m").n_parameters() == demo.config.n_parameters()


def test_unknown_random_shapes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no-such-shape.*neither one of " + ", ".join(RANDOM_SHAPES)):
        random_shape_config("no-such-shape")
    with pytest.raises(UsageError, match="cannot be read: File name too long") as refused:
        random_shape_config("9" * 435)
    assert len(str(refused.value)) <= 600
    file = tmp_path / "config.json"
    for content, error, message in (
        ("[1, 2]", UsageError, "holds a JSON list"),
        ("{", UsageError, "readable config.json"),
        ("\xff", UsageError, "readable config.json"),
        ('{"model_type": "mamba"}', UnsupportedModelError, "mamba"),
    ):
        file.write_bytes(content.encode("latin-1"))
        with pytest.raises(error, match=message):
            random_shape_config(str(file))
