"""Number formats in checkpoints, and their values in NumPy: the twin of the kernels that load weights.

Each format is a row in FORMATS. kernels/common/tiles.cl shows the blocks on the device, and
kernels/common/stored_blocks.cl reads stored blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from llmcl.checkpoint import low_bits
from llmcl.checkpoint.low_bits import Bytes, Float32, float16_at, nibbles
from llmcl.errors import CheckpointError, UnsupportedModelError


@dataclass(frozen=True)
class Format:
    """A storage format.

    `values` follows ggml bit for bit: each product and sum is rounded to float32, without fused multiply-adds.
    """

    gguf: int  # type number in GGUF files
    block: int  # values per block; a matrix row is a whole number of blocks
    nbytes: int  # bytes per block
    values: Callable[[Bytes], Float32]  # uint8 [n_blocks, nbytes] -> float32 [n_blocks, block]
    tile_bytes: int = 0  # device bytes for 16 rows by one block; 0 for floats
    grid: str = ""  # name of the lookup grid, if any


def row_bytes(name: str, format: str, n_values: int) -> int:
    """Returns the bytes per row of `n_values` values. Raises CheckpointError, with the tensor name, for a partial
    block.
    """
    stored = FORMATS[format]
    if n_values % stored.block:
        raise CheckpointError(
            f"tensor {name}: rows of {n_values} values are not a whole number of {format} blocks of "
            f"{stored.block}. The file is damaged or badly converted; fetch it again."
        )
    return n_values // stored.block * stored.nbytes


def dequantize(format: str, data: Bytes) -> Float32:
    """Decodes stored rows: uint8 [rows, row_bytes] -> float32 [rows, k].

    Uses NumPy, for norms, requantising and tests. The device decodes a model's matrices.

    Raises UnsupportedModelError for an unknown format, CheckpointError for a broken block.
    """
    if format not in FORMATS:
        raise UnsupportedModelError(f"tensor format {format!r} is not one of {', '.join(FORMATS)}")
    stored = FORMATS[format]
    rows, size = data.shape
    if size % stored.nbytes:
        raise CheckpointError(f"rows of {size} bytes are no multiple of the {stored.nbytes} bytes of a {format} block")
    blocks = np.ascontiguousarray(data).reshape(-1, stored.nbytes)
    return stored.values(blocks).reshape(rows, size // stored.nbytes * stored.block)


def encode_floats(values: Float32, format: str) -> Bytes:
    """Encodes float32 [n, k] in a float format, rounded to nearest, ties to even: uint8 [n, row_bytes]."""
    stored: np.ndarray
    if format == "BF16":
        bits = np.ascontiguousarray(values).view(np.uint32)
        stored = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
    else:
        with np.errstate(over="ignore"):
            stored = values.astype("<f4" if format == "F32" else "<f2")
    return np.ascontiguousarray(stored).view(np.uint8).reshape(len(values), -1)


def _five_bits(blocks: Bytes, at: int) -> Float32:
    """Decodes 4 bytes of high bits (bit i is bit 4 of value i) and 16 nibble bytes from byte `at` on: values 0..31."""
    high = np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little")
    return (nibbles(blocks[:, at + 4 :]) | (high << 4)).astype(np.float32)


def _f32(blocks: Bytes) -> Float32:
    return blocks.view("<f4").astype(np.float32)


def _f16(blocks: Bytes) -> Float32:
    return blocks.view("<f2").astype(np.float32)


def _bf16(blocks: Bytes) -> Float32:
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _q8_0(blocks: Bytes) -> Float32:
    """Decodes float16 d, 32 x int8: d q."""
    return float16_at(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _q4_0(blocks: Bytes) -> Float32:
    """Decodes float16 d, 16 nibble bytes: d (q - 8)."""
    return float16_at(blocks, 0) * (nibbles(blocks[:, 2:]).astype(np.float32) - 8)


def _q4_1(blocks: Bytes) -> Float32:
    """Decodes float16 d, float16 m, 16 nibble bytes: d q + m."""
    return float16_at(blocks, 0) * nibbles(blocks[:, 4:]).astype(np.float32) + float16_at(blocks, 2)


def _q5_0(blocks: Bytes) -> Float32:
    """Decodes Q4_0 with a fifth bit: d (q - 16)."""
    return float16_at(blocks, 0) * (_five_bits(blocks, 2) - 16)


def _q5_1(blocks: Bytes) -> Float32:
    """Decodes Q4_1 with a fifth bit."""
    return float16_at(blocks, 0) * _five_bits(blocks, 4) + float16_at(blocks, 2)


def _k_scales(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Unpacks the 6-bit scales and minima in Q4_K and Q5_K: uint8 [n_blocks, 12] -> each [n_blocks, 8].

    Sub-blocks 0..3: the scale is in the low six bits of bytes 0..3, the minimum in the low six bits of bytes 4..7.
    Sub-blocks 4..7: the low four bits are halves of bytes 8..11 (scale low, minimum high), and the top two bits come
    from the top bits of bytes 0..3 (scale) and 4..7 (minimum).
    """
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=1)
    minima = np.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=1)
    return scales, minima


