"""The NumPy twins against implementations that share nothing with them: PyTorch, transformers, gguf.

Deterministic throughout: the random numbers are seeded, so a statistical bound either always holds or never.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from helpers import (
    LLAMA3_SCALING,
    model_configs,
    random_weights,
    relative_error,
    small_config,
    transformers_model,
)
from numpy.typing import NDArray

from llmcl import reference
from llmcl.errors import CheckpointError, UnsupportedModelError, UsageError

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

# Two float64 computations of the same formula in another order.
FLOAT64 = 1e-12


def normal(seed: int, *shape: int) -> NDArray[np.float64]:
    return np.random.default_rng(seed).standard_normal(shape)


def tensor(x: NDArray[Any]) -> Any:
    return torch.from_numpy(np.ascontiguousarray(x))


# ------------------------------------------------------------------------------------------------------------
# The ops of a layer
# ------------------------------------------------------------------------------------------------------------


def test_embed() -> None:
    table = normal(0, 7, 16).astype(np.float32)
    ids = [6, 0, 6, 3]
    expected = torch.nn.functional.embedding(torch.tensor(ids), tensor(table)).numpy()
    actual = reference.embed(table, ids)
    assert actual.dtype == np.float64
    assert np.array_equal(actual, expected)


@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e4])
def test_rms_norm(scale: float) -> None:
    x, weight = normal(1, 5, 48) * scale, normal(2, 48)
    expected = torch.nn.functional.rms_norm(tensor(x), (48,), tensor(weight), 1e-5).numpy()
    assert relative_error(reference.rms_norm(x, weight, 1e-5), expected) < FLOAT64


def test_linear_computes_float32_input_in_float64() -> None:
    x, weight = normal(3, 4, 32).astype(np.float32), normal(4, 21, 32).astype(np.float32)
    expected = torch.nn.functional.linear(tensor(x).double(), tensor(weight).double()).numpy()
    assert relative_error(reference.linear(x, weight), expected) < FLOAT64


def test_swiglu() -> None:
    gate, up = normal(5, 3, 40) * 10, normal(6, 3, 40)
    gate[0, :4] = [0.0, 800.0, -800.0, -40.0]
    expected = (torch.nn.functional.silu(tensor(gate)) * tensor(up)).numpy()
    with np.errstate(all="raise", under="ignore"):
        actual = reference.swiglu(gate, up)
    assert np.allclose(actual, expected, rtol=1e-12, atol=1e-300)


@pytest.mark.parametrize("scaling", [None, LLAMA3_SCALING])
def test_rope_table_and_rope_are_those_of_transformers(scaling: Any) -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    config = small_config(head_dim=32, rope_scaling=scaling, max_position=1 << 17)
    # Far positions tell float32 angles from exact ones: the two differ by 4e-3 there.
    positions = np.array([0, 1, 2, 63, 577, 4099, 99991, 131071])
    rotary = transformers_model(config, random_weights(config, 0)).model.rotary_emb
    x = normal(7, len(positions), 3, 32)
    cos_hf, sin_hf = rotary(tensor(x[None]).float(), torch.from_numpy(positions)[None])
    cos, sin = reference.rope_table(positions, config.inv_freq())
    assert cos.shape == sin.shape == (len(positions), 16)
    assert relative_error(cos, cos_hf[0, :, :16].numpy()) < 2e-7
    assert relative_error(sin, sin_hf[0, :, :16].numpy()) < 2e-7

    wide_cos, wide_sin = (tensor(np.concatenate([t, t], axis=-1)[None]) for t in (cos, sin))
    expected, _ = apply_rotary_pos_emb(tensor(x[None]), tensor(x[None]), wide_cos, wide_sin, unsqueeze_dim=2)
    assert relative_error(reference.rope(x, cos, sin), expected[0].numpy()) < FLOAT64


# ------------------------------------------------------------------------------------------------------------
# Attention
# ------------------------------------------------------------------------------------------------------------


def attention_case(
    n: int, position: int, group: int, head_dim: int, n_kv_heads: int = 2, past: int = 0
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    q = normal(8, n, n_kv_heads * group, head_dim) * 2
    k = normal(9, position + n + past, n_kv_heads, head_dim)
    v = normal(10, position + n + past, n_kv_heads, head_dim)
    return q, k, v


def sdpa(q: Any, k: Any, v: Any, position: int, scale: float | None) -> NDArray[np.float64]:
    """PyTorch's attention in float64, with the causal rule written as a mask."""
    n, kv_len = q.shape[0], position + q.shape[0]
    seen = torch.arange(kv_len)[None, :] <= position + torch.arange(n)[:, None]
    heads_first = [tensor(x).transpose(0, 1)[None] for x in (q, k[:kv_len], v[:kv_len])]
    out = torch.nn.functional.scaled_dot_product_attention(*heads_first, attn_mask=seen, scale=scale, enable_gqa=True)
    result: NDArray[np.float64] = out[0].transpose(0, 1).numpy()
    return result


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize(("n", "position"), [(1, 0), (1, 36), (5, 0), (17, 20)])
@pytest.mark.parametrize(("group", "head_dim"), [(1, 32), (3, 64), (4, 80), (8, 128)])
def test_attention(n: int, position: int, group: int, head_dim: int, scale: float | None) -> None:
    q, k, v = attention_case(n, position, group, head_dim, past=3)
    k[position + n :] = np.nan
    v[position + n :] = np.nan
    expected = sdpa(q, k, v, position, scale)
    assert relative_error(reference.attention(q, k, v, position, scale), expected) < FLOAT64
    if n == 1:
        assert relative_error(reference.attention_decode(q, k, v, position, scale), expected) < FLOAT64


