"""flex_attention against PyTorch's own, on every device, and against float64 where PyTorch has no answer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers import rounded_operands
from parameters import each_value
from torch.nn.attention import flex_attention as torch_flex

from llmcl.attention import and_masks, create_block_mask, flex_attention, masks
from llmcl.errors import UsageError

TOLERANCE = 2e-5  # of float32 accumulation over some hundred keys, in an output of order 1
# What the device would choose, and what runs everywhere.
VARIANTS = [pytest.param(None, id="chosen"), pytest.param("portable", marks=pytest.mark.slow)]

slopes = torch.tensor([2.0 ** -(i + 1) for i in range(8)])
documents = np.repeat(np.arange(40, dtype=np.int32), 40)


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 100)


def same_document(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return documents[q_idx] == documents[kv_idx]


def alibi(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + slopes[h] * (kv_idx - q_idx)


def soft_cap(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return 20 * torch.tanh(score / 20)


CASES: dict[str, tuple[Callable[..., Any] | None, Callable[..., Any] | None]] = {
    "plain": (None, None),
    "causal": (None, causal),
    "window": (None, window),
    "alibi": (alibi, causal),
    "soft cap in a window": (soft_cap, window),
    "documents": (None, same_document),
    "causal documents": (alibi, and_masks(causal, same_document)),
}


def inputs(
    shape: tuple[int, int, int, int, int, int], seed: int = 0, dtype: Any = np.float32
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q [B, Hq, L, D], k and v [B, Hkv, S, D] from (B, Hq, Hkv, L, S, D)."""
    batch, n_q, n_kv, length, n_keys, width = shape
    rng = np.random.default_rng(seed)
    return (
        rng.standard_normal((batch, n_q, length, width)).astype(dtype),
        rng.standard_normal((batch, n_kv, n_keys, width)).astype(dtype),
        rng.standard_normal((batch, n_kv, n_keys, width)).astype(dtype),
    )


def torch_result(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, score_mod: Any, mask_mod: Any
) -> tuple[np.ndarray, np.ndarray]:
    def as_torch(fn: Any) -> Any:  # PyTorch indexes tensors only
        return same_document_torch if fn is same_document else fn

    if mask_mod is CASES["causal documents"][1]:
        mask_mod = torch_flex.and_masks(causal, same_document_torch)
    mask_mod = as_torch(mask_mod)
    block_mask = None
    if mask_mod is not None:
        block_mask = torch_flex.create_block_mask(mask_mod, None, None, q.shape[2], k.shape[2], device="cpu")
    out, lse = torch_flex.flex_attention(
        *(torch.from_numpy(x) for x in (q, k, v)),
        score_mod=score_mod,
        block_mask=block_mask,
        enable_gqa=True,
        return_lse=True,
    )
    return out.numpy(), lse.numpy()


documents_torch = torch.from_numpy(documents)


