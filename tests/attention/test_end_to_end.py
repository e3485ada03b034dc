"""From a mask expression to attention on a device, and from a window to a model's prefill, against dense float64."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from llmcl.attention import create_block_mask, flex_attention, masks
from llmcl.errors import UsageError

POSITIONS = {
    "q - k": lambda b, h, q, k: q - k,
    "k": lambda b, h, q, k: k,
    "q": lambda b, h, q, k: q,
    "q + 3 k": lambda b, h, q, k: q + 3 * k,
    "q ^ k": lambda b, h, q, k: q ^ k,
    "(q - k) h": lambda b, h, q, k: (q - k) * (h + 1) + b,
}
comparison = st.builds(
    lambda name, modulus, compare, bound: (name, modulus, compare, bound),
    st.sampled_from(sorted(POSITIONS)),
    st.sampled_from([0, 7, 32]),
    st.sampled_from([operator.lt, operator.ge, operator.eq, operator.ne]),
    st.integers(-20, 80),
)
expression = st.recursive(
    comparison,
    lambda inner: (
        st.tuples(st.sampled_from([operator.and_, operator.or_]), inner, inner) | st.tuples(st.just("not"), inner)
    ),
    max_leaves=4,
)


def as_mod(tree: Any) -> Any:
    """A mask_mod of one such expression."""

    def evaluate(tree: Any, at: tuple[Any, ...]) -> Any:
        if tree[0] == "not":
            return ~evaluate(tree[1], at)
        if len(tree) == 3:
            return tree[0](evaluate(tree[1], at), evaluate(tree[2], at))
        name, modulus, compare, bound = tree
        value = POSITIONS[name](*at)
        return compare(value % modulus if modulus else value, bound)

    def mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return evaluate(tree, (b, h, q_idx, kv_idx))

    return mod


def dense(q: np.ndarray, k: np.ndarray, v: np.ndarray, mod: Any) -> np.ndarray:
    """float64 [B, H, L, D]; queries without keys give 0."""
    b, h, rows, keys = (np.arange(n) for n in (*q.shape[:3], k.shape[2]))
    seen = mod(b[:, None, None, None], h[:, None, None], rows[:, None], keys)
    scores = np.einsum("bhqd,bhkd->bhqk", q.astype(np.float64), k) / np.sqrt(q.shape[3])
    scores = np.where(seen, scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isneginf(top), 0, top))
    total = weights.sum(-1, keepdims=True)
    return np.einsum("bhqk,bhkd->bhqd", weights / np.where(total == 0, 1, total), v)


def arrays(batch: int, heads: int, n_queries: int, n_keys: int, width: int = 32) -> list[np.ndarray]:
    rng = np.random.default_rng(n_queries)
    return [rng.standard_normal((batch, heads, n, width)).astype(np.float32) for n in (n_queries, n_keys, n_keys)]


@settings(max_examples=examples(12), deadline=None, derandomize=True)
@given(tree=expression, block_size=st.sampled_from([32, (16, 64), 128]))
def test_random_masks(default_device: Any, tree: Any, block_size: Any) -> None:
    q, k, v = arrays(2, 2, 65, 90)
    mod = as_mod(tree)
    mask = create_block_mask(mod, 2, 2, 65, 90, BLOCK_SIZE=block_size)
    out = flex_attention(q, k, v, block_mask=mask, device=default_device)
    assert np.abs(out - dense(q, k, v, mod)).max() < 2e-5


@pytest.mark.parametrize("block_size", [(64, 128), (128, 32)])
def test_long_with_blocks_that_differ(default_device: Any, block_size: tuple[int, int]) -> None:
    q, k, v = arrays(1, 2, 1500, 1500, 64)
    mod = masks.sliding_window(300)
    mask = create_block_mask(mod, None, None, 1500, 1500, BLOCK_SIZE=block_size)
    out = flex_attention(q, k, v, block_mask=mask, device=default_device)
    assert np.abs(out - dense(q, k, v, mod)).max() < 2e-5


def test_a_block_mask_for_other_lengths_is_refused(default_device: Any) -> None:
    q, k, v = arrays(1, 2, 65, 90)
    with pytest.raises(UsageError, match="create it with these lengths"):
        flex_attention(q, k, v, block_mask=create_block_mask(masks.causal, None, None, 64, 90), device=default_device)