def test_attention_rows_do_not_read_later_keys() -> None:
    q, k, v = attention_case(6, 4, 2, 32)
    clean = reference.attention(q, k, v, 4)
    k[8] = np.nan
    v[8] = np.inf
    poisoned = reference.attention(q, k, v, 4)
    assert np.array_equal(poisoned[:4], clean[:4])
    assert not np.any(np.isfinite(poisoned[4:]))


def test_attention_refuses_a_short_cache_and_several_decode_queries() -> None:
    q, k, v = attention_case(2, 3, 1, 32)
    with pytest.raises(UsageError, match=r"4 keys.*need 5"):
        reference.attention(q, k[:4], v[:4], 3)
    with pytest.raises(UsageError, match="2 rows, expected 1"):
        reference.attention_decode(q, k, v, 3)


@pytest.mark.parametrize("size", [1.0, 2000.0])
def test_attention_merge_of_any_split_is_attention(size: float) -> None:
    q, k, v = attention_case(1, 576, 3, 32)
    q = q * size
    splits = list(pairwise([0, 1, 1, 64, 300, 576, 577, 577]))
    states = [reference.attention_partial(q[0], k, v, a, b) for a, b in splits]
    m, total, acc = (np.stack(part, axis=1) for part in zip(*states, strict=True))
    empty = np.array([a == b for a, b in splits])
    assert np.all(np.isneginf(m[:, empty])) and np.all(total[:, empty] == 0)
    acc[:, empty] = np.nan
    expected = sdpa(q, k, v, 576, None)[0]
    assert relative_error(reference.attention_merge(m, total, acc), expected) < 1e-11


def test_attention_merge_without_any_key_is_zero() -> None:
    m, total, acc = np.full((2, 3), -np.inf), np.zeros((2, 3)), np.full((2, 3, 4), np.nan)
    assert np.array_equal(reference.attention_merge(m, total, acc), np.zeros((2, 4)))


def test_softmax_state() -> None:
    scores = normal(11, 3, 9) * 300
    scores[0, 2:5] = -np.inf
    scores[1] = -np.inf
    m, total = reference.softmax_state(scores)
    expected = torch.logsumexp(tensor(scores), dim=-1).numpy()
    assert np.array_equal(m, scores.max(axis=-1))
    assert total[1] == 0
    assert np.allclose(m[[0, 2]] + np.log(total[[0, 2]]), expected[[0, 2]], rtol=1e-14)
    assert [float(x) for x in reference.softmax_state(np.empty(0))] == [-math.inf, 0.0]


