"""Values of ggml's formats Q2_K, Q3_K, IQ*, TQ* and NVFP4 in NumPy. formats.py has the remaining formats.

Every function takes uint8 [n_blocks, nbytes] and returns float32 [n_blocks, block], bit for bit like the package
`gguf`. kernels/common/stored_blocks.cl and stored_grids.cl decode the same blocks on a device.
"""

from __future__ import annotations

import base64
from functools import cache

import numpy as np
from numpy.typing import NDArray

from llmcl.checkpoint.grids import GRIDS

Float32 = NDArray[np.float32]
Bytes = NDArray[np.uint8]

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
FP4 = np.concatenate([E2M1, -E2M1]) + np.float32(0)  # turns -0 into 0
_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
# Numbers by the size in a grid's entry.
_IQ3_S_SIZES = np.arange(1, 16, 2, dtype=np.float32)
_IQ3_XXS_SIZES = np.array([4, 12, 20, 28, 36, 44, 52, 62], np.float32)
_IQ2_SIZES = np.array([8, 25, 43], np.float32)
_IQ1_NUMBERS = np.array([-1, 0, 1], np.float32)


@cache
def grid_words(name: str) -> NDArray[np.uint16]:
    """Returns a grid's entries, as kernels take them (kernels/common/stored_grids.cl)."""
    return np.frombuffer(base64.b64decode(GRIDS[name]), "<u2")


@cache
def sizes_in(name: str) -> Bytes:
    """Returns a grid's entries as sizes: uint8 [entries, 4 or 8]."""
    bits, count = (3, 4) if name.startswith("IQ3") else (2, 8)
    shifts = bits * np.arange(count, dtype=np.uint16)
    return (grid_words(name)[:, None] >> shifts & ((1 << bits) - 1)).astype(np.uint8)


def float16_at(blocks: Bytes, offset: int) -> Float32:
    """Reads the little-endian float16 at a byte offset in each block: [n_blocks, size] -> float32 [n_blocks, 1]."""
    return np.ascontiguousarray(blocks[:, offset : offset + 2]).view("<f2").astype(np.float32)


def nibbles(packed: Bytes) -> Bytes:
    """Returns all low halves, then all high halves: [..., n] bytes -> [..., 2n] values 0..15."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _words(blocks: Bytes, start: int, end: int, dtype: str) -> NDArray[np.uint32]:
    """Reads little-endian words from bytes start .. end of each block."""
    return np.ascontiguousarray(blocks[:, start:end]).view(dtype).astype(np.uint32)


def _fields(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Splits each word into `count` fields of `bits` bits, the lowest first: [n, words] -> [n, words * count]."""
    fields: np.ndarray = words[:, :, None] >> (bits * np.arange(count)).astype(words.dtype) & ((1 << bits) - 1)
    return fields.reshape(len(words), -1)


def _scaled(step: Float32, numbers: np.ndarray) -> Float32:
    """Multiplies runs of numbers by a step each: [n, runs], [n, columns] -> [n, columns]."""
    runs = numbers.astype(np.float32).reshape(*step.shape, -1)
    return (step[:, :, None] * runs).reshape(numbers.shape)


def _pairs(packed: Bytes) -> Bytes:
    """Returns the bit pairs of 64 bytes in the order of the 256 values: each half has 32 bytes, lowest pairs first."""
    pairs = packed.reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
    return (pairs & np.uint8(3)).reshape(-1, 256)


def q2_k(blocks: Bytes) -> Float32:
    """Decodes 16 bytes of scale and minimum, 64 bytes of bit pairs, float16 d, dmin: d scale q - dmin minimum."""
    scale, minimum = (blocks[:, :16] & 15).astype(np.float32), (blocks[:, :16] >> 4).astype(np.float32)
    values = _scaled(float16_at(blocks, 80) * scale, _pairs(blocks[:, 16:80]))
    return values - np.repeat(float16_at(blocks, 82) * minimum, 16, axis=1)


