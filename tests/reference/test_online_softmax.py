"""The NumPy twins of attention and of the merge of its states, against PyTorch."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from helpers import FLOAT64, normal, relative_error, tensor
from numpy.typing import NDArray

from llmcl import reference
from llmcl.errors import UsageError

torch = pytest.importorskip("torch")


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


@pytest.mark.parametrize("n_splits", [1, 3])
def test_sinks(n_splits: int) -> None:
    """As transformers has them: one more score of each head, whose weight is left out of the sum of values."""
    q, k, v = attention_case(5, 20, 3, 32)
    n_heads, kv_len = q.shape[1], k.shape[0]
    sinks = np.linspace(-4.0, 6.0, n_heads)
    keys, values = (tensor(x).repeat_interleave(3, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", tensor(q), keys) / math.sqrt(32)
    seen = torch.arange(kv_len)[None, :] <= 20 + torch.arange(5)[:, None]
    scores = torch.cat([scores.masked_fill(~seen, -torch.inf), tensor(sinks)[:, None, None].expand(-1, 5, 1)], dim=-1)
    expected = torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1)[..., :-1], values).numpy()
    assert relative_error(reference.attention(q, k, v, 20, sinks=sinks), expected) < FLOAT64
    bounds = np.linspace(0, kv_len, n_splits + 1).astype(int)
    states = [reference.attention_partial(q[4], k, v, start, stop) for start, stop in pairwise(bounds)]
    m, total, acc = (np.stack(parts, axis=1) for parts in zip(*states, strict=True))
    assert relative_error(reference.attention_merge(m, total, acc, sinks), expected[4]) < FLOAT64


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