def _q4_k(blocks: Bytes, high: Bytes | int = 0) -> Float32:
    """Decodes float16 d, float16 dmin, 12 scale bytes, 128 nibble bytes; 8 sub-blocks of 32: d scale q - dmin minimum.

    32 nibble bytes serve sub-blocks 2c (low) and 2c + 1 (high). high: Q5_K's fifth bits, shifted in place.
    """
    n = blocks.shape[0]
    scales, minima = _k_scales(blocks[:, 4:16])
    q = nibbles(blocks[:, -128:].reshape(n, 4, 32)).reshape(n, 8, 32) | high
    step = (float16_at(blocks, 0) * scales.astype(np.float32))[:, :, None]
    offset = (float16_at(blocks, 2) * minima.astype(np.float32))[:, :, None]
    return (step * q.astype(np.float32) - offset).reshape(n, 256)


def _q5_k(blocks: Bytes) -> Float32:
    """Decodes Q4_K with 32 bytes before the nibbles: bit s of byte i is bit 4 of value i in sub-block s."""
    top = blocks[:, 16:48].reshape(-1, 1, 32) >> np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
    return _q4_k(blocks, ((top & 1) << 4).astype(np.uint8))


def _q6_k(blocks: Bytes) -> Float32:
    """Decodes 128 bytes of low nibbles, 64 bytes of top bit pairs, 16 int8 scales, float16 d: d scale (q - 32).

    Each half has 128 values: 64 nibble bytes (all low, then all high); bit pair j of top byte i belongs to value 32 j +
    i.
    """
    n = blocks.shape[0]
    low = nibbles(blocks[:, :128].reshape(n, 2, 64)).reshape(n, 2, 4, 32)
    top = blocks[:, 128:192].reshape(n, 2, 1, 32) >> np.array([0, 2, 4, 6], dtype=np.uint8).reshape(1, 1, 4, 1)
    q = (low | ((top & 3) << 4)).astype(np.float32).reshape(n, 16, 16) - 32
    step = float16_at(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return (step[:, :, None] * q).reshape(n, 256)


def _mxfp4(blocks: Bytes) -> Float32:
    """Decodes a scale s and 16 nibble bytes, each nibble an FP4 code: 2^(s - 127) times its number.

    Products beyond float32 are infinite (s = 255). Source: OCP Microscaling Formats (MX) Specification, 2023.
    """
    half = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)
    with np.errstate(over="ignore"):
        return half * (2 * low_bits.FP4)[nibbles(blocks[:, 1:])]


FORMATS = {
    "F32": Format(0, 1, 4, _f32),
    "F16": Format(1, 1, 2, _f16),
    "BF16": Format(30, 1, 2, _bf16),
    "Q8_0": Format(8, 32, 34, _q8_0, 544),
    "Q4_0": Format(2, 32, 18, _q4_0, 288),
    "Q4_1": Format(3, 32, 20, _q4_1, 320),
    "Q5_0": Format(6, 32, 22, _q5_0, 352),
    "Q5_1": Format(7, 32, 24, _q5_1, 384),
    "Q4_K": Format(12, 256, 144, _q4_k, 64 + 8 * 288),
    "Q5_K": Format(13, 256, 176, _q5_k, 64 + 8 * 352),
    "Q6_K": Format(14, 256, 210, _q6_k, 32 + 8 * 416),
    "MXFP4": Format(39, 32, 17, _mxfp4, 272),
    "NVFP4": Format(40, 64, 36, low_bits.nvfp4, 576),
    "IQ4_NL": Format(20, 32, 18, low_bits.iq4_nl, 288),
    "IQ4_XS": Format(23, 256, 136, low_bits.iq4_xs, 32 + 8 * 272),
    "Q2_K": Format(10, 256, 84, low_bits.q2_k, 64 + 8 * 160),
    "Q3_K": Format(11, 256, 110, low_bits.q3_k, 32 + 8 * 224),
    "IQ3_S": Format(21, 256, 110, low_bits.iq3_s, 32 + 8 * 272, "IQ3_S"),
    "IQ3_XXS": Format(18, 256, 98, low_bits.iq3_xxs, 32 + 8 * 272, "IQ3_XXS"),
    "IQ2_XXS": Format(16, 256, 66, low_bits.iq2_xxs, 32 + 8 * 208, "IQ2_XXS"),
    "IQ2_XS": Format(17, 256, 74, low_bits.iq2_xs, 32 + 8 * 224, "IQ2_XS"),
    "IQ2_S": Format(22, 256, 82, low_bits.iq2_s, 32 + 8 * 224, "IQ2_S"),
    "IQ1_S": Format(19, 256, 50, low_bits.iq1_s, 32 + 8 * 208, "IQ1_S"),
    "IQ1_M": Format(29, 256, 56, low_bits.iq1_m, 32 + 8 * 224, "IQ1_S"),
    "TQ1_0": Format(34, 256, 54, low_bits.tq1_0, 32 + 8 * 144),
    "TQ2_0": Format(35, 256, 66, low_bits.tq2_0, 32 + 8 * 144),
}
FLOAT_FORMATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