def q3_k(blocks: Bytes) -> Float32:
    """Decodes 32 bytes of third bits, 64 of bit pairs, 12 of 6-bit scales, float16 d: d (scale - 32) (q - 4)."""
    n = len(blocks)
    third = blocks[:, None, :32] >> np.arange(8, dtype=np.uint8).reshape(1, 8, 1) & 1
    q = (_pairs(blocks[:, 32:96]) | third.reshape(n, 256) << 2).astype(np.int8) - 4
    high = blocks[:, None, 104:108] >> np.array([0, 2, 4, 6], np.uint8).reshape(1, 4, 1) & 3
    scale = (nibbles(blocks[:, 96:104]) | high.reshape(n, 16) << 4).astype(np.float32) - 32
    return _scaled(float16_at(blocks, 108) * scale, q)


def tq1_0(blocks: Bytes) -> Float32:
    """Decodes 48 bytes of five ternary digits, 4 of four, float16 d: d (digit - 1). A byte is a fraction of 256."""
    powers = np.array([1, 3, 9, 27, 81], np.uint8).reshape(1, 5, 1)
    parts = [(blocks[:, 0:32], 5), (blocks[:, 32:48], 5), (blocks[:, 48:52], 4)]
    digits = [(part[:, None] * powers[:, :count]).reshape(len(blocks), -1) for part, count in parts]
    q = (np.concatenate(digits, axis=1).astype(np.uint16) * 3 >> 8).astype(np.float32) - 1
    return _scaled(float16_at(blocks, 52), q)


def tq2_0(blocks: Bytes) -> Float32:
    """Decodes 64 bytes of bit pairs, float16 d: d (q - 1)."""
    return _scaled(float16_at(blocks, 64), _pairs(blocks[:, :64]).astype(np.float32) - 1)


def nvfp4(blocks: Bytes) -> Float32:
    """Decodes 4 scales for 16 values each, 32 bytes of FP4 codes. A scale has 4 exponent bits and 3 mantissa bits; its
    sign bit is ignored, and 127 counts as 0.
    """
    exponent, mantissa = blocks[:, :4] >> 3 & 15, (blocks[:, :4] & 7).astype(np.float32)
    normal = np.ldexp(1 + mantissa / 8, exponent.astype(np.int32) - 7)
    scale = np.where(exponent == 0, mantissa * np.float32(2**-9), normal).astype(np.float32)
    scale[blocks[:, :4] == 127] = 0
    return _scaled(scale, FP4[nibbles(blocks[:, 4:].reshape(-1, 4, 8))].reshape(-1, 64))


def iq4_nl(blocks: Bytes) -> Float32:
    """Decodes float16 d, 16 nibble bytes: d times the number of a code."""
    return _scaled(float16_at(blocks, 0), _IQ4[nibbles(blocks[:, 2:])])


def iq4_xs(blocks: Bytes) -> Float32:
    """Decodes float16 d, upper two bits and lower four bits of 8 scales, 128 nibble bytes: d (scale - 32) number."""
    low, high = _fields(blocks[:, 4:8], 4, 2), _fields(_words(blocks, 2, 4, "<u2"), 2, 8)
    scale = (low | high << 4).astype(np.float32) - 32
    numbers = _IQ4[nibbles(blocks[:, 8:].reshape(-1, 8, 16))].reshape(-1, 256)
    return _scaled(float16_at(blocks, 0) * scale, numbers)


def _signs(bits: np.ndarray) -> Float32:
    """Returns -1 for each bit that is set, else 1: [n, m] bytes -> [n, 8m]."""
    return 1 - 2 * _fields(bits, 1, 8).astype(np.float32)


def _coded_signs(codes: np.ndarray) -> Float32:
    """Returns the 8 signs of each 7-bit code; the number of minus signs is even."""
    parity = _fields(codes, 1, 7).reshape(*codes.shape, 7).sum(axis=2, dtype=codes.dtype) & 1
    return _signs(codes | parity << 7)


def _odd(scale: np.ndarray, unit: float) -> Float32:
    return (2 * scale + 1).astype(np.float32) * np.float32(unit)


def _from_grid(name: str, index: np.ndarray, sizes: Float32) -> Float32:
    numbers: Float32 = sizes[sizes_in(name)[index]]
    return numbers.reshape(len(index), 256)


