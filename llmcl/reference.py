"""The NumPy twin of every op and of the whole model: what the kernels must compute, written to be read.

A twin has the name of its kernel, takes arrays of any float dtype, computes in float64 and returns float64
unless it says otherwise. The engine calls nothing of it but `dequantize`, where NumPy serves; the kernel tests do, and
it is itself tested against PyTorch, transformers and gguf. Clarity comes before speed here.

Shapes: n tokens of one call, k the length of a matrix row, kv_len keys in the cache; heads as in the config.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from llmcl.errors import CheckpointError, UnsupportedModelError, UsageError

if TYPE_CHECKING:
    from llmcl.config import ModelConfig

Array = NDArray[Any]
Float64 = NDArray[np.float64]
Float32 = NDArray[np.float32]
Scalar = float | np.float32

TILE_ROWS = 16


def _wide(x: Array) -> Float64:
    return np.asarray(x, dtype=np.float64)


# ------------------------------------------------------------------------------------------------------------
# The ops of a layer
# ------------------------------------------------------------------------------------------------------------


def embed(table: Array, token_ids: Sequence[int] | Array) -> Float64:
    """Rows of the embedding table: table [vocab, hidden], token_ids int [n] -> [n, hidden]."""
    return _wide(table[np.asarray(token_ids, dtype=np.int64)])


def rms_norm(x: Array, weight: Array, eps: float) -> Float64:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis: x [n, hidden], weight [hidden] -> as x."""
    x = _wide(x)
    normed: Float64 = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    return normed * _wide(weight)


def linear(x: Array, weight: Array) -> Float64:
    """x weight^T: x [n, k], weight [rows, k] (row-major, as checkpoints store it) -> [n, rows]."""
    return _wide(x) @ _wide(weight).T


def geglu(gate: Array, up: Array) -> Float64:
    """gelu(gate) * up with gelu(g) = g (1 + tanh(sqrt(2/pi) (g + 0.044715 g^3))) / 2: gate, up [n, f] -> [n, f]."""
    gate = _wide(gate)
    gelu: Float64 = 0.5 * gate * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (gate + 0.044715 * gate**3)))
    return gelu * _wide(up)


def soft_cap(x: Array, cap: float) -> Float64:
    """cap tanh(x / cap), for an array of any shape."""
    capped: Float64 = cap * np.tanh(_wide(x) / cap)
    return capped


def qkv_adjust(
    qkv: Array, bias: Array | None, head_norms: Array | None, n_q_heads: int, n_kv_heads: int, eps: float
) -> Float64:
    """qkv [n, n_q_heads + 2 n_kv_heads, head_dim] plus bias [heads, head_dim], then its query and key heads normalised.

    head_norms [2, head_dim]: the norm weights of query heads and of key heads.
    """
    qkv = _wide(qkv) if bias is None else _wide(qkv) + _wide(bias)
    if head_norms is None:
        return qkv
    end = n_q_heads + n_kv_heads
    q = rms_norm(qkv[:, :n_q_heads], head_norms[0], eps)
    k = rms_norm(qkv[:, n_q_heads:end], head_norms[1], eps)
    return np.concatenate([q, k, qkv[:, end:]], axis=1)


def swiglu(gate: Array, up: Array) -> Float64:
    """silu(gate) * up with silu(g) = g / (1 + exp(-g)): gate, up [n, f] -> [n, f]."""
    gate = _wide(gate)
    # exp only of negative numbers, so that neither sign overflows.
    decay = np.exp(-np.abs(gate))
    sigmoid = np.where(gate >= 0, 1.0, decay) / (1.0 + decay)
    return gate * sigmoid * _wide(up)


def rope_table(positions: Sequence[int] | Array, inv_freq: Array) -> tuple[Float64, Float64]:
    """(cos, sin) of the rotary angles: positions int [n], inv_freq float32 [half] -> each [n, half].

    half is head_dim/2. The angle is the float32 product of the position and the float32 frequency, as
    transformers computes it: at position 100000 its rounding is worth 4e-3 radians, so a twin with exact
    angles would call a right kernel wrong.
    """
    angle = np.asarray(positions).astype(np.float32)[:, None] * np.asarray(inv_freq, dtype=np.float32)[None, :]
    wide = angle.astype(np.float64)
    return np.cos(wide), np.sin(wide)


