"""Weights that several tensors make up, against their formats' definitions in float64.

FP8: the OCP 8-bit floating point specification (by torch.float8_e4m3fn) and transformers' finegrained_fp8.
compressed-tensors: the package's pack_to_int32 and NVFP4PackedCompressor. AWQ: AutoAWQ's WQLinear_GEMM. GPTQ:
AutoGPTQ's QuantLinear. nf4: the QLoRA paper and bitsandbytes' dequantize_blockwise.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family_configs import FAMILIES
from helpers import random_weights, relative_error, save_folder, small_config, transformers_logits, transformers_model
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

import llmcl
from llmcl.architectures.config import ModelConfig, config_from_hf
from llmcl.checkpoint import open_checkpoint
from llmcl.convert import convert
from llmcl.errors import CheckpointError, UnsupportedModelError
from llmcl.runtime.device import Device

Array = NDArray[Any]
Parts = dict[str, torch.Tensor]  # suffix -> tensor
Packing = Callable[[Array, np.random.Generator], tuple[Parts, Array]]  # the weight's values are the second result

CONFIG = small_config("qwen3", hidden_size=128, intermediate_size=192, n_layers=1)
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def values(x: torch.Tensor) -> Array:
    return np.asarray(x.to(torch.float64).numpy())


def spread(grid: Array, shape: tuple[int, ...], rows: int, columns: int) -> Array:
    """Each grid value over its block."""
    return np.asarray(np.repeat(np.repeat(grid, rows, 0), columns, 1)[: shape[0], : shape[1]])


def fp8(
    rows: int, columns: int, scale_dtype: torch.dtype, suffix: str, scalar_shape: tuple[int, ...] | None = None
) -> Packing:
    """FP8 with a scale for each block; 0 is the whole size."""

    def pack(weight: Array, rng: np.random.Generator) -> tuple[Parts, Array]:
        n, k = weight.shape
        r, c = rows or n, columns or k
        grid = torch.tensor(rng.uniform(0.5, 2.0, (-(-n // r), -(-k // c))) / 200).to(scale_dtype)
        scales = spread(values(grid), weight.shape, r, c)
        codes = torch.tensor(weight / scales).clamp(-448, 448).to(torch.float8_e4m3fn)
        parts = {"weight": codes, suffix: grid if scalar_shape is None else grid.reshape(scalar_shape)}
        return parts, values(codes) * scales

    return pack


def static_fp8(weight: Array, rng: np.random.Generator) -> tuple[Parts, Array]:
    parts, expected = fp8(0, 0, BF16, "weight_scale_inv", ())(weight, rng)
    return parts | {"activation_scale": torch.tensor(0.25, dtype=BF16)}, expected


def packed_words(codes: Array, bits: int, axis: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Unsigned codes along an axis in words of 32 bits, lowest bits first. order: the neighbour in each place."""
    codes = np.moveaxis(codes, axis, -1).astype(np.uint64)
    per_word = 32 // bits
    codes = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, -codes.shape[-1] % per_word)])
    codes = codes.reshape(*codes.shape[:-1], -1, per_word)
    words = sum(codes[..., order[i] if order else i] << np.uint64(bits * i) for i in range(per_word))
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(words, -1, axis).astype(np.uint32).view(np.int32)))


def integers(weight: Array, scales: Array, zeros: Array | int, top: int) -> Array:
    """Unsigned codes 0..top, with every code among them."""
    codes = np.clip(np.rint(weight / scales) + zeros, 0, top)
    codes[0, : top + 1] = np.arange(min(top + 1, codes.shape[1]))
    return np.asarray(codes.astype(np.int64))