# ------------------------------------------------------------------------------------------------------------
# Storage formats and layouts
# ------------------------------------------------------------------------------------------------------------


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
}


def random_blocks(format: str, rows: int, blocks: int) -> NDArray[np.uint8]:
    """Rows of random blocks with finite scales: uint8 [rows, blocks * block bytes]."""
    rng = np.random.default_rng(13)
    size = reference.BLOCKS[format][1]
    data = rng.integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    if format in ("F32", "BF16"):
        data[..., -1] &= 0xBF  # exponents of 0x3f.. at most: no infinity, no NaN
    for offset in SCALES[format]:
        scale = (rng.standard_normal((rows, blocks)) * 3).astype("<f2")
        data[..., offset : offset + 2] = scale[..., None].view(np.uint8)
    return data.reshape(rows, blocks * size)


@pytest.mark.parametrize("format", list(SCALES))
def test_dequantize_is_that_of_gguf_bit_for_bit(format: str) -> None:
    gguf = pytest.importorskip("gguf")
    assert reference.BLOCKS[format] == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[format]]
    data = random_blocks(format, rows=5, blocks=16)
    expected = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[format])
    actual = reference.dequantize(format, data)
    assert actual.dtype == np.float32 and actual.shape == expected.shape
    assert np.all(np.isfinite(expected)) and np.unique(expected).size > 8
    assert np.array_equal(actual.view(np.uint32), expected.view(np.uint32))


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
    with pytest.raises(UnsupportedModelError, match=r"IQ2_XS.*Q6_K"):
        reference.dequantize("IQ2_XS", np.zeros((1, 74), dtype=np.uint8))
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


# ------------------------------------------------------------------------------------------------------------
# Sampling: penalty and threshold
# ------------------------------------------------------------------------------------------------------------


def test_penalize_is_that_of_transformers() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = normal(17, 50)
    ids = [3, 4, 3, 49, 0, 12]
    last_seen = np.full(50, -1)
    for at, token in enumerate(ids):
        last_seen[token] = at
    processor = RepetitionPenaltyLogitsProcessor(1.3)
    expected = processor(torch.tensor([ids]), torch.from_numpy(logits.copy())[None])[0].numpy()
    actual = reference.penalize(logits, last_seen, position=5, window=64, penalty=1.3)
    assert np.allclose(actual, expected, rtol=1e-14)
    assert np.count_nonzero(actual != logits) == 5


def test_penalize_window_ends() -> None:
    logits = np.array([2.0, 2.0, 2.0, -2.0, 2.0, 2.0, 0.0])
    last_seen = np.array([6, 7, 10, 10, 11, -1, 9])
    actual = reference.penalize(logits, last_seen, position=10, window=4, penalty=2.0)
    assert actual.tolist() == [2.0, 1.0, 1.0, -4.0, 2.0, 2.0, 0.0]
    never = reference.penalize(logits, np.full(7, -1), position=0, window=64, penalty=2.0)
    assert never.tolist() == logits.tolist()


def survivors(logits: NDArray[Any], top_k: int, top_p: float, min_p: float) -> list[int]:
    threshold = reference.sample_threshold(logits, top_k, top_p, min_p)
    assert isinstance(threshold, np.float32)
    return np.flatnonzero(logits >= threshold).tolist()


def sorted_survivors(logits: NDArray[Any], top_k: int, top_p: float, min_p: float) -> list[int]:
    """The chain as it is usually written: sort, cut, renormalise, add up, cut, cut."""
    order = sorted(range(len(logits)), key=lambda i: -float(logits[i]))
    if top_k > 0:
        order = order[:top_k]
    total = sum(math.exp(logits[i]) for i in order)
    if top_p < 1.0:
        mass, kept = 0.0, []
        for i in order:
            kept.append(i)
            mass += math.exp(logits[i]) / total
            if mass >= top_p:
                break
        order = kept
    return sorted(i for i in order if math.exp(logits[i]) >= min_p * math.exp(logits[order[0]]))