def same_document_torch(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return documents_torch[q_idx] == documents_torch[kv_idx]


@pytest.mark.parametrize("variant", VARIANTS)
@each_value(
    ("case", CASES),
    ("kv_dtype", ["float32", "float16"]),
    ("shape", [(1, 8, 8, 1, 1, 32), (2, 8, 1, 17, 17, 64), (1, 6, 2, 577, 577, 80), (2, 3, 1, 128, 200, 128)]),
)
def test_equals_pytorch(default_device: Any, shape: Any, kv_dtype: str, case: str, variant: Any) -> None:
    """Keys and values in half precision are rounded on both sides."""
    score_mod, mask_mod = CASES[case]
    q, k, v = inputs(shape)
    k, v = k.astype(kv_dtype), v.astype(kv_dtype)
    block_mask = create_block_mask(mask_mod, None, None, q.shape[2], k.shape[2]) if mask_mod else None
    expected, expected_lse = torch_result(q, k.astype(np.float32), v.astype(np.float32), score_mod, mask_mod)
    out, lse = flex_attention(
        q, k, v, score_mod, block_mask, enable_gqa=True, return_lse=True, device=default_device, variant=variant
    )
    tolerance, of_lse = TOLERANCE, 1e-4
    if kv_dtype == "float16":  # matrix units round queries and weights to half precision too
        tolerance, of_lse = (rounded_operands(default_device, "float16", x, largest=4.0) for x in (tolerance, of_lse))
    assert np.abs(out - expected).max() < tolerance
    assert np.abs(lse - expected_lse).max() < of_lse


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_device(device: Any, variant: Any) -> None:
    q, k, v = inputs((1, 3, 1, 70, 70, 32))
    block_mask = create_block_mask(window, None, None, 70, 70, BLOCK_SIZE=32)
    expected, _ = torch_result(q, k, v, alibi, window)
    out = flex_attention(q, k, v, alibi, block_mask, enable_gqa=True, device=device, variant=variant)
    assert np.abs(out - expected).max() < TOLERANCE


@pytest.mark.parametrize("block_size", [16, 48, 128, (24, 64), (100, 32)])
def test_any_block_size_gives_the_same(default_device: Any, block_size: Any) -> None:
    q, k, v = inputs((1, 2, 2, 300, 300, 64))
    expected, _ = torch_result(q, k, v, None, window)
    block_mask = create_block_mask(window, None, None, 300, 300, BLOCK_SIZE=block_size)
    out = flex_attention(q, k, v, block_mask=block_mask, device=default_device)
    assert np.abs(out - expected).max() < TOLERANCE


def test_masks_that_differ_by_batch_and_head(default_device: Any) -> None:
    def mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & (q_idx - kv_idx < 20 * (h + 1) + 50 * b)

    q, k, v = inputs((2, 3, 3, 200, 200, 32))
    torch_mask = torch_flex.create_block_mask(mod, 2, 3, 200, 200, device="cpu")
    expected = torch_flex.flex_attention(*(torch.from_numpy(x) for x in (q, k, v)), block_mask=torch_mask).numpy()
    out = flex_attention(q, k, v, block_mask=create_block_mask(mod, 2, 3, 200, 200), device=default_device)
    assert np.abs(out - expected).max() < TOLERANCE


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_query_without_keys_gives_zero(default_device: Any, variant: Any) -> None:
    def only_later(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= 40) & (kv_idx <= q_idx)

    q, k, v = inputs((1, 2, 2, 90, 90, 32))
    block_mask = create_block_mask(only_later, None, None, 90, 90, BLOCK_SIZE=32)
    out, lse = flex_attention(q, k, v, block_mask=block_mask, return_lse=True, device=default_device, variant=variant)
    assert (out[:, :, :40] == 0).all() and np.isneginf(lse[:, :, :40]).all()
    assert np.isfinite(lse[:, :, 40:]).all() and np.isfinite(out).all()


def test_large_scores_stay_finite(default_device: Any) -> None:
    q, k, v = inputs((1, 2, 2, 65, 65, 64))
    out = flex_attention(q * 1e4, k, v, device=default_device)
    scores = np.einsum("bhqd,bhkd->bhqk", q.astype(np.float64) * 1e4, k) / math.sqrt(64)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    expected = np.einsum("bhqk,bhkd->bhqd", weights / weights.sum(-1, keepdims=True), v)
    assert np.abs(out - expected).max() < 1e-2  # scores of 1e4 carry an absolute float32 error of 1e-3


@pytest.mark.parametrize("size", [1.0, 10.0, 200.0])
def test_soft_cap_of_small_and_of_large_scores(default_device: Any, size: float) -> None:
    q, k, v = inputs((1, 2, 2, 130, 130, 64))
    out = flex_attention(q * size, k, v, soft_cap, device=default_device)
    scores = 20 * np.tanh(np.einsum("bhqd,bhkd->bhqk", q.astype(np.float64) * size, k) / (20 * math.sqrt(64)))
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    expected = np.einsum("bhqk,bhkd->bhqd", weights / weights.sum(-1, keepdims=True), v)
    assert np.abs(out - expected).max() < 1e-4  # of scores up to 20


def test_half_precision_keys_and_wide_heads(default_device: Any) -> None:
    q, k, v = inputs((1, 4, 2, 50, 50, 256), dtype=np.float16)
    expected, _ = torch_result(*(x.astype(np.float32) for x in (q, k, v)), None, causal)
    block_mask = create_block_mask(causal, None, None, 50, 50)
    options = {"block_mask": block_mask, "enable_gqa": True, "device": default_device}
    exact = flex_attention(q, k, v, **options, out_dtype="float32")
    tolerance = rounded_operands(default_device, "float16", TOLERANCE, largest=4.0)
    assert exact.dtype == np.float32 and np.abs(exact - expected).max() < tolerance
    out = flex_attention(q, k, v, **options)  # as PyTorch: of the query's dtype
    assert out.dtype == np.float16 and np.array_equal(out, exact.astype(np.float16))


def test_float16_results_of_float32_queries(default_device: Any) -> None:
    q, k, v = inputs((1, 2, 2, 50, 50, 64))
    exact = flex_attention(q, k, v, device=default_device)
    out = flex_attention(q, k, v, device=default_device, out_dtype="float16")
    assert out.dtype == np.float16 and np.array_equal(out, exact.astype(np.float16))


def test_scale_and_odd_width(default_device: Any) -> None:
    q, k, v = inputs((1, 2, 2, 20, 20, 40))  # 40 columns are padded to 48
    expected = torch_flex.flex_attention(*(torch.from_numpy(x) for x in (q, k, v)), scale=0.3).numpy()
    assert np.abs(flex_attention(q, k, v, scale=0.3, device=default_device) - expected).max() < TOLERANCE


def test_ready_made_mods_agree_with_those_written_out(default_device: Any) -> None:
    q, k, v = inputs((1, 8, 8, 150, 150, 32))
    for ready, written in ((masks.causal, causal), (masks.sliding_window(100), window)):
        a, b = (
            flex_attention(q, k, v, block_mask=create_block_mask(mod, None, None, 150, 150), device=default_device)
            for mod in (ready, written)
        )
        assert np.array_equal(a, b)


@pytest.mark.parametrize("variant", ["cpu"])  # which takes any of these tiles
def test_kernel_options(default_device: Any, variant: str) -> None:
    q, k, v = inputs((1, 2, 2, 100, 100, 64))
    plain = flex_attention(q, k, v, device=default_device)
    for options in ({"BLOCK_M": 4}, {"BLOCK_N": 64}, {"BLOCK_N": 16, "DV_TILE": 16}):
        out = flex_attention(q, k, v, device=default_device, kernel_options=options, variant=variant)
        assert np.abs(out - plain).max() < TOLERANCE


def test_a_new_length_compiles_nothing(default_device: Any) -> None:
    compiled = []
    for length in (64, 65, 200):
        q, k, v = inputs((1, 2, 2, length, length, 32))
        block_mask = create_block_mask(causal, None, None, length, length)
        flex_attention(q, k, v, soft_cap, block_mask, device=default_device)
        compiled.append(len(default_device.programs))
    assert compiled[0] == compiled[1] == compiled[2]


def test_a_function_of_no_module(default_device: Any) -> None:
    """Code that is executed in a namespace of its own makes functions whose __module__ is None."""
    scope: dict[str, Any] = {}
    exec("def mod(score, b, h, q_idx, kv_idx):\n    return score * 0.5", scope)
    scope["mod"].__module__ = None
    q, k, v = inputs((1, 2, 2, 17, 17, 32))
    out = flex_attention(q, k, v, scope["mod"], device=default_device)
    assert np.abs(out - flex_attention(q, k, v, scale=0.5 / math.sqrt(32), device=default_device)).max() < TOLERANCE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": np.zeros((1, 2, 8, 16), np.float32)}, "do not fit"),
        ({"query": np.zeros((2, 8, 16), np.float32)}, "expected a floating point array"),
        ({"query": np.zeros((1, 2, 8, 32), np.int32)}, "int32"),
        ({"query": np.zeros((1, 4, 8, 32), np.float32)}, "enable_gqa=True"),
        ({"kernel_options": {"BLOCK_X": 1}}, "BLOCK_X"),
        ({"kernel_options": {"BLOCK_N": 24}}, "BLOCK_N is 24"),
        ({"kernel_options": {"DV_TILE": 24}}, "DV_TILE is 24"),
        ({"block_mask": create_block_mask(causal, None, None, 8, 9)}, "create it with these lengths"),
        ({"block_mask": causal}, "expected a BlockMask: create_block_mask makes one of a mask_mod"),
        ({"scale": "small"}, "scale is 'small'; expected a number"),
        ({"scale": [1.0]}, r"scale is \[1.0\]; expected a number"),
        ({"out_dtype": "int8"}, "out_dtype is 'int8'; expected float32, float16, bfloat16 or None"),
        ({"device": "intel"}, r"device is 'intel'; expected an open device: llmcl.Device.open\('intel'\)"),
    ],
)
def test_errors_name_what_is_wrong(default_device: Any, change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = dict.fromkeys(("query", "key", "value"), np.zeros((1, 2, 8, 32), np.float32))
    with pytest.raises(UsageError, match=message):
        flex_attention(**({**arguments, "device": default_device} | change))


@pytest.mark.parametrize("window", [0, "wide"])
def test_a_window_is_a_number_above_0(window: Any) -> None:
    with pytest.raises(UsageError, match=f"window is {window!r}; expected a number above 0"):
        masks.sliding_window(window)


@pytest.mark.parametrize("wrong", [0, 1.5, "3", None, math.nan, math.inf, 10**400, 1 << 40, []])
def test_masks_and_scores_refuse_sizes_that_are_none(wrong: Any) -> None:
    for make in masks.alibi, masks.alibi_slopes, lambda n: masks.neighbourhood(n, 4, 1):
        with pytest.raises(UsageError, match=r"(n_heads|width) is .*; expected a whole number, 1 to"):
            make(wrong)
    with pytest.raises(UsageError, match=r"radius is .*; expected a whole number, 0 to"):
        masks.neighbourhood(4, 4, -1 if wrong == 0 else wrong)
    if wrong not in (1.5, 1 << 40):
        with pytest.raises(UsageError, match=r"cap is .*; expected a number above 0"):
            masks.soft_cap(wrong)