def by_group(
    write: Callable[[Array, Array, torch.Tensor], Parts],
    bits: int,
    group: int,
    scale_dtype: torch.dtype,
    zeros: bool,
    act_order: bool = False,
) -> Packing:
    """Integers in groups of columns. write(codes [n, k], zeros [n, groups], scales [n, groups]); group: 0 is a row."""

    def pack(weight: Array, rng: np.random.Generator) -> tuple[Parts, Array]:
        n, k = weight.shape
        size, top = group or k, (1 << bits) - 1
        index = np.arange(k) // size
        if act_order:
            index = rng.permutation(index)
        scales = torch.tensor(rng.uniform(0.5, 2.0, (n, k // size)) * 0.4 / top).to(scale_dtype)
        lowest = int(scale_dtype == F16)  # GPTQ's first version has no zero point 0
        points = rng.integers(lowest, top + 1, (n, k // size)) if zeros else np.full((n, k // size), (top + 1) // 2)
        of_columns, points_of_columns = values(scales)[:, index], points[:, index]
        codes = integers(weight, of_columns, points_of_columns, top)
        parts = write(codes, points, scales)
        if act_order or "g_idx" in parts:
            name = "g_idx" if "qweight" in parts else "weight_g_idx"
            parts[name] = torch.tensor(index, dtype=torch.int32)
        return parts, (codes - points_of_columns) * of_columns

    return pack


def as_compressed(bits: int, zeros: bool) -> Callable[[Array, Array, torch.Tensor], Parts]:
    def write(codes: Array, points: Array, scales: torch.Tensor) -> Parts:
        parts = {
            "weight_packed": packed_words(codes, bits, 1),
            "weight_scale": scales,
            "weight_shape": torch.tensor(codes.shape),
        }
        return parts | ({"weight_zero_point": packed_words(points, bits, 0)} if zeros else {})

    return write


def as_int8(codes: Array, points: Array, scales: torch.Tensor) -> Parts:
    return {"weight": torch.tensor(codes - 128, dtype=torch.int8), "weight_scale": scales}


def as_gptq(bits: int, offset: int) -> Callable[[Array, Array, torch.Tensor], Parts]:
    """offset: 1 in the format's first version, which stores zero points less one."""

    def write(codes: Array, points: Array, scales: torch.Tensor) -> Parts:
        return {
            "qweight": packed_words(codes.T, bits, 0),
            "qzeros": packed_words(points.T - offset, bits, 1),
            "scales": scales.T,
            "g_idx": torch.empty(0),  # filled in by `by_group`
        }

    return write


def as_awq(codes: Array, points: Array, scales: torch.Tensor) -> Parts:
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        "qweight": packed_words(codes.T, 4, 1, order),
        "qzeros": packed_words(points.T, 4, 1, order),
        "scales": scales.T,
    }


def nvfp4(total: str) -> Packing:
    """total: name of the scale of the whole weight. compressed-tensors divides by it, ModelOpt multiplies."""

    def pack(weight: Array, rng: np.random.Generator) -> tuple[Parts, Array]:
        numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
        codes = rng.integers(0, 16, weight.shape)
        blocks = torch.tensor(rng.uniform(1, 300, (len(weight), weight.shape[1] // 16))).to(torch.float8_e4m3fn)
        is_modelopt = total == "weight_scale_2"
        scalar = torch.tensor(2.0**-12 if is_modelopt else [2.0**12], dtype=F32)
        name = "weight" if is_modelopt else "weight_packed"
        parts = {name: torch.tensor(codes[:, ::2] | codes[:, 1::2] << 4, dtype=torch.uint8), total: scalar}
        parts |= {"weight_scale": blocks, "input_scale": torch.tensor(0.5)}
        return parts, numbers[codes] * spread(values(blocks), weight.shape, 1, 16) * 2.0**-12

    return pack


def nf4(nested: bool) -> Packing:
    """nested: scales are quantised, too (double quantisation)."""

    def pack(weight: Array, rng: np.random.Generator) -> tuple[Parts, Array]:
        table = np.sort(rng.uniform(-1, 1, 16)).astype(np.float32)
        codes, count = rng.integers(0, 16, weight.size), weight.size // 64
        state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape)}
        absmax: Array = rng.uniform(0.1, 0.3, count).astype(np.float32)
        parts = {"weight": torch.tensor(codes[::2] << 4 | codes[1::2], dtype=torch.uint8)[:, None]}
        if nested:
            inner = np.linspace(-1, 1, 256).astype(np.float32)
            outer = rng.uniform(0.05, 0.1, -(-count // 256)).astype(np.float32)
            places = rng.integers(0, 256, count)
            absmax = inner[places] * outer[np.arange(count) // 256] + np.float32(0.25)
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.25}
            parts |= {"weight.nested_absmax": torch.tensor(outer), "weight.nested_quant_map": torch.tensor(inner)}
            parts["weight.absmax"] = torch.tensor(places, dtype=torch.uint8)
        else:
            parts["weight.absmax"] = torch.tensor(absmax)
        parts["weight.quant_map"] = torch.tensor(table)
        text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        parts["weight.quant_state.bitsandbytes__nf4"] = text
        return parts, (table[codes] * np.repeat(absmax, 64)).reshape(weight.shape)

    return pack


def llm_int8(weight: Array, rng: np.random.Generator) -> tuple[Parts, Array]:
    codes = rng.integers(-127, 128, weight.shape)
    largest = rng.uniform(0.2, 0.4, len(weight)).astype(np.float32)
    parts = {"weight": torch.tensor(codes, dtype=torch.int8), "SCB": torch.tensor(largest)}
    parts["weight_format"] = torch.tensor(0, dtype=torch.uint8)
    return parts, codes * (largest * np.float32(1 / 127))[:, None].astype(np.float64)


def compressed(format: str, **weights: Any) -> dict[str, Any]:
    """The settings that llm-compressor writes."""
    group = {"targets": ["Linear"], "weights": {"dynamic": False, **weights}, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


def gptq(bits: int, **settings: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": 32, "desc_act": False, "sym": True, **settings}


FP8_BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
FP8_STATIC = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
CT_FP8 = compressed("float-quantized", type="float", num_bits=8, strategy="channel", symmetric=True)
CT_INT8 = compressed("int-quantized", type="int", num_bits=8, strategy="channel", symmetric=True)
CT_INT4 = compressed("pack-quantized", type="int", num_bits=4, strategy="group", group_size=32, symmetric=True)
CT_ZEROS4 = compressed("pack-quantized", type="int", num_bits=4, strategy="group", group_size=64, symmetric=False)
CT_ORDER4 = compressed("pack-quantized", type="int", num_bits=4, group_size=32, symmetric=False, actorder="group")
CT_PACKED8 = by_group(as_compressed(8, False), 8, 0, BF16, False)
CT_ZEROS8 = by_group(as_compressed(8, True), 8, 0, BF16, True)
NVFP4 = nvfp4("weight_global_scale")
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True}
# name -> quantization_config, packing, dtype of the other tensors, format on the device
CASES: dict[str, tuple[dict[str, Any], Packing, str, str]] = {
    "fp8-blocks": (FP8_BLOCKS, fp8(128, 128, F32, "weight_scale_inv"), "bfloat16", "BF16"),
    "fp8-blocks-bfloat16": (FP8_BLOCKS, fp8(128, 128, BF16, "weight_scale_inv"), "bfloat16", "BF16"),
    "fp8-static": (FP8_STATIC, static_fp8, "bfloat16", "BF16"),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, fp8(1, 0, F32, "weight_scale"), "bfloat16", "BF16"),
    "ct-fp8-tensor": (CT_FP8, fp8(0, 0, BF16, "weight_scale", (1,)), "bfloat16", "BF16"),
    "modelopt-fp8": (None, fp8(0, 0, F32, "weight_scale", ()), "bfloat16", "BF16"),
    "modelopt-nvfp4": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        nvfp4("weight_scale_2"),
        "bfloat16",
        "BF16",
    ),
    "ct-nvfp4": (compressed("nvfp4-pack-quantized", type="float", num_bits=4), NVFP4, "bfloat16", "BF16"),
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, nf4(False), "bfloat16", "BF16"),
    "nf4-double": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, nf4(True), "bfloat16", "BF16"),
    "llm-int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, llm_int8, "bfloat16", "BF16"),
    "ct-fp8-channel": (CT_FP8, fp8(1, 0, BF16, "weight_scale"), "bfloat16", "BF16"),
    "ct-int8": (CT_INT8, by_group(as_int8, 8, 0, BF16, False), "bfloat16", "Q8_0"),
    "ct-int8-float32-scales": (CT_INT8, by_group(as_int8, 8, 0, F32, False), "bfloat16", "BF16"),
    "ct-int4": (CT_INT4, by_group(as_compressed(4, False), 4, 32, BF16, False), "bfloat16", "Q4_0"),
    "ct-int4-zeros": (CT_ZEROS4, by_group(as_compressed(4, True), 4, 64, BF16, True), "bfloat16", "Q5_0"),
    "ct-int4-act-order": (CT_ORDER4, by_group(as_compressed(4, True), 4, 32, BF16, True, True), "bfloat16", "BF16"),
    "ct-int4-narrow": (CT_INT4, by_group(as_compressed(4, False), 4, 16, BF16, False), "bfloat16", "BF16"),
    "ct-int8-packed": (CT_INT8 | {"format": "pack-quantized"}, CT_PACKED8, "bfloat16", "Q8_0"),
    "ct-int8-zeros": (CT_INT8 | {"format": "pack-quantized"}, CT_ZEROS8, "bfloat16", "BF16"),
    "awq": (AWQ, by_group(as_awq, 4, 64, F16, True), "float16", "Q5_0"),
    "gptq": (gptq(4), by_group(as_gptq(4, 1), 4, 32, F16, False), "float16", "Q4_0"),
    "gptq-zeros": (gptq(4, sym=False), by_group(as_gptq(4, 1), 4, 32, F16, True), "float16", "Q5_0"),
    "gptq-act-order": (gptq(4, desc_act=True), by_group(as_gptq(4, 1), 4, 32, F16, True, True), "float16", "F16"),
    "gptq-8-bits": (gptq(8), by_group(as_gptq(8, 1), 8, 32, F16, False), "float16", "Q8_0"),
    "gptq-v2": (gptq(4, checkpoint_format="gptq_v2"), by_group(as_gptq(4, 0), 4, 32, F16, True), "float16", "Q5_0"),
}


def packed_folder(
    folder: Path, quantization: dict[str, Any] | None, packing: Packing, dtype: str, config: ModelConfig = CONFIG
) -> dict[str, NDArray[np.float32]]:
    """Writes a model whose layers' projections are packed. Returns all weights as they should be read."""
    save_folder(folder, config, random_weights(config, seed=1), dtype)
    tensors, rng = load_file(folder / "model.safetensors"), np.random.default_rng(2)
    result = {}
    for name, tensor in list(tensors.items()):
        result[name] = values(tensor).astype(np.float32)
        if name.endswith("_proj.weight"):
            parts, expected = packing(values(tensors.pop(name)), rng)
            tensors |= {f"{name.removesuffix('weight')}{suffix}": part.contiguous() for suffix, part in parts.items()}
            result[name] = expected.astype(np.float32)
    save_file(tensors, folder / "model.safetensors")
    settings = json.loads((folder / "config.json").read_text())
    settings |= {} if quantization is None else {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(settings))
    return result


def rounded_as(format: str, weight: NDArray[np.float32]) -> NDArray[np.float32]:
    dtype = {"BF16": BF16, "F16": F16}.get(format, F32)
    return np.asarray(torch.from_numpy(weight).to(dtype).float().numpy())


@pytest.mark.parametrize("case", CASES)
def test_packed_weights_have_their_formats_values(case: str, tmp_path: Path) -> None:
    quantization, packing, dtype, format = CASES[case]
    expected = packed_folder(tmp_path / "model", quantization, packing, dtype)
    with open_checkpoint(str(tmp_path / "model")) as checkpoint:
        assert checkpoint.tensors.keys() == expected.keys()
        for name, weight in expected.items():
            info = checkpoint.tensors[name]
            if name.endswith("_proj.weight"):
                assert info.format == format, name
            np.testing.assert_array_equal(checkpoint.array(name), rounded_as(info.format, weight), name)
            if len(info.shape) == 2:  # chunks of rows begin anywhere
                whole = checkpoint.rows(name, 0, info.n_rows)
                np.testing.assert_array_equal(checkpoint.rows(name, 5, info.n_rows - 3), whole[5:-3], name)


@pytest.mark.parametrize(
    "case",
    ["fp8-blocks", *(pytest.param(case, marks=pytest.mark.slow) for case in ("ct-int8", "awq", "gptq-act-order"))],
)
def test_logits_are_those_of_the_unpacked_weights(case: str, default_device: Device, tmp_path: Path) -> None:
    quantization, packing, dtype, format = CASES[case]
    weights = packed_folder(tmp_path / "model", quantization, packing, dtype)
    weights |= {name: rounded_as(format, x) for name, x in weights.items() if name.endswith("_proj.weight")}
    ids = list(range(3, 20))
    expected = transformers_logits(transformers_model(CONFIG, weights), ids)
    with llmcl.load(str(tmp_path / "model"), device=default_device, dtype="float32", max_context=64) as llm:
        assert relative_error(llm.logits(ids), expected) < 1e-4


def test_rows_that_are_assembled_are_split_for_latent_attention(tmp_path: Path) -> None:
    """DeepSeek V3 as published: keys and values of all heads in one FP8 matrix, and experts."""
    config = FAMILIES["deepseek_v3"]
    blocks = FP8_BLOCKS | {"weight_block_size": [32, 32]}
    weights = packed_folder(tmp_path / "packed", blocks, fp8(32, 32, F32, "weight_scale_inv"), "bfloat16", config)
    save_folder(tmp_path / "plain", config, random_weights(config, seed=1), "bfloat16")
    save_file({name: torch.tensor(x).to(BF16) for name, x in weights.items()}, tmp_path / "plain" / "model.safetensors")
    with open_checkpoint(str(tmp_path / "packed")) as packed, open_checkpoint(str(tmp_path / "plain")) as plain:
        assert packed.tensors == plain.tensors
        for name, info in plain.tensors.items():
            rows = (3, info.n_rows - 5) if info.n_rows > 8 else (0, info.n_rows)
            np.testing.assert_array_equal(packed.rows(name, *rows), plain.rows(name, *rows), name)


def test_the_text_part_of_a_model_with_images_may_be_packed(tmp_path: Path) -> None:
    """Ministral 3 as published: FP8 with a scale per tensor, and a tower for images in bfloat16."""
    config = FAMILIES["ministral3"]
    expected = packed_folder(tmp_path, None, static_fp8, "bfloat16", config)
    tensors = {f"language_model.{name}": part for name, part in load_file(tmp_path / "model.safetensors").items()}
    tensors["vision_tower.patch_conv.weight"] = torch.zeros(3, 3, dtype=BF16)
    save_file(tensors, tmp_path / "model.safetensors")
    text = json.loads((tmp_path / "config.json").read_text())
    whole = {"model_type": "mistral3", "dtype": "bfloat16", "text_config": text, "quantization_config": FP8_STATIC}
    whole["tie_word_embeddings"] = config.tie_embeddings
    (tmp_path / "config.json").write_text(json.dumps(whole))
    with open_checkpoint(str(tmp_path)) as checkpoint:
        assert checkpoint.tensors.keys() == expected.keys()
        for name, weight in expected.items():
            np.testing.assert_array_equal(checkpoint.array(name), rounded_as("BF16", weight), name)


def test_a_conversion_holds_the_unpacked_weights(tmp_path: Path) -> None:
    quantization, packing, dtype, _ = CASES["gptq-zeros"]
    expected = packed_folder(tmp_path / "model", quantization, packing, dtype)
    (tmp_path / "model" / "quantize_config.json").write_text("{}")
    convert(str(tmp_path / "model"), tmp_path / "floats", dtype="float32")
    assert not (tmp_path / "floats" / "quantize_config.json").exists()
    assert "quantization_config" not in json.loads((tmp_path / "floats" / "config.json").read_text())
    with open_checkpoint(str(tmp_path / "floats")) as checkpoint:
        for name, weight in expected.items():
            np.testing.assert_array_equal(checkpoint.array(name), weight, name)


def test_the_user_reads_what_expanded_weights_take(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for case, is_told in (("awq", False), ("fp8-static", True)):
        packed_folder(tmp_path / case, *CASES[case][:3])
        open_checkpoint(str(tmp_path / case)).close()
        assert ("expanded to bfloat16" in caplog.text) == is_told, case


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "hqq"}, "quantised by 'hqq'.*it supports fp8, compressed-tensors, awq, gptq"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2'"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv'"),
        ({"quant_method": "gptq", "bits": 3}, "bits 3"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ'"),
        (compressed("marlin-24"), "format 'marlin-24'"),
        (compressed("pack-quantized", type="int", num_bits=3), "num_bits 3"),
        (CT_INT4 | {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config"),
        (CT_FP8 | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "'sparse-24-bitmask'"),
        ({"bits": 4, "group_size": 64}, "packed by MLX"),
    ],
)
def test_other_packings_are_refused_by_the_configuration(quantization: dict[str, Any], message: str) -> None:
    settings = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    settings |= {"vocab_size": 100, "intermediate_size": 96}
    with pytest.raises(UnsupportedModelError, match=message):
        config_from_hf({**settings, "quantization_config": quantization})
    if "quant_method" not in quantization:  # where MLX writes it
        with pytest.raises(UnsupportedModelError, match=message):
            config_from_hf({**settings, "quantization": quantization})


@pytest.mark.parametrize(
    ("case", "quantization", "changes", "message"),
    [
        ("awq", None, {}, "qweight' is packed, and config.json does not say how"),
        ("awq", gptq(4), {}, "qzeros|scales"),  # AWQ's tensors under the other name
        ("fp8-blocks", FP8_BLOCKS, {"weight_scale_inv": torch.ones(3, 1)}, r"3 scales of rows"),
        ("ct-int4", CT_INT4, {"weight_shape": torch.tensor([128, 96])}, "rows of .* words for the shape"),
        ("ct-int4", CT_INT4, {"weight_g_idx": torch.arange(128, dtype=torch.int32)}, "groups 0 to 127"),
        ("gptq", gptq(4), {"scales": torch.ones(4, 7, dtype=F16)}, "scales"),
        ("gptq", gptq(4), {"qzeros": None}, "qzeros' is missing"),
        # Without these the values would be others, or in another order.
        ("gptq", gptq(4, desc_act=True), {"g_idx": None}, "g_idx' is missing"),
        ("ct-int4-zeros", CT_ZEROS4, {"weight_zero_point": None}, "weight_zero_point' is missing"),
        ("ct-int4-act-order", CT_ORDER4, {"weight_g_idx": None}, "weight_g_idx' is missing"),
        ("fp8-static", FP8_STATIC, {"weight_scale_inv": None}, "has the format F8_E4M3"),
        ("nf4", {"quant_method": "bitsandbytes"}, {"weight.absmax": torch.ones(3)}, r"\[3\]"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(
    case: str,
    quantization: dict[str, Any] | None,
    changes: dict[str, torch.Tensor | None],
    message: str,
    tmp_path: Path,
) -> None:
    _, packing, dtype, _ = CASES[case]
    folder, module = tmp_path / "model", "model.layers.0.self_attn.q_proj."
    packed_folder(folder, quantization, packing, dtype)
    tensors = load_file(folder / "model.safetensors")
    for suffix, part in changes.items():
        tensors.pop(module + suffix, None)
        tensors |= {} if part is None else {module + suffix: part}
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        open_checkpoint(str(folder))
