"""The NumPy twins of storage formats and layouts, against PyTorch, transformers and gguf."""

from __future__ import annotations

import math

import numpy as np
import pytest
from helpers import FLOAT64, normal, relative_error
from numpy.typing import NDArray

from llmcl import reference
from llmcl.checkpoint.grids import GRIDS
from llmcl.checkpoint.low_bits import sizes_in
from llmcl.errors import CheckpointError, UnsupportedModelError, UsageError

torch = pytest.importorskip("torch")


def float32_patterns() -> NDArray[np.float32]:
    """Every upper half with lower halves at and beside each rounding border, and random bit patterns."""
    upper = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
    lower = np.array([0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=np.uint32)
    borders = (upper[:, None] | lower[None, :]).reshape(-1)
    random = np.random.default_rng(12).integers(0, 1 << 32, 20000, dtype=np.uint32)
    return np.concatenate([borders, random]).view(np.float32)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_round_to_is_the_rounding_of_pytorch(dtype: str) -> None:
    x = float32_patterns()
    expected = torch.from_numpy(x).to(getattr(torch, dtype)).float().numpy()
    actual = reference.round_to(x, dtype)
    assert actual.dtype == np.float32
    assert np.isnan(x).any() and np.isinf(expected).any()
    assert np.array_equal(np.isnan(actual), np.isnan(x))
    number = ~np.isnan(x)
    assert np.array_equal(actual[number].view(np.uint32), expected[number].view(np.uint32))


def test_round_bfloat16_takes_every_float_dtype_and_shape() -> None:
    for dtype in (np.float64, np.float32, np.float16):
        x = np.array([[1.0, 1.0 + 2.0**-8, 1.0 + 3 * 2.0**-8]], dtype=dtype)
        assert np.array_equal(reference.round_bfloat16(x), [[1.0, 1.0, 1.0 + 2.0**-6]])
    assert reference.round_bfloat16(np.array([1e300, -1e300])).tolist() == [math.inf, -math.inf]
    assert reference.round_bfloat16(np.array(3.0)).shape == ()


def test_round_to_refuses_an_unknown_dtype() -> None:
    with pytest.raises(UsageError, match=r"int8.*float32, float16, bfloat16 or q8_0"):
        reference.round_to(np.zeros(3), "int8")


# Format -> byte offsets of the float16 scales in a block; all other bytes may hold anything.
SCALES = {
    "F32": (),
    "F16": (0,),
    "BF16": (),
    "Q8_0": (0,),
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "MXFP4": (),
    "NVFP4": (),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "IQ3_S": (0,),
    "IQ3_XXS": (0,),
    "IQ2_XXS": (0,),
    "IQ2_XS": (0,),
    "IQ2_S": (0,),
    "IQ1_S": (0,),
    "IQ1_M": (),  # d is scattered; its exponent is in the last byte
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}


def random_blocks(format: str, rows: int, blocks: int) -> NDArray[np.uint8]:
    """Rows of random blocks with finite scales: uint8 [rows, blocks * block bytes]."""
    rng = np.random.default_rng(13)
    size = reference.FORMATS[format].nbytes
    data = rng.integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    if format in ("F32", "BF16"):
        data[..., -1] &= 0xBF  # exponents of 0x3f.. at most: no infinity, no NaN
    for offset in SCALES[format]:
        scale = (rng.standard_normal((rows, blocks)) * 3).astype("<f2")
        data[..., offset : offset + 2] = scale[..., None].view(np.uint8)
    if format == "MXFP4":
        data[..., 0] %= 253  # below infinity
    if format == "IQ1_M":
        data[..., 55] &= 0xBF
    return data.reshape(rows, blocks * size)


@pytest.mark.parametrize("format", list(SCALES))
def test_dequantize_is_that_of_gguf_bit_for_bit(format: str) -> None:
    gguf = pytest.importorskip("gguf")
    stored, kind = reference.FORMATS[format], gguf.GGMLQuantizationType[format]
    assert (stored.block, stored.nbytes) == gguf.GGML_QUANT_SIZES[kind] and stored.gguf == kind
    data = random_blocks(format, rows=5, blocks=16)
    expected = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[format])
    actual = reference.dequantize(format, data)
    assert actual.dtype == np.float32 and actual.shape == expected.shape
    assert np.all(np.isfinite(expected)) and np.unique(expected).size > 8
    assert np.array_equal(actual.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("format", ["TQ1_0", "TQ2_0", "MXFP4"])
def test_what_the_quantiser_of_gguf_writes(format: str) -> None:
    """Of the formats without a quantiser in llmcl these have one in the package."""
    gguf = pytest.importorskip("gguf")
    kind = gguf.GGMLQuantizationType[format]
    data = gguf.quants.quantize(normal(20, 8, 1024).astype(np.float32), kind)
    np.testing.assert_array_equal(reference.dequantize(format, data), gguf.quants.dequantize(data, kind))


@pytest.mark.parametrize("name", GRIDS)
def test_every_entry_of_a_grid_is_that_of_gguf(name: str) -> None:
    gguf = pytest.importorskip("gguf")
    grid = getattr(gguf.quants, name)
    grid.init_grid()
    np.testing.assert_array_equal(np.array(grid.grid_map)[sizes_in(name)], grid.grid.reshape(grid.grid_shape))


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("format", ["MXFP4", "NVFP4"])
def test_every_scale_and_number_of_the_4_bit_floats(format: str) -> None:
    gguf = pytest.importorskip("gguf")
    stored, n_scales = reference.FORMATS[format], 1 if format == "MXFP4" else 4
    data = np.tile(np.arange(16, dtype=np.uint8) * 17, (256, stored.nbytes // 16 + 1))[:, : stored.nbytes]
    data[:, :n_scales] = np.arange(256, dtype=np.uint8)[:, None]
    expected = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[format])
    assert np.isinf(expected).any() == (format == "MXFP4") and not np.isnan(expected).any()
    np.testing.assert_array_equal(reference.dequantize(format, data), expected)


def test_dequantize_every_scale_of_the_k_formats() -> None:
    """All 64 values of every 6-bit scale and minimum, each alone: random bytes could miss a mixed-up bit."""
    gguf = pytest.importorskip("gguf")
    bit = np.zeros((96, 144), dtype=np.uint8)
    bit[:, 0:4] = np.array([1.0, 0.5], dtype="<f2").view(np.uint8)
    bit[:, 16:] = 0x21
    bit[np.arange(96), 4 + np.arange(96) // 8] = 1 << (np.arange(96) % 8)
    expected = gguf.quants.dequantize(bit, gguf.GGMLQuantizationType.Q4_K)
    assert np.unique(expected, axis=0).shape[0] == 96
    assert np.array_equal(reference.dequantize("Q4_K", bit), expected)


def test_dequantize_takes_a_view_of_a_file() -> None:
    data = random_blocks("Q4_1", rows=6, blocks=4)
    data.flags.writeable = False
    whole = reference.dequantize("Q4_1", data)
    assert np.array_equal(reference.dequantize("Q4_1", data[1::2]), whole[1::2])


def test_dequantize_refuses_unknown_formats_and_broken_blocks() -> None:
    with pytest.raises(UnsupportedModelError, match=r"Q1_0.*Q6_K"):
        reference.dequantize("Q1_0", np.zeros((1, 18), dtype=np.uint8))
    with pytest.raises(CheckpointError, match=r"35 bytes.*34 bytes of a Q8_0"):
        reference.dequantize("Q8_0", np.zeros((1, 35), dtype=np.uint8))


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 48])
def test_tiles(rows: int) -> None:
    weight = normal(14, rows, 24).astype(np.float32)
    tiles = reference.to_tiles(weight)
    assert tiles.shape == (math.ceil(rows / 16), 24, 16) and tiles.dtype == np.float32
    assert tiles.flags.c_contiguous
    for row in range(tiles.shape[0] * 16):
        expected = weight[row] if row < rows else np.zeros(24)
        assert np.array_equal(tiles[row // 16, :, row % 16], expected)
    assert np.array_equal(reference.from_tiles(tiles, rows), weight)


@pytest.mark.parametrize(("n_heads", "head_dim"), [(1, 32), (3, 64), (4, 80)])
def test_unpermute_rope_rows(n_heads: int, head_dim: int) -> None:
    """Rotating neighbouring pairs with the GGUF rows is rotating half-split pairs with the restored ones."""
    hidden, half = 16, head_dim // 2
    weight = normal(15, n_heads * head_dim, hidden)
    in_file = np.empty_like(weight)
    for head in range(n_heads):
        for i in range(half):
            for side in range(2):
                in_file[head * head_dim + 2 * i + side] = weight[head * head_dim + side * half + i]
    restored = reference.unpermute_rope_rows(in_file, n_heads)
    assert np.array_equal(restored, weight)

    x = normal(16, 5, hidden)
    angle = np.arange(5)[:, None] * (100.0 ** (-np.arange(half) / half))[None, :]
    pairs = (x @ in_file.T).reshape(5, n_heads, half, 2)
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angle)[:, None, :]
    expected = np.concatenate([turned.real, turned.imag], axis=-1)
    projected = reference.linear(x, restored).reshape(5, n_heads, head_dim)
    assert relative_error(reference.rope(projected, np.cos(angle), np.sin(angle)), expected) < FLOAT64
