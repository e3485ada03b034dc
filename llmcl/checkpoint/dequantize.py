"""Every format of a checkpoint as float32, in NumPy. The twin of the kernels that load weights."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmcl.checkpoint.formats import BLOCKS
from llmcl.errors import CheckpointError, UnsupportedModelError

Float32 = NDArray[np.float32]


def _float16_at(blocks: NDArray[np.uint8], offset: int) -> Float32:
    """The little-endian float16 at a byte offset of each block: [n_blocks, size] -> float32 [n_blocks, 1]."""
    return np.ascontiguousarray(blocks[:, offset : offset + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """All low halves, then all high halves: [..., n] bytes -> [..., 2n] values 0..15."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _k_scales(packed: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """The 6-bit scales and minima of Q4_K and Q5_K: uint8 [n_blocks, 12] -> each [n_blocks, 8].

    Sub-blocks 0..3 have their scale in the low six bits of bytes 0..3 and their minimum in those of bytes
    4..7; for sub-blocks 4..7 the low four bits are the halves of bytes 8..11 (scale low, minimum high), the
    top two bits those of bytes 0..3 (scale) and 4..7 (minimum).
    """
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=1)
    minima = np.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=1)
    return scales, minima


def _dequantize_blocks(format: str, blocks: NDArray[np.uint8]) -> Float32:
    """[n_blocks, bytes in a block] -> float32 [n_blocks, values in a block]; every step rounds to float32."""
    n = blocks.shape[0]
    if format == "F32":
        return blocks.view("<f4")
    if format == "F16":
        return blocks.view("<f2").astype(np.float32)
    if format == "BF16":
        return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)
    if format == "Q8_0":  # float16 d, 32 x int8
        return _float16_at(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)
    if format == "Q4_0":  # float16 d, 16 bytes of nibbles: d (q - 8)
        return _float16_at(blocks, 0) * (_nibbles(blocks[:, 2:]).astype(np.float32) - 8)
    if format == "Q4_1":  # float16 d, float16 m, 16 bytes of nibbles: d q + m
        return _float16_at(blocks, 0) * _nibbles(blocks[:, 4:]).astype(np.float32) + _float16_at(blocks, 2)
    if format in ("Q5_0", "Q5_1"):  # as Q4_0 / Q4_1 with 4 bytes before the nibbles: bit i is bit 4 of value i
        high_at = 2 if format == "Q5_0" else 4
        high = np.unpackbits(blocks[:, high_at : high_at + 4], axis=1, bitorder="little")
        q = (_nibbles(blocks[:, high_at + 4 :]) | (high << 4)).astype(np.float32)
        if format == "Q5_0":
            return _float16_at(blocks, 0) * (q - 16)
        return _float16_at(blocks, 0) * q + _float16_at(blocks, 2)
    if format in ("Q4_K", "Q5_K"):
        # float16 d, float16 dmin, 12 bytes of scales, [Q5_K: 32 bytes of top bits], 128 bytes of nibbles.
        # 8 sub-blocks of 32: d scale q - dmin minimum. 32 bytes of nibbles serve sub-blocks 2c (low) and
        # 2c + 1 (high); bit s of top byte i is bit 4 of value i of sub-block s.
        scales, minima = _k_scales(blocks[:, 4:16])
        q8 = _nibbles(blocks[:, -128:].reshape(n, 4, 32)).reshape(n, 8, 32)
        if format == "Q5_K":
            top = blocks[:, 16:48].reshape(n, 1, 32) >> np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
            q8 |= (top & 1) << 4
        step = (_float16_at(blocks, 0) * scales.astype(np.float32))[:, :, None]
        offset = (_float16_at(blocks, 2) * minima.astype(np.float32))[:, :, None]
        return (step * q8.astype(np.float32) - offset).reshape(n, 256)
    # Q6_K: 128 bytes of low nibbles, 64 bytes of top bit pairs, 16 int8 scales, float16 d; d scale (q - 32).
    # Each half of 128 values: nibbles of 64 bytes (all low, then all high); bit pair j of top byte i belongs
    # to value 32 j + i.
    low = _nibbles(blocks[:, :128].reshape(n, 2, 64)).reshape(n, 2, 4, 32)
    top = blocks[:, 128:192].reshape(n, 2, 1, 32) >> np.array([0, 2, 4, 6], dtype=np.uint8).reshape(1, 1, 4, 1)
    q6 = (low | ((top & 3) << 4)).astype(np.float32).reshape(n, 16, 16) - 32
    step = _float16_at(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return (step[:, :, None] * q6).reshape(n, 256)


def dequantize(format: str, data: NDArray[np.uint8]) -> Float32:
    """The values of stored rows: uint8 [rows, row_bytes] -> float32 [rows, k].

    Bit for bit what ggml defines: each product and sum is rounded to float32, none is contracted to a fused
    multiply-add. Raises UnsupportedModelError for an unknown format, CheckpointError for a broken block.
    """
    if format not in BLOCKS:
        raise UnsupportedModelError(f"tensor format {format!r} is not one of {', '.join(BLOCKS)}")
    values, size = BLOCKS[format]
    rows, row_bytes = data.shape
    if row_bytes % size:
        raise CheckpointError(f"rows of {row_bytes} bytes are no multiple of the {size} bytes of a {format} block")
    blocks = np.ascontiguousarray(data).reshape(-1, size)
    return _dequantize_blocks(format, blocks).reshape(rows, row_bytes // size * values)


def to_float32(rows: np.ndarray, format: str) -> np.ndarray:
    """Stored rows, uint8 [n_rows, row_bytes], as float32 [n_rows, n_values]: what the format defines, bit for bit.

    NumPy, for norms, for quantising anew and for tests; a model's matrices are decoded on the device.
    """
    if format == "F32":
        return rows.view("<f4").astype(np.float32)
    return dequantize(format, rows)
