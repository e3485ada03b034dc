"""Storage formats and layouts."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmcl.errors import UsageError, shown
from llmcl.reference.arrays import Array, Float32

TILE_ROWS = 16


def round_bfloat16(x: Array) -> Float32:
    """Each value, as float32, rounded to the nearest bfloat16 (ties to even) and widened to float32 again.

    NaN and infinities stay; a finite value that rounds past the largest bfloat16 becomes infinite (IEEE 754).
    """
    with np.errstate(over="ignore"):
        x32 = np.asarray(x).astype(np.float32)
    bits = x32.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    # The addition would carry the mantissa of a NaN into its exponent or sign.
    return np.where(np.isnan(x32), x32, rounded.astype(np.uint32).view(np.float32))


def quantize_q8_0(x: Array) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """x [..., n], n a multiple of 32 -> q [..., n] and d [..., n/32] with x close to q d: ggml's Q8_0.

    A group with a nonfinite value gets a nonfinite scale.
    """
    groups = np.asarray(x).astype(np.float32).reshape(*x.shape[:-1], -1, 32)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        d = np.abs(groups).max(axis=-1, keepdims=True) / np.float32(127)
        scaled = np.nan_to_num(groups * np.where(d > 0, np.float32(1) / d, np.float32(0)), nan=0.0)
        q = np.trunc(scaled + np.copysign(np.float32(0.5), scaled)).astype(np.int8)  # halves away from zero
        return q.reshape(x.shape), d[..., 0].astype(np.float16)


def round_to(x: Array, dtype: str) -> Float32:
    """Returns the values after storage as "float32", "float16", "bfloat16" or "q8_0", widened to float32."""
    if dtype == "q8_0":
        q, d = quantize_q8_0(x)
        return (q.reshape(*d.shape, 32).astype(np.float32) * d[..., None].astype(np.float32)).reshape(x.shape)
    if dtype == "bfloat16":
        return round_bfloat16(x)
    if dtype not in ("float16", "float32"):
        raise UsageError(f"round_to: unknown dtype {shown(dtype)}; expected float32, float16, bfloat16 or q8_0")
    with np.errstate(over="ignore"):
        return np.asarray(x).astype(dtype).astype(np.float32)


def to_tiles(weight: Array) -> Array:
    """The device's weight layout: [rows, k] -> [ceil(rows/16), k, 16], tiles[t, j, r] = weight[16 t + r, j].

    16 neighbouring rows are interleaved, so 16 lanes read 16 consecutive values; missing rows are zero.
    """
    rows, k = weight.shape
    n_tiles = -(-rows // TILE_ROWS)
    padded = np.zeros((n_tiles * TILE_ROWS, k), dtype=weight.dtype)
    padded[:rows] = weight
    return np.ascontiguousarray(padded.reshape(n_tiles, TILE_ROWS, k).transpose(0, 2, 1))


def from_tiles(tiles: Array, rows: int) -> Array:
    """The inverse of to_tiles: [ceil(rows/16), k, 16] -> [rows, k], without the padding."""
    n_tiles, k, _ = tiles.shape
    return np.ascontiguousarray(tiles.transpose(0, 2, 1).reshape(n_tiles * TILE_ROWS, k)[:rows])


def spread_rotary_rows(weight: Array, n_heads: int, rotary_dim: int) -> Array:
    """Permutes rows of a q or k projection [n_heads * head_dim, k] so that rotary pairs are half a head apart.

    The input has the pairs (i, i + rotary_dim/2) in the first rotary_dim rows of a head; the rest isn't rotated.
    """
    heads = weight.reshape(n_heads, -1, *weight.shape[1:])
    first, second, rest = np.split(heads, [rotary_dim // 2, rotary_dim], axis=1)
    half = rest.shape[1] // 2
    return np.concatenate([first, rest[:, :half], second, rest[:, half:]], axis=1).reshape(weight.shape)


def unpermute_rope_rows(weight: Array, n_heads: int) -> Array:
    """Permutes rows of a GGUF q or k projection [n_heads * head_dim, k] to Hugging Face's order.

    GGUF files with the llama architecture rotate the pairs (2i, 2i + 1), Hugging Face (i, i + head_dim/2). The
    converter writes w.reshape(n_heads, 2, head_dim/2, k).swapaxes(1, 2), so within a head gguf[2i + s] = hf[s
    head_dim/2 + i]; this function undoes the permutation. For the k projection n_heads is n_kv_heads.
    """
    rows = weight.shape[0]
    return weight.reshape(n_heads, rows // n_heads // 2, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