def threshold_cases() -> list[tuple[int, float, float]]:
    return [
        (top_k, top_p, min_p)
        for top_k in (0, 1, 2, 7, 40, 60, 1000)
        for top_p in (0.0, 0.1, 0.5, 0.9, 0.999, 1.0)
        for min_p in (0.0, 0.02, 0.2, 1.0)
    ]


def test_sample_threshold_against_sorting() -> None:
    sizes = set()
    for number, case in enumerate(threshold_cases()):
        logits = (normal(100 + number, 60) * (0.3 + number % 5)).astype(np.float32)
        expected = sorted_survivors(logits, *case)
        assert survivors(logits, *case) == expected, case
        sizes.add(len(expected))
    assert len(sizes) > 15


def test_sample_threshold_against_transformers() -> None:
    from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    no_ids = torch.empty((1, 0), dtype=torch.long)
    for number, (top_k, top_p, min_p) in enumerate(threshold_cases()):
        logits = (normal(500 + number, 60) * 2).astype(np.float32)
        scores = torch.from_numpy(logits.astype(np.float64))[None]
        if top_k:
            scores = TopKLogitsWarper(top_k)(no_ids, scores)
        if 0.0 < top_p < 1.0:
            scores = TopPLogitsWarper(top_p)(no_ids, scores)
        if top_p == 0.0:
            scores = TopKLogitsWarper(1)(no_ids, scores)
        if min_p:
            scores = MinPLogitsWarper(min_p)(no_ids, scores)
        expected = np.flatnonzero(np.isfinite(scores[0].numpy())).tolist()
        assert survivors(logits, top_k, top_p, min_p) == expected, (top_k, top_p, min_p)


def test_sample_threshold_ties_and_edges() -> None:
    tied = np.array([1.0, 3.0, 2.0, 3.0, 2.0, 0.0], dtype=np.float32)
    assert survivors(tied, 1, 1.0, 0.0) == [1, 3]
    assert survivors(tied, 3, 1.0, 0.0) == [1, 2, 3, 4]
    assert survivors(tied, 0, 0.01, 0.0) == [1, 3]
    assert survivors(tied, 0, 0.0, 0.0) == [1, 3]
    # Shares of the four survivors of top-k: 0.366, 0.366, 0.134, 0.134.
    assert survivors(tied, 3, 0.73, 0.0) == [1, 3]
    assert survivors(tied, 3, 0.74, 0.0) == [1, 2, 3, 4]
    assert survivors(np.full(9, -7.0, dtype=np.float32), 0, 0.5, 1.0) == list(range(9))
    assert survivors(np.array([-5.0], dtype=np.float32), 3, 0.1, 0.9) == [0]
    masked = np.array([-np.inf, 1.0, -np.inf, 0.0], dtype=np.float32)
    assert survivors(masked, 0, 0.999, 0.0) == [1, 3]
    assert survivors(masked, 2, 1.0, 0.1) == [1, 3]
    assert reference.sample_threshold(tied) == -np.inf
    assert reference.sample_threshold(tied, top_k=6) == -np.inf
    huge = np.array([3e38, -3e38, 2.9e38], dtype=np.float32)
    assert survivors(huge, 0, 0.9, 0.5) == [0]


# ------------------------------------------------------------------------------------------------------------
# Sampling: noise
# ------------------------------------------------------------------------------------------------------------

TOKENS = np.arange(1 << 16, dtype=np.uint32)


def noise_by_integers(seed: int, step: int, token: int) -> int:
    """The definition in reference.noise_bits, in Python integers."""

    def mix32(x: int) -> int:
        x = ((x ^ (x >> 16)) * 0x21F0AAAD) % 2**32
        x = ((x ^ (x >> 15)) * 0xD35A2D97) % 2**32
        return x ^ (x >> 15)

    token_key = mix32((seed % 2**32 + 0x9E3779B9) % 2**32)
    step_key = mix32(mix32((token_key + (seed >> 32) + 0x85EBCA6B) % 2**32) ^ step)
    return mix32((mix32(token ^ token_key) + step_key) % 2**32)