def rope(x: Array, cos: Array, sin: Array) -> Float64:
    """Rotate the pairs (i, i + head_dim/2) of every head: x [n, heads, head_dim], cos, sin [n, head_dim/2].

    out[i] = x[i] cos[i] - x[i + half] sin[i]; out[i + half] = x[i + half] cos[i] + x[i] sin[i].
    """
    x = _wide(x)
    half = x.shape[-1] // 2
    low, high = x[..., :half], x[..., half:]
    c, s = _wide(cos)[:, None, :], _wide(sin)[:, None, :]
    return np.concatenate([low * c - high * s, high * c + low * s], axis=-1)


# ------------------------------------------------------------------------------------------------------------
# Attention. The online-softmax state of some keys is (m, l, acc): the largest score, the sum of
# exp(score - m), and the sum of exp(score - m) * value. No keys: m = -inf, l = 0, and acc is never read.
# ------------------------------------------------------------------------------------------------------------


def softmax_state(scores: Array) -> tuple[Float64, Float64]:
    """(m, l) over the last axis: scores [..., keys] -> each [...]. A score of -inf is a key not seen."""
    scores = _wide(scores)
    m = np.max(scores, axis=-1, initial=-np.inf)
    # exp(-inf - -inf) would be NaN: where nothing is seen, subtract 0 from -inf instead.
    return m, np.sum(np.exp(scores - np.where(np.isneginf(m), 0.0, m)[..., None]), axis=-1)