def iq3_s(blocks: Bytes) -> Float32:
    """Decodes float16 d, 64 index bytes, 8 of ninth bits, 32 sign bytes, 4 of scales s for 32 values: d (2s + 1)."""
    index = blocks[:, 2:66] | _fields(blocks[:, 66:74], 1, 8).astype(np.uint16) << 8
    numbers = _from_grid("IQ3_S", index, _IQ3_S_SIZES) * _signs(blocks[:, 74:106])
    return _scaled(float16_at(blocks, 0) * _odd(_fields(blocks[:, 106:110], 4, 2), 1), numbers)


def iq3_xxs(blocks: Bytes) -> Float32:
    """Decodes float16 d, 64 index bytes, 8 words of four sign codes and a scale s: d (2s + 1) / 4."""
    words = _words(blocks, 66, 98, "<u4")
    numbers = _from_grid("IQ3_XXS", blocks[:, 2:66], _IQ3_XXS_SIZES) * _coded_signs(_fields(words, 7, 4))
    return _scaled(float16_at(blocks, 0) * _odd(words >> 28, 1 / 4), numbers)


def iq2_xxs(blocks: Bytes) -> Float32:
    """Decodes float16 d, 8 times four index bytes and a word of four sign codes and a scale s: d (2s + 1) / 8."""
    words = _words(blocks, 2, 66, "<u4")
    index = _fields(words[:, 0::2], 8, 4)
    numbers = _from_grid("IQ2_XXS", index, _IQ2_SIZES) * _coded_signs(_fields(words[:, 1::2], 7, 4))
    return _scaled(float16_at(blocks, 0) * _odd(words[:, 1::2] >> 28, 1 / 8), numbers)


def iq2_xs(blocks: Bytes) -> Float32:
    """Decodes float16 d, 32 words of index and sign code, 8 bytes of scales s for 16 values: d (2s + 1) / 8."""
    words = _words(blocks, 2, 66, "<u2")
    numbers = _from_grid("IQ2_XS", words & 511, _IQ2_SIZES) * _coded_signs(words >> 9)
    return _scaled(float16_at(blocks, 0) * _odd(_fields(blocks[:, 66:74], 4, 2), 1 / 8), numbers)


def iq2_s(blocks: Bytes) -> Float32:
    """Decodes float16 d, 32 index bytes, 32 sign bytes, 8 of upper index bits, 8 of scales s: d (2s + 1) / 8."""
    index = blocks[:, 2:34] | _fields(blocks[:, 66:74], 2, 4).astype(np.uint16) << 8
    numbers = _from_grid("IQ2_S", index, _IQ2_SIZES) * _signs(blocks[:, 34:66])
    return _scaled(float16_at(blocks, 0) * _odd(_fields(blocks[:, 74:82], 4, 2), 1 / 8), numbers)


def _shifted(index: np.ndarray, is_down: np.ndarray) -> Float32:
    """Returns the numbers of IQ1_*, each run of a grid's entries an eighth up or down. is_down: [n, runs]."""
    numbers = _from_grid("IQ1_S", index, _IQ1_NUMBERS).reshape(*is_down.shape, -1)
    shift = np.where(is_down, np.float32(-0.125), np.float32(0.125))
    return (numbers + shift[:, :, None]).reshape(len(index), 256)


def iq1_s(blocks: Bytes) -> Float32:
    """Decodes float16 d, 32 index bytes, 8 words of upper index bits, scale s and the shift's sign: d (2s + 1)."""
    words = _words(blocks, 34, 50, "<u2")
    index = blocks[:, 2:34] | _fields(words, 3, 4) << 8
    return _scaled(float16_at(blocks, 0) * _odd(words >> 12 & 7, 1), _shifted(index, words >> 15 == 1))


def iq1_m(blocks: Bytes) -> Float32:
    """Decodes 32 index bytes, 16 of upper index bits and shifts' signs, 4 words of scales s and a quarter of d."""
    words = _words(blocks, 48, 56, "<u2")
    quarters = words >> 12 << np.array([0, 4, 8, 12], np.uint32)
    d = np.bitwise_or.reduce(quarters, axis=1).astype("<u2").view("<f2").astype(np.float32)[:, None]
    upper = _fields(blocks[:, 32:48], 4, 2)
    numbers = _shifted(blocks[:, :32] | (upper & 7).astype(np.uint16) << 8, upper >> 3 == 1)
    return _scaled(d * _odd(_fields(words, 3, 4), 1), numbers)