def test_noise_bits_definition() -> None:
    rng = np.random.default_rng(18)
    for _ in range(50):
        seed, step = int(rng.integers(0, 2**63)) * 2 + 1, int(rng.integers(0, 2**32))
        tokens = rng.integers(0, 2**32, 8, dtype=np.uint32)
        expected = [noise_by_integers(seed, step, int(token)) for token in tokens]
        assert reference.noise_bits(seed, step, tokens).tolist() == expected
    # Frozen, so that a seed gives the same text with every version.
    assert reference.noise_bits(0, 0, np.arange(3)).tolist() == [2872785435, 524320811, 3749098571]
    assert reference.noise_bits(0x123456789ABCDEF0, 41, np.array([0, 49151, 128255])).tolist() == [
        1552758473,
        2192267931,
        3297882378,
    ]
    assert np.array_equal(reference.noise_bits(-1, 5, TOKENS), reference.noise_bits(2**64 - 1, 5, TOKENS))


def test_uniform_is_open_and_exact() -> None:
    bits = reference.noise_bits(3, 4, TOKENS)
    u = reference.uniform(3, 4, TOKENS)
    assert u.dtype == np.float32
    assert np.array_equal(u.astype(np.float64), ((bits >> 9).astype(np.float64) + 0.5) / 2**23)
    smallest, largest = (np.float32(top + 0.5) * np.float32(2.0**-23) for top in (0, 2**23 - 1))
    assert smallest > 0.0 and largest < 1.0
    noise = reference.gumbel(3, 4, TOKENS)
    assert np.all((noise > -2.82) & (noise < 16.64))


def bin_deviation(u: NDArray[Any], bins: int) -> float:
    """Chi-square of the counts in equal bins, in standard deviations from its mean."""
    counts = np.bincount((u * bins).astype(np.int64), minlength=bins)
    chi_square = np.sum((counts - u.size / bins) ** 2) / (u.size / bins)
    return float((chi_square - (bins - 1)) / math.sqrt(2 * (bins - 1)))


@pytest.mark.parametrize("seed", [0, 1, 2, 42, 1 << 32, (1 << 64) - 1])
@pytest.mark.parametrize("step", [0, 1, 1000])
def test_uniform_moments_and_bins(seed: int, step: int) -> None:
    u = reference.uniform(seed, step, TOKENS).astype(np.float64)
    assert abs(u.mean() - 0.5) < 4.5 * math.sqrt(1 / 12 / u.size)
    assert abs(u.var() - 1 / 12) < 4.5 * math.sqrt(1 / 180 / u.size)
    assert abs(bin_deviation(u, 256)) < 4.5
    # One token over many steps is the other way through the same numbers.
    over_steps = np.concatenate([reference.uniform(seed, step + i, TOKENS[7:8]) for i in range(2000)])
    assert abs(bin_deviation(over_steps.astype(np.float64), 32)) < 4.5


def test_neighbouring_tokens_steps_and_seeds_are_independent() -> None:
    base = reference.uniform(42, 10, TOKENS).astype(np.float64)
    others = {
        "next token": np.roll(base, 1),
        "token ^ 1": base[TOKENS ^ 1],
        "next step": reference.uniform(42, 11, TOKENS),
        "far step": reference.uniform(42, 10 + 4096, TOKENS),
        "next seed": reference.uniform(43, 10, TOKENS),
        "seed + 2^32": reference.uniform(42 + (1 << 32), 10, TOKENS),
        "step and seed swapped": reference.uniform(10, 42, TOKENS),
    }
    for name, other in others.items():
        correlation = np.corrcoef(base, other)[0, 1]
        assert abs(correlation) < 4.5 / math.sqrt(base.size), name
        # Pairs over a 16 x 16 grid: dependence that a correlation does not see.
        grid = (np.floor(base * 16) * 16 + np.floor(other * 16)) / 256
        assert abs(bin_deviation(grid, 256)) < 6, name