def attention_partial(
    q: Array, k: Array, v: Array, start: int, stop: int, scale: float | None = None, cap: float | None = None
) -> tuple[Float64, Float64, Float64]:
    """The state of one query over the keys start..stop-1.

    q [n_q_heads, head_dim], k, v [kv_len, n_kv_heads, head_dim] -> m, l [n_q_heads], acc as q. scale:
    1/sqrt(head_dim) unless given; cap: soft cap of the scores. Keys outside start..stop-1 are not read.
    """
    n_q_heads, head_dim = q.shape
    n_kv_heads = k.shape[1]
    if scale is None:
        scale = 1.0 / math.sqrt(head_dim)
    keys = _wide(k[start:stop]).transpose(1, 2, 0)  # [n_kv_heads, head_dim, keys]
    values = _wide(v[start:stop]).transpose(1, 0, 2)  # [n_kv_heads, keys, head_dim]
    # Query heads that share a KV head are neighbours: kv_head = q_head // (n_q_heads // n_kv_heads).
    scores = _wide(q).reshape(n_kv_heads, n_q_heads // n_kv_heads, head_dim) @ keys * scale
    if cap is not None:
        scores = soft_cap(scores, cap)
    m, l = softmax_state(scores)  # noqa: E741
    acc = np.exp(scores - np.where(np.isneginf(m), 0.0, m)[..., None]) @ values
    return m.reshape(n_q_heads), l.reshape(n_q_heads), acc.reshape(n_q_heads, head_dim)


def attention_merge(m: Array, l: Array, acc: Array) -> Float64:  # noqa: E741
    """Attention output from the states of disjoint sets of keys.

    m, l [heads, splits], acc [heads, splits, head_dim] -> [heads, head_dim]; zeros for a head without keys.
    The acc of an empty split (l = 0) is not read, so it may hold anything.
    """
    m, total = _wide(m), _wide(l)
    largest = np.max(m, axis=-1, keepdims=True, initial=-np.inf)
    weight = np.exp(m - np.where(np.isneginf(largest), 0.0, largest))  # [heads, splits]
    seen = np.where((total > 0)[..., None], _wide(acc), 0.0)
    denominator = np.sum(weight * total, axis=-1)
    numerator = np.sum(weight[..., None] * seen, axis=-2)
    out: Float64 = numerator / np.where(denominator > 0, denominator, 1.0)[..., None]
    return out


def attention(
    q: Array,
    k: Array,
    v: Array,
    position: int,
    scale: float | None = None,
    *,
    window: int | None = None,
    cap: float | None = None,
) -> Float64:
    """Causal attention: query row i sits at position + i and sees the keys 0..position + i, the last `window` of them.

    q [n, n_q_heads, head_dim], k, v [kv_len, n_kv_heads, head_dim] with kv_len >= position + n -> as q.
    scale: 1/sqrt(head_dim) unless given; cap: soft cap of the scores. A row reads no key past its own
    position: poison there cannot leak.
    """
    n = q.shape[0]
    if k.shape[0] < position + n:
        raise UsageError(f"attention: k has {k.shape[0]} keys, position {position} + {n} queries need {position + n}")
    out = np.empty(q.shape, dtype=np.float64)
    k, v = _wide(k[: position + n]), _wide(v[: position + n])
    for i in range(n):
        first = 0 if window is None else max(0, position + i + 1 - window)
        _, total, acc = attention_partial(q[i], k, v, first, position + i + 1, scale, cap)
        out[i] = acc / total[:, None]
    return out


def attention_decode(q: Array, k: Array, v: Array, position: int, scale: float | None = None) -> Float64:
    """attention() of a single query: q [1, n_q_heads, head_dim] -> [1, n_q_heads, head_dim]."""
    if q.shape[0] != 1:
        raise UsageError(f"attention_decode: q has {q.shape[0]} rows, expected 1")
    return attention(q, k, v, position, scale)


# ------------------------------------------------------------------------------------------------------------
# Storage formats and layouts
# ------------------------------------------------------------------------------------------------------------


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


def round_to(x: Array, dtype: str) -> Float32:
    """The values after storage as "float32", "float16" or "bfloat16", widened to float32."""
    if dtype == "bfloat16":
        return round_bfloat16(x)
    if dtype not in ("float16", "float32"):
        raise UsageError(f"round_to: unknown dtype {dtype!r}; expected float32, float16 or bfloat16")
    with np.errstate(over="ignore"):
        return np.asarray(x).astype(dtype).astype(np.float32)


# Format -> (values in a block, bytes in a block).
BLOCK_SIZES: dict[str, tuple[int, int]] = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q8_0": (32, 34),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}


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
    if format in (
        "Q5_0",
        "Q5_1",
    ):  # as Q4_0 / Q4_1 with 4 bytes before the nibbles: bit i is bit 4 of value i
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
    if format not in BLOCK_SIZES:
        raise UnsupportedModelError(f"tensor format {format!r} is not one of {', '.join(BLOCK_SIZES)}")
    values, size = BLOCK_SIZES[format]
    rows, row_bytes = data.shape
    if row_bytes % size:
        raise CheckpointError(f"rows of {row_bytes} bytes are no multiple of the {size} bytes of a {format} block")
    blocks = np.ascontiguousarray(data).reshape(-1, size)
    return _dequantize_blocks(format, blocks).reshape(rows, row_bytes // size * values)


def to_tiles(weight: Array) -> Array:
    """The device's weight layout: [rows, k] -> [ceil(rows/16), k, 16], tiles[t, j, r] = weight[16 t + r, j].

    16 neighbouring rows are interleaved, so that 16 lanes read 16 consecutive values; missing rows are zero.
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


def unpermute_rope_rows(weight: Array, n_heads: int) -> Array:
    """Rows of a GGUF q or k projection [n_heads * head_dim, k] in Hugging Face's order.

    GGUF files of the llama architecture rotate the pairs (2i, 2i + 1), Hugging Face's (i, i + head_dim/2).
    The conversion writes w.reshape(n_heads, 2, head_dim/2, k).swapaxes(1, 2), that is, within a head,
    gguf[2i + s] = hf[s head_dim/2 + i]; this undoes it. For the k projection n_heads is n_kv_heads.
    """
    rows = weight.shape[0]
    return weight.reshape(n_heads, rows // n_heads // 2, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


# ------------------------------------------------------------------------------------------------------------
# Sampling, without sorting: repetition penalty, then one threshold for top-k, top-p, min-p (in this order),
# then temperature and Gumbel noise: argmax(logit / temperature + gumbel) is distributed as
# softmax(logit / temperature).
# ------------------------------------------------------------------------------------------------------------


def penalize(logits: Array, last_seen: Array, position: int, window: int, penalty: float) -> Float64:
    """The repetition penalty: logits [vocab], last_seen int [vocab] -> [vocab].

    last_seen is a token's latest position, negative if it never occurred. A token with
    position - window < last_seen <= position has its logit divided by penalty if positive, else multiplied.
    """
    logits, last_seen = _wide(logits), np.asarray(last_seen)
    recent = (last_seen >= 0) & (last_seen > position - window) & (last_seen <= position)
    return np.where(recent, np.where(logits > 0, logits / penalty, logits * penalty), logits)


def sample_threshold(logits: Array, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> np.float32:
    """The logit a token must reach to survive: logits [vocab] -> float32 t; a token survives if logit >= t.

    t is the largest of three, each -inf when switched off (top_k = 0 or >= vocab, top_p >= 1, min_p <= 0):
    - t_k: the top_k-th largest logit, so that ties with it survive;
    - t_p: the smallest logit of the shortest prefix, in descending order of those >= t_k, whose share of
      their softmax mass reaches top_p; at least one token, and ties with the last one survive;
    - t_m: max(logits) + log(min_p), that is probability >= min_p * largest probability.
    With min_p <= 1 the largest logit always survives. Logits are rounded to float32 first, as on the device.
    """
    ordered = np.sort(np.asarray(logits).astype(np.float32))[::-1].astype(np.float64)
    largest = ordered[0]
    threshold = -np.inf
    if 0 < top_k < ordered.size:
        threshold = ordered[top_k - 1]
    if top_p < 1.0:
        survivors = ordered[ordered >= threshold]
        mass = np.cumsum(np.exp(survivors - largest))
        threshold = max(threshold, survivors[np.searchsorted(mass, top_p * mass[-1])])
    if min_p > 0.0:
        threshold = max(threshold, largest + math.log(min_p))
    return np.float32(threshold)


def _mix32(x: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """A bijection of 32 bits in which each input bit flips each output bit with probability close to 1/2."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x21F0AAAD)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0xD35A2D97)
    return x ^ (x >> np.uint32(15))


def noise_bits(seed: int, step: int, token_ids: Array) -> NDArray[np.uint32]:
    """32 random bits for each token of a step: token_ids uint32 [n] -> uint32 [n]; the same on any device.

    The same in OpenCL C (32-bit unsigned arithmetic only; the keys are the same for all tokens of a step):

        uint mix32(uint x)
        {
            x = (x ^ (x >> 16)) * 0x21f0aaadu;
            x = (x ^ (x >> 15)) * 0xd35a2d97u;
            return x ^ (x >> 15);
        }

        uint noise_bits(uint seed_lo, uint seed_hi, uint step, uint token_id)
        {
            const uint token_key = mix32(seed_lo + 0x9e3779b9u);
            const uint step_key = mix32(mix32(token_key + seed_hi + 0x85ebca6bu) ^ step);
            return mix32(mix32(token_id ^ token_key) + step_key);
        }

        float noise_uniform(uint seed_lo, uint seed_hi, uint step, uint token_id)
        {
            return ((float)(noise_bits(seed_lo, seed_hi, step, token_id) >> 9) + 0.5f) * 0x1p-23f;
        }

        float noise_gumbel(uint seed_lo, uint seed_hi, uint step, uint token_id)
        {
            return -log(-log(noise_uniform(seed_lo, seed_hi, step, token_id)));
        }

    (`uniform` is a reserved word of OpenCL C.) Two keys, because with one the noise of two steps or seeds
    would be the same sequence in another order whenever their keys are close. mix32's constants come from the
    hash prospector project's search for mixers of two multiplications with the smallest bias.
    """
    bits = seed & 0xFFFFFFFFFFFFFFFF
    # Arrays of one element: NumPy wraps arrays silently and warns about scalars.
    seed_lo, seed_hi, count = (np.array([x & 0xFFFFFFFF], dtype=np.uint32) for x in (bits, bits >> 32, step))
    token_key = _mix32(seed_lo + np.uint32(0x9E3779B9))
    step_key = _mix32(_mix32(token_key + seed_hi + np.uint32(0x85EBCA6B)) ^ count)
    return _mix32(_mix32(np.asarray(token_ids, dtype=np.uint32) ^ token_key) + step_key)


def uniform(seed: int, step: int, token_ids: Array) -> Float32:
    """Numbers in the open interval (0, 1): token_ids uint32 [n] -> float32 [n], (top 23 bits + 0.5) / 2^23.

    Exact in float32. 24 bits and the half would need 25: the largest would round to 1, with infinite noise.
    """
    top = (noise_bits(seed, step, token_ids) >> np.uint32(9)).astype(np.float32)
    return (top + np.float32(0.5)) * np.float32(2.0**-23)


def gumbel(seed: int, step: int, token_ids: Array) -> Float64:
    """Standard Gumbel noise -log(-log(uniform)): token_ids uint32 [n] -> [n], between -2.82 and 16.64."""
    return -np.log(-np.log(_wide(uniform(seed, step, token_ids))))


def sample_scores(logits: Array, temperature: float, threshold: Scalar, seed: int, step: int) -> Float64:
    """What sample() maximises: logits [vocab] -> [vocab], -inf for tokens under the threshold.

    A float32 kernel may pick another token than the twin only if its score is within rounding of the largest.
    """
    logits = _wide(logits)
    if temperature == 0.0:
        scores = logits
    else:
        scores = logits / temperature + gumbel(seed, step, np.arange(logits.size, dtype=np.uint32))
    return np.where(logits >= threshold, scores, -np.inf)


def sample(logits: Array, temperature: float, threshold: Scalar, seed: int, step: int) -> int:
    """The token with the largest logit / temperature + gumbel among logits >= threshold; ties: the lowest id.

    logits [vocab] after penalize(), threshold from sample_threshold(); temperature 0: the largest logit.
    """
    return int(np.argmax(sample_scores(logits, temperature, threshold, seed, step)))


# ------------------------------------------------------------------------------------------------------------
# The model
# ------------------------------------------------------------------------------------------------------------


def forward(
    config: ModelConfig,
    weights: Mapping[str, Array],
    token_ids: Sequence[int] | Array,
    dtype: DTypeLike = np.float64,
    kv_dtype: str | None = None,
) -> Array:
    """Logits of every position: weights by Hugging Face names, token_ids int [n] -> dtype [n, vocab].

    dtype: what the results of the ops are stored as (each op computes in float64 whatever it is). kv_dtype:
    what keys and values are stored as in the cache ("float32", "float16", "bfloat16"; None: as they are), to
    find the error that a reduced cache costs. Reduced weights: round_to() them before.
    """

    def stored(x: Array) -> Array:
        return x.astype(dtype)

    def cached(x: Array) -> Array:
        return x if kv_dtype is None else round_to(x, kv_dtype)

    def norm(x: Array, name: str) -> Array:
        return stored(rms_norm(x, _wide(weights[name]) + config.norm_offset, config.rms_norm_eps))

    def project(x: Array, name: str) -> Array:
        y = linear(x, weights[f"{name}_proj.weight"])
        return stored(y + _wide(weights[f"{name}_proj.bias"]) if f"{name}_proj.bias" in weights else y)

    n, head_dim = len(token_ids), config.head_dim
    gate_up = {"silu": swiglu, "gelu_tanh": geglu}[config.activation]
    mlp_norm = "pre_feedforward" if config.post_norms else "post_attention"
    cos, sin = rope_table(np.arange(n), config.inv_freq())
    hidden = stored(embed(weights["model.embed_tokens.weight"], token_ids) * config.embedding_scale)
    for i in range(config.n_layers):
        layer = f"model.layers.{i}."
        x = norm(hidden, layer + "input_layernorm.weight")
        q, k, v = (project(x, f"{layer}self_attn.{name}").reshape(n, -1, head_dim) for name in "qkv")
        if config.qk_norm:
            q, k = norm(q, layer + "self_attn.q_norm.weight"), norm(k, layer + "self_attn.k_norm.weight")
        q, k = stored(rope(q, cos, sin)), stored(rope(k, cos, sin))
        x = attention(
            q, cached(k), cached(v), 0, config.attention_scale, window=config.window(i), cap=config.attention_soft_cap
        )
        x = stored(x).reshape(n, -1)
        x = linear(x, weights[layer + "self_attn.o_proj.weight"])
        if config.post_norms:
            x = norm(stored(x), layer + "post_attention_layernorm.weight")
        hidden = stored(hidden + x)

        x = norm(hidden, f"{layer}{mlp_norm}_layernorm.weight")
        gate, up = (project(x, f"{layer}mlp.{name}") for name in ("gate", "up"))
        x = linear(stored(gate_up(gate, up)), weights[layer + "mlp.down_proj.weight"])
        if config.post_norms:
            x = norm(stored(x), layer + "post_feedforward_layernorm.weight")
        hidden = stored(hidden + x)

    hidden = norm(hidden, "model.norm.weight")
    head = "model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"
    logits = linear(hidden, weights[head])
    return stored(logits if config.logit_soft_cap is None else soft_cap(logits, config.logit_soft_cap))
