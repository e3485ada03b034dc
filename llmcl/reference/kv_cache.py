"""Layouts of keys and values with storage type "q8_0" (kernels/common/kv_cache.cl), and as bfloat16 pairs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmcl.reference.arrays import Array, Float32
from llmcl.reference.storage import quantize_q8_0, round_bfloat16

UInt8 = NDArray[np.uint8]
UInt16 = NDArray[np.uint16]


def pack_keys(keys: Array) -> UInt8:
    """Keys [heads, capacity, head_dim] -> the cache's bytes [heads, capacity/16, head_dim/32, 544]."""
    q, d = quantize_q8_0(keys)
    heads, capacity, head_dim = q.shape
    groups = head_dim // 32
    scales = d.reshape(heads, -1, 16, groups).swapaxes(2, 3)
    numbers = (q.view(np.uint8) ^ 0x80).reshape(heads, -1, 16, groups, 8, 4).transpose(0, 1, 3, 4, 2, 5)
    parts = [np.ascontiguousarray(scales).view(np.uint8), numbers.reshape(heads, capacity // 16, groups, 512)]
    return np.concatenate(parts, axis=3)


def unpack_keys(tiles: UInt8) -> Float32:
    """Inverse of pack_keys."""
    heads, n_tiles, groups, _ = tiles.shape
    d = np.ascontiguousarray(tiles[..., :32]).view(np.float16).swapaxes(2, 3)
    numbers = tiles[..., 32:].reshape(heads, n_tiles, groups, 8, 16, 4).transpose(0, 1, 4, 2, 3, 5)
    q = numbers.reshape(heads, n_tiles, 16, groups, 32).astype(np.float32) - 128.0
    with np.errstate(invalid="ignore"):  # a scale that is not finite
        return (q * d[..., None].astype(np.float32)).reshape(heads, n_tiles * 16, groups * 32)


def pair_cache(keys: Array, values: Array) -> tuple[UInt16, UInt16]:
    """Keys and values [heads, kv_len, head_dim], kv_len a multiple of 16, as bfloat16 pairs (cpu/pair_cache.cl).

    -> keys [heads, kv_len/16, head_dim/2, 16, 2], values [heads, kv_len/2, head_dim, 2], both as bits.
    """
    k, v = ((round_bfloat16(x).view(np.uint32) >> 16).astype(np.uint16) for x in (keys, values))
    heads, kv_len, head_dim = k.shape
    return (
        np.ascontiguousarray(k.reshape(heads, kv_len // 16, 16, head_dim // 2, 2).swapaxes(2, 3)),
        np.ascontiguousarray(v.reshape(heads, kv_len // 2, 2, head_dim).swapaxes(2, 3)),
    )


def pack_values(values: Array) -> UInt8:
    """Values [heads, capacity, head_dim] -> the cache's bytes [heads, capacity/16, 17 head_dim]."""
    q, d = quantize_q8_0(values)
    heads, capacity, head_dim = q.shape
    scales = np.ascontiguousarray(d.reshape(heads, -1, 16, head_dim // 32).swapaxes(2, 3))
    parts = [part.view(np.uint8).reshape(heads, capacity // 16, -1) for part in (scales, q)]
    return np.concatenate(parts, axis=2)


def unpack_values(tiles: UInt8) -> Float32:
    """Inverse of pack_values."""
    heads, n_tiles, size = tiles.shape
    groups = size // 544
    d = np.ascontiguousarray(tiles[..., : 32 * groups]).view(np.float16).reshape(heads, n_tiles, groups, 16)
    q = np.ascontiguousarray(tiles[..., 32 * groups :]).view(np.int8).reshape(heads, n_tiles, 16, groups, 32)
    with np.errstate(invalid="ignore"):  # a scale that is not finite
        values = q.astype(np.float32) * d.swapaxes(2, 3)[..., None].astype(np.float32)
    return values.reshape(heads, n_tiles * 16, groups * 32)