def test_no_two_steps_or_seeds_share_a_sequence() -> None:
    """Not even in another order, as with a single key (noise(token ^ key)) half of these would."""
    sets = [
        reference.noise_bits(seed, step, TOKENS)
        for seed, step in [(0, 0), (0, 1), (0, 2), (0, 255), (1, 0), (2, 0), (1 << 32, 0), (7 << 32, 1)]
    ]
    for i, one in enumerate(sets):
        assert np.unique(one).size > 0.9999 * TOKENS.size - 10
        for other in sets[:i]:
            assert np.intersect1d(one, other).size < 20  # one is what chance gives


@pytest.mark.parametrize("argument", ["seed", "step", "token"])
def test_every_input_bit_flips_every_output_bit_half_the_time(argument: str) -> None:
    rng = np.random.default_rng(19)
    trials = 2000
    for bit in range(64 if argument == "seed" else 32):
        if argument == "token":
            tokens = rng.integers(0, 2**32, trials, dtype=np.uint32)
            flips = reference.noise_bits(5, 6, tokens) ^ reference.noise_bits(5, 6, tokens ^ np.uint32(1 << bit))
        else:
            tokens = TOKENS[:trials]
            one, other = {"seed": ((9 ^ (1 << bit), 6), (9, 6)), "step": ((9, 6 ^ (1 << bit)), (9, 6))}[argument]
            flips = reference.noise_bits(*one, tokens) ^ reference.noise_bits(*other, tokens)
        share = np.mean((flips[:, None] >> np.arange(32, dtype=np.uint32)) & 1, axis=0)
        assert np.all(np.abs(share - 0.5) < 5 * 0.5 / math.sqrt(trials)), bit


