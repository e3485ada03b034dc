"""Models with a mixture of experts: their memory, their quantised weights, and their files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from family_configs import FAMILIES
from family_files import save_gguf
from helpers import random_weights, relative_error, save_folder, small_config
from late_kernels import compile_when_used

import llmcl
from llmcl import reference
from llmcl.architectures.families.blocks import ExpertSettings
from llmcl.architectures.families.family import LayerSettings
from llmcl.checkpoint import open_checkpoint
from llmcl.checkpoint.quantize import is_router, quantize_rows, target_format
from llmcl.checkpoint.stacked import parts_of
from llmcl.checkpoint.tensors import StoredTensor
from llmcl.convert import convert
from llmcl.errors import CheckpointError, UnsupportedModelError
from llmcl.kernels.cpu.dot_product import dot_form
from llmcl.kernels.nvidia.persistent_layers import NvidiaPersistentLayers
from llmcl.kernels.nvidia.wgmma import has_wgmma
from llmcl.models.batch import make_batch
from llmcl.models.stack import why_separate
from llmcl.ops.attention import prefill_implementation
from llmcl.ops.experts import experts_scratch_bytes
from llmcl.ops.linear import linear_scratch_bytes
from llmcl.ops.sample import SamplingParams

compiled_when_used = pytest.fixture(compile_when_used, scope="module", autouse=True)

N_EXPERTS, TOP_K = 6, 2
QWEN3_MOE = small_config(
    architecture="qwen3_moe", settings=[LayerSettings(experts=ExpertSettings(N_EXPERTS, TOP_K, 32))] * 2
)
SHARED = small_config(
    architecture="granitemoeshared",
    settings=[LayerSettings(experts=ExpertSettings(4, 2, 32, shared_size=64))] * 2,
    intermediate_size=32,
    attention_scale=0.25,
)
IDS = [5, 17, 99, 3, 42, 42, 8, 120, 77, 31]
WEIGHTS = random_weights(QWEN3_MOE, seed=2)


def quantized(weights: Mapping[str, np.ndarray], quantize: str) -> dict[str, np.ndarray]:
    """The weights as they are after quantising."""
    found = {}
    for name, values in weights.items():
        format = target_format(name, values.shape, quantize)
        found[name] = values if format is None else reference.dequantize(format, quantize_rows(values, format))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tmp_path_factory.mktemp("qwen3_moe"), QWEN3_MOE, WEIGHTS)


@pytest.mark.slow
@pytest.mark.parametrize("quantize", ["q8_0", "q4_0"])
def test_experts_are_quantised_and_routers_are_not(quantize: str, default_device: Any, folder: Path) -> None:
    options: dict[str, Any] = {"device": default_device, "max_context": 64, "kv_dtype": "float32"}
    expected = reference.forward(QWEN3_MOE, quantized(WEIGHTS, quantize), IDS)
    # NVIDIA's matrix units round what meets quantised weights.
    bound = 1e-2 if default_device.entry.fact("ptx_arch") else 1e-4
    with llmcl.load(str(folder), quantize=quantize, activation_dtype="float32", **options) as llm:
        assert {weight.dtype for weight in llm.model.weights.layers[0][1].matrices} == {"float32", quantize}
        assert relative_error(llm.logits(IDS), expected) < bound
        llm.model.cache.truncate(llm.sequence, 0)
        for token in IDS:
            llm.model.decode_token(llm.sequence, token)
        logits = llm.device.read(llm.model.act.logits, np.float32, (QWEN3_MOE.vocab_size,))
        assert relative_error(logits, expected[-1]) < 1e-4


def test_a_step_reads_the_chosen_experts_alone(default_device: Any, folder: Path) -> None:
    with llmcl.load(str(folder), device=default_device, dtype="float32", max_context=64) as llm:
        weights = llm.model.weights
        blocks = [block for layer in weights.layers for block in layer]
        all_bytes = sum(weight.nbytes for block in blocks for weight in block.matrices) + weights.head.nbytes
        of_experts = sum(weight.nbytes for block in blocks for weight in block.matrices if weight.n_experts > 1)
        assert of_experts == 2 * N_EXPERTS * 3 * 32 * QWEN3_MOE.hidden_size * 4
        assert llm.weight_bytes_per_token == all_bytes - of_experts * (N_EXPERTS - TOP_K) // N_EXPERTS
        if llm.device.entry.fact("ptx_arch") < 80:
            assert why_separate(llm.model.layers, llm.model.decode_ops) is None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(NvidiaPersistentLayers, "supports_device", lambda row, device: True)
            reason = why_separate(llm.model.layers, llm.model.decode_ops)
            assert reason is not None and "its attention has no heads" in reason  # experts are no reason
        if llm.device.is_cpu:  # whose persistent kernel takes any step
            assert len(llm.model.decode_launches) == 1


@pytest.mark.parametrize("max_sequences", [pytest.param(3, marks=pytest.mark.slow), 5])
def test_rows_of_several_sequences(max_sequences: int, default_device: Any, folder: Path) -> None:
    """Each has the logits that it has alone: with few rows token by token, with more in blocks."""
    prompts = [IDS, IDS[3:5], IDS[::-1]]
    with llmcl.load(str(folder), device=default_device, dtype="float32", max_context=64) as llm:
        batch = make_batch(llm.model, max_sequences, 64, 64)
        running = []
        for prompt in prompts:
            running.append(batch.cache.sequence())
            batch.start(running[-1], SamplingParams(seed=0))
            batch.read([(running[-1], prompt)])()
        tokens = batch.decode(running)()
        assert len(tokens) == len(prompts)
        rows = llm.device.read(batch.model.act.logits, np.float32, (len(prompts), QWEN3_MOE.vocab_size))
        for prompt, row in zip(prompts, rows, strict=True):
            expected = reference.forward(QWEN3_MOE, WEIGHTS, prompt)[-1]
            ids = [*prompt, int(expected.argmax())]
            assert relative_error(row, reference.forward(QWEN3_MOE, WEIGHTS, ids)[-1]) < 1e-4


@pytest.mark.slow
def test_quantised_experts_of_rows_that_share_few(default_device: Any, tmp_path: Path, separate_launches: None) -> None:
    """Of 8 rows with 2 of 16 experts each most have theirs alone: blocks where they are no slower than pairs."""
    settings = [LayerSettings(experts=ExpertSettings(16, 2, 32))]
    config = small_config(architecture="qwen3_moe", settings=settings, n_layers=1)
    weights = random_weights(config, seed=3)
    folder = save_folder(tmp_path, config, weights)
    with llmcl.load(str(folder), device=default_device, quantize="q4_0", max_context=64) as llm:
        batch, has_blocks = make_batch(llm.model, 3, 64, 64), llm.device.is_cpu and dot_form(llm.device) > 0
        names = {launch.name for bound in batch.decoding.bound.values() for launch in bound.separate}
        if llm.device.is_cpu:
            assert has_blocks == ("experts_prefill" in names) != ("experts_gate_up" in names)
        running, texts = [batch.cache.sequence() for _ in range(3)], []
        for sequence, prompt in zip(running, (IDS, IDS[3:5], IDS[::-1]), strict=True):
            batch.start(sequence, SamplingParams(temperature=0.0))
            texts.append([*prompt, *batch.read([(sequence, prompt)])()])
        batch.decode(running)()
        rows = llm.device.read(batch.model.act.logits, np.float32, (3, config.vocab_size))
    stored = quantized(weights, "q4_0")
    for text, row in zip(texts, rows, strict=True):
        assert relative_error(row, reference.forward(config, stored, text)[-1]) < 3e-2


@pytest.mark.parametrize("quantize", [None, pytest.param("q8_0", marks=pytest.mark.slow)])
def test_the_forecast_is_what_loading_takes(
    quantize: str | None, default_device: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forecasts: list[dict[str, int]] = []
    monkeypatch.setattr("llmcl.engine.loading.check_memory", lambda needed, device: forecasts.append(needed))
    options: dict[str, Any] = {"device": default_device, "max_context": 100, "quantize": quantize}
    with llmcl.load(str(folder), **options) as llm:
        (needed,) = forecasts
        model, exact = llm.model, False
        blocks = [block for layer in model.weights.layers for block in layer]
        matrices = [weight for block in blocks for weight in block.matrices]
        top = model.weights.head, model.weights.embedding
        assert needed["weights"] == sum(weight.nbytes for weight in (*matrices, *top))
        assert llm.device.peak_bytes <= sum(needed.values())
        experts = [
            (weight.dtype, weight.k, weight.n_experts, weight.top_k) for weight in matrices if weight.n_experts > 1
        ]
        packed = experts_scratch_bytes(llm.device, experts, model.chunk, exact_activations=exact)
        others = {(weight.dtype, weight.k) for weight in (*matrices, *top)}
        linear = linear_scratch_bytes(llm.device, others, model.chunk, exact_activations=exact)
        paired = prefill_implementation(llm.device, model.cache.shape).scratch_bytes(llm.device, model.cache.shape)
        assert model.step.scratch_bytes <= linear + packed + paired
        has_packed = dot_form(llm.device) > 0 if llm.device.is_cpu else has_wgmma(llm.device.entry)
        assert (packed > 0) == (quantize is not None and has_packed)


@pytest.mark.slow
def test_random_weights_of_experts(default_device: Any, tmp_path: Path) -> None:
    shape = {"model_type": "qwen3_moe", "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32}
    shape |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    shape |= {"vocab_size": 131, "num_experts": 6, "num_experts_per_tok": 2, "torch_dtype": "bfloat16"}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(shape))
    with llmcl.load_random(str(file), device=default_device.entry.index, dtype="q4_0", max_context=64) as llm:
        assert np.isfinite(llm.logits(IDS)).all()


def test_a_gguf_file_is_quantised_anew(tmp_path: Path) -> None:
    path = save_gguf(tmp_path / "model.gguf", QWEN3_MOE, WEIGHTS)
    smaller = convert(str(path), tmp_path / "q8_0.gguf", quantize="q8_0")
    with open_checkpoint(str(smaller)) as checkpoint:
        formats = {name: info.format for name, info in checkpoint.tensors.items() if len(info.shape) == 2}
        assert {name for name, format in formats.items() if format != "Q8_0"} == set(filter(is_router, formats))
        name = "model.layers.1.mlp.experts.4.up_proj.weight"
        np.testing.assert_array_equal(checkpoint.array(name), quantized(WEIGHTS, "q8_0")[name])


@pytest.mark.parametrize(("name", "format"), [("qwen3_moe", "Q8_0"), ("gpt_oss", "MXFP4"), ("qwen3_next", "F32")])
def test_a_gguf_file_with_gate_and_up_in_one_tensor(name: str, format: str, tmp_path: Path) -> None:
    """As llama.cpp's later converters write experts: every tensor has the bytes that it has in a file of two."""
    config = QWEN3_MOE if name == "qwen3_moe" else FAMILIES[name]
    weights = random_weights(config, seed=4)
    split, fused = (
        save_gguf(tmp_path / f"{is_fused}.gguf", config, weights, format, fused_experts=is_fused)
        for is_fused in (False, True)
    )
    assert b"ffn_gate_up_exps" in fused.read_bytes() and b"ffn_gate_exps" not in fused.read_bytes()
    with open_checkpoint(str(split)) as expected, open_checkpoint(str(fused)) as found:
        assert found.tensors == expected.tensors and found.config == expected.config
        assert format in {info.format for info in found.tensors.values()}
        for tensor, info in expected.tensors.items():
            rows = (checkpoint.rows(tensor, 0, info.n_rows) for checkpoint in (found, expected))
            np.testing.assert_array_equal(*rows, err_msg=tensor)