# ------------------------------------------------------------------------------------------------------------
# Sampling: tokens
# ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.5, 0, 1.0, 0.0),
        (1.7, 0, 1.0, 0.0),
        (1.0, 8, 1.0, 0.0),
        (0.8, 0, 0.8, 0.0),
        (1.2, 0, 1.0, 0.15),
        (0.9, 20, 0.9, 0.05),
    ],
)
def test_sample_frequencies(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    logits = (normal(20, 40) * 1.5).astype(np.float32)
    kept = sorted_survivors(logits, top_k, top_p, min_p)
    probability = np.zeros(40)
    probability[kept] = np.exp(logits[kept].astype(np.float64) / temperature)
    probability /= probability.sum()

    threshold = reference.sample_threshold(logits, top_k, top_p, min_p)
    steps = 6000
    drawn = [reference.sample(logits, temperature, threshold, seed=2024, step=i) for i in range(steps)]
    counts = np.bincount(drawn, minlength=40)
    assert set(np.flatnonzero(counts)) <= set(kept)
    expected = probability * steps
    # Rare tokens are counted together: chi-square needs five or so of each.
    rare = expected < 8
    groups = [(counts[i], expected[i]) for i in np.flatnonzero(~rare)]
    if expected[rare].sum() > 1:
        groups.append((counts[rare].sum(), expected[rare].sum()))
    freedom = len(groups) - 1
    chi_square = sum((count - mean) ** 2 / mean for count, mean in groups)
    assert freedom >= 3
    assert (chi_square - freedom) / math.sqrt(2 * freedom) < 4


def test_sample_temperature_zero_ties_and_threshold() -> None:
    logits = np.array([0.5, 2.0, -1.0, 2.0], dtype=np.float32)
    assert {reference.sample(logits, 0.0, -np.inf, seed, 0) for seed in range(20)} == {1}
    assert {reference.sample(logits, 1.0, 2.0, seed, 0) for seed in range(40)} == {1, 3}
    assert reference.sample(np.full(5, -np.inf), 0.0, -np.inf, 0, 0) == 0
    # A survivor is drawn even where every other token would win.
    assert reference.sample(np.array([9.0, 1.0, 9.5]), 1.0, 9.5, 0, 0) == 2


def test_sample_is_a_function_of_seed_and_step() -> None:
    logits = normal(21, 200)
    first, again, other = ([reference.sample(logits, 1.0, -np.inf, seed, i) for i in range(60)] for seed in (5, 5, 6))
    assert first == again
    assert sum(a == b for a, b in zip(first, other, strict=True)) < 20


# ------------------------------------------------------------------------------------------------------------
# The model
# ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(model_configs()))
def test_forward_is_transformers(name: str) -> None:
    config = model_configs()[name]
    weights = random_weights(config, seed=22)
    token_ids = np.random.default_rng(23).integers(0, config.vocab_size, 37)
    actual = reference.forward(config, weights, token_ids)
    assert actual.dtype == np.float64 and actual.shape == (37, config.vocab_size)
    # transformers' norms and rotary tables stay in float32 in its float64 model too: hence not 1e-12.
    for dtype, tolerance in (("float64", 1e-6), ("float32", 5e-6)):
        model = transformers_model(config, weights, dtype)
        with torch.no_grad():
            expected = model(torch.from_numpy(token_ids)[None]).logits[0].numpy()
        assert relative_error(actual, expected) < tolerance, dtype


def test_forward_rope_scaling_and_every_weight_matter() -> None:
    """Each part changed alone moves the logits far beyond that tolerance: none can be wrong unseen."""
    config = small_config(rope_scaling=LLAMA3_SCALING)
    weights = random_weights(config, seed=24)
    token_ids = np.random.default_rng(25).integers(0, config.vocab_size, 37)
    logits = reference.forward(config, weights, token_ids)
    unscaled = reference.forward(small_config(), weights, token_ids)
    assert relative_error(unscaled, logits) > 1e-3
    for name in weights:
        changed = weights | {name: weights[name] * np.float32(1.05)}
        assert relative_error(reference.forward(config, changed, token_ids), logits) > 1e-4, name


@pytest.mark.parametrize("kv_dtype", ["float16", "bfloat16"])
def test_forward_with_a_reduced_cache_is_transformers_with_one(kv_dtype: str) -> None:
    from transformers import DynamicCache

    class ReducedCache(DynamicCache):
        def update(self, key_states: Any, value_states: Any, *args: Any, **options: Any) -> Any:
            reduced = getattr(torch, kv_dtype)
            rounded = (x.float().to(reduced).to(x.dtype) for x in (key_states, value_states))
            return super().update(*rounded, *args, **options)

    config = model_configs()["gqa3_dim64_untied"]
    weights = random_weights(config, seed=26)
    token_ids = np.random.default_rng(27).integers(0, config.vocab_size, 37)
    model = transformers_model(config, weights, "float64")
    with torch.no_grad():
        ids = torch.from_numpy(token_ids)[None]
        expected = model(ids, past_key_values=ReducedCache(config=model.config), use_cache=True).logits[0].numpy()
    actual = reference.forward(config, weights, token_ids, kv_dtype=kv_dtype)
    full = reference.forward(config, weights, token_ids)
    cost = relative_error(actual, full)
    # The two differ by 5e-7 before rounding, so one value in a thousand is rounded the other way.
    assert relative_error(actual, expected) < 0.2 * cost
    assert 1e-5 < cost < 2e-2


def test_forward_in_float32_stays_close_to_float64() -> None:
    config = small_config()
    weights = random_weights(config, seed=28)
    token_ids = [1, 5, 130, 77, 5]
    wide = reference.forward(config, weights, token_ids)
    narrow = reference.forward(config, weights, token_ids, dtype=np.float32)
    assert narrow.dtype == np.float32
    assert 0 < relative_error(narrow, wide) < 1e-5


def test_forward_is_causal() -> None:
    config = small_config()
    weights = random_weights(config, seed=29)
    token_ids = [3, 1, 4, 1, 5, 9, 2, 6]
    whole = reference.forward(config, weights, token_ids)
    for n in (1, 3, 7):
        assert relative_error(reference.forward(config, weights, token_ids[:n]), whole[:n]) < FLOAT64