def test_what_cannot_be_converted_is_refused(tmp_path: Path) -> None:
    granite = save_folder(tmp_path / "granite", SHARED, random_weights(SHARED, seed=3))
    for target in ("folder", "model.gguf"):
        with pytest.raises(UnsupportedModelError, match="granitemoeshared"):
            convert(str(granite), tmp_path / target)


@pytest.mark.parametrize(
    ("tensor", "shape", "message"),
    [
        ("blk.1.ffn_gate_exps.weight", (N_EXPERTS - 1, 32, 64), r"ffn_gate_exps.*\[5, 32, 64\], expected 6 experts"),
        ("blk.1.ffn_gate_exps.weight", (N_EXPERTS * 32, 64), "expected 6 experts"),
        ("blk.0.ffn_down_exps.weight", (N_EXPERTS, 32, 64), r"0\.down_proj.*\[32, 64\], expected \[64, 32\]"),
        ("blk.0.ffn_gate_inp.weight", (N_EXPERTS + 1, 64), r"mlp\.gate.*\[7, 64\], expected \[6, 64\]"),
        ("blk.0.ffn_gate_up_exps.weight", (N_EXPERTS, 63, 64), r"ffn_gate_up_exps.*expected 6 experts by rows \(a mul"),
    ],
)
def test_tensors_of_another_shape_are_named(
    tensor: str, shape: tuple[int, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gguf

    add_tensor = gguf.GGUFWriter.add_tensor

    def changed(writer: Any, name: str, values: np.ndarray) -> None:
        add_tensor(writer, name, np.zeros(shape, np.float32) if name == tensor else values)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", changed)
    path = save_gguf(tmp_path / "model.gguf", QWEN3_MOE, WEIGHTS, fused_experts="gate_up" in tensor)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(str(path))


@pytest.mark.parametrize(
    ("shape", "n_bytes"),
    [((4, 2, 64), 256), ((4, 3, 64), 384), ((4, 0, 64), 0), ((4, 2, 1), 4), ((64,), 32), ((3, 2, 64), 192)],
)
def test_parts_of_a_stored_tensor(shape: tuple[int, ...], n_bytes: int) -> None:
    """Of 4 experts, gate and up; only the first shape is one. A value takes half a byte."""
    stored = StoredTensor(shape, "F4", np.arange(n_bytes).astype(np.uint8))
    names = "{}.gate", "{}.up"
    if shape != (4, 2, 64):
        with pytest.raises(CheckpointError, match=r"expected 4 experts by rows \(a multiple of 2\) by columns"):
            dict(parts_of("stack", stored, names, SHARED))
        return
    found = dict(parts_of("stack", stored, names, SHARED))
    assert list(found) == [f"{i}.{name}" for i in range(4) for name in ("gate", "up")]
    assert found["1.up"].shape == (1, 64) and found["1.up"].data.tolist() == list(range(96, 128))


def test_a_missing_expert_is_named(folder: Path, tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.experts.5.down_proj.weight"
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        open_checkpoint(str(tmp_path))
