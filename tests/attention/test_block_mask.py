"""Block masks against a dense evaluation, against PyTorch's, and within their memory."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import flex_attention as flex

import llmcl.attention.functions as F
from llmcl.attention import masks
from llmcl.attention.block_grid import EMPTY, FULL, PARTIAL
from llmcl.attention.block_mask import (
    BlockMask,
    and_masks,
    check_mod,
    create_block_mask,
    or_masks,
)
from llmcl.attention.tracing.trace import trace_mask_mod, trace_score_mod
from llmcl.errors import UsageError


def dense_classes(seen: np.ndarray[Any, Any], block_q: int, block_kv: int) -> np.ndarray[Any, Any]:
    """The class of each block of a dense mask [B, H, Q, KV], padded with False to whole blocks."""
    b, h, q, kv = seen.shape
    padded = np.pad(seen, ((0, 0), (0, 0), (0, -q % block_q), (0, -kv % block_kv)))
    blocks = padded.reshape(b, h, -(-q // block_q), block_q, -(-kv // block_kv), block_kv)
    return np.where(blocks.all((3, 5)), FULL, np.where(blocks.any((3, 5)), PARTIAL, EMPTY))


def dense(mod: Callable[..., Any], B: int, H: int, q_len: int, kv_len: int) -> np.ndarray[Any, Any]:
    """The mask of a function that NumPy's index arrays can go through."""
    b, h = np.arange(B)[:, None, None, None], np.arange(H)[:, None, None]
    with np.errstate(all="ignore"):
        seen = mod(b, h, np.arange(q_len)[:, None], np.arange(kv_len))
    return np.broadcast_to(seen, (B, H, q_len, kv_len)).astype(bool)


# Random masks: an expression is a function of (b, h, q, kv) that takes symbols and NumPy arrays alike.

TABLE = np.random.default_rng(0).integers(-3, 40, 200)
SORTED = np.sort(np.random.default_rng(1).integers(0, 9, 200))
FLOATS = np.random.default_rng(2).standard_normal(200).astype(np.float32)
NAN_FLOATS = np.where(np.arange(200) % 50 == 7, np.nan, FLOATS).astype(np.float32)
PAIRS = np.random.default_rng(3).integers(0, 3, (4, 200))

Expression = Callable[[Any, Any, Any, Any], Any]


def _leaf(index: int) -> Expression:
    return lambda *inputs: inputs[index]


def _number(value: int) -> Expression:
    return lambda *inputs: value + 0 * inputs[2]


def _of_two(function: Callable[[Any, Any], Any]) -> Callable[[tuple[Expression, Expression]], Expression]:
    return lambda pair: lambda *inputs: function(pair[0](*inputs), pair[1](*inputs))


def _of_one(function: Callable[[Any], Any]) -> Callable[[Expression], Expression]:
    return lambda inner: lambda *inputs: function(inner(*inputs))


integer_leaves = st.one_of(
    st.sampled_from([_leaf(2), _leaf(3), _leaf(2), _leaf(3), _leaf(1), _leaf(0)]),
    st.integers(-40, 140).map(_number),
    st.sampled_from([lambda b, h, q, k: TABLE[q], lambda b, h, q, k: SORTED[k], lambda b, h, q, k: PAIRS[h, k]]),
)


def _extend_integers(inner: st.SearchStrategy[Expression]) -> st.SearchStrategy[Expression]:
    two = st.tuples(inner, inner)
    divisors = st.sampled_from([2, 3, 5, 8, 16, 37, -3, -8])
    return st.one_of(
        *(two.map(_of_two(f)) for f in (np.add, np.subtract, np.minimum, np.maximum)),
        two.map(_of_two(lambda a, b: np.clip(a, -500, 500) * np.clip(b, -500, 500))),
        two.map(_of_two(lambda a, b: a & b)),
        two.map(_of_two(lambda a, b: a | b)),
        two.map(_of_two(lambda a, b: a ^ b)),
        two.map(_of_two(lambda a, b: a // b)),
        two.map(_of_two(lambda a, b: a % b)),
        inner.map(_of_one(abs)),
        inner.map(_of_one(lambda a: -a)),
        inner.map(_of_one(lambda a: ~a)),
        inner.map(_of_one(lambda a: a >> 2)),
        inner.map(_of_one(lambda a: np.clip(a, -1000, 1000) << 3)),
        st.tuples(inner, divisors).map(lambda pair: lambda *inputs: pair[0](*inputs) // pair[1]),
        st.tuples(inner, divisors).map(lambda pair: lambda *inputs: pair[0](*inputs) % pair[1]),
        inner.map(_of_one(lambda a: TABLE[np.clip(a, 0, 199)])),
        st.tuples(inner, inner, inner).map(
            lambda three: lambda *inputs: np.where(three[0](*inputs) > three[1](*inputs), three[2](*inputs), 3)
        ),
    )


integers = st.recursive(integer_leaves, _extend_integers, max_leaves=5)
FLOAT32 = np.float32


def _to_float(value: Any) -> Any:
    return value.astype(FLOAT32)


floats = st.one_of(
    integers.map(_of_one(_to_float)),
    st.sampled_from([lambda b, h, q, k: FLOATS[q], lambda b, h, q, k: NAN_FLOATS[k]]),
)
float_trees = st.one_of(
    floats,
    *(
        st.tuples(floats, floats).map(_of_two(f))
        for f in (np.add, np.subtract, np.multiply, np.divide, np.minimum, np.maximum)
    ),
    *(floats.map(_of_one(f)) for f in (np.sqrt, np.floor, np.abs, np.negative, np.log)),
)
COMPARISONS = [np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal]
comparisons = st.one_of(
    *(st.tuples(integers, integers).map(_of_two(f)) for f in COMPARISONS),
    *(st.tuples(float_trees, float_trees).map(_of_two(f)) for f in COMPARISONS),
)
mask_mods = st.recursive(
    comparisons,
    lambda inner: st.one_of(
        *(st.tuples(inner, inner).map(_of_two(f)) for f in (np.bitwise_and, np.bitwise_or, np.bitwise_xor, np.equal)),
        inner.map(_of_one(lambda a: ~a)),
    ),
    max_leaves=4,
)


@settings(max_examples=examples(300), deadline=None)
@given(
    mod=mask_mods,
    lengths=st.tuples(st.integers(1, 200), st.integers(1, 200)),
    block_size=st.sampled_from([1, 7, 16, 32, (16, 64), (48, 8), 128, 500]),
)
def test_random_masks_are_exact(mod: Expression, lengths: tuple[int, int], block_size: Any) -> None:
    def four_arguments(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return mod(b, h, q_idx, kv_idx)

    mask = create_block_mask(four_arguments, 2, 3, *lengths, BLOCK_SIZE=block_size)
    seen = dense(mod, 2, 3, *lengths)
    np.testing.assert_array_equal(mask.classes(), dense_classes(seen, *mask.BLOCK_SIZE))


TORCH_TABLE = torch.tensor(np.sort(np.random.default_rng(4).integers(0, 7, 700)))
BATCH_DOCUMENTS = torch.tensor(np.sort(np.random.default_rng(5).integers(0, 9, (2, 700)), axis=1))


def neighbours(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    width, radius = 24, 3
    return ((q_idx // width - kv_idx // width).abs() <= radius) & ((q_idx % width - kv_idx % width).abs() <= radius)


def prefix(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (kv_idx < 100 * (h + 1)) | (q_idx >= kv_idx)


def stride(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx - kv_idx) % 128 == 0


MODS: dict[str, Any] = {
    "causal": masks.causal,
    "window": masks.sliding_window(150),
    "prefix": prefix,
    "document": masks.document(TORCH_TABLE),
    "batch_document": lambda b, h, q, k: BATCH_DOCUMENTS[b, q] == BATCH_DOCUMENTS[b, k],
    "neighbours": neighbours,
    "stride": stride,
    "nothing": lambda b, h, q, k: q < -k - 1,
    "everything": lambda b, h, q, k: q >= 0,
    "documents_causal_window": and_masks(masks.causal, masks.document(TORCH_TABLE), masks.sliding_window(90)),
    "window_or_prefix": or_masks(masks.sliding_window(64), masks.prefix_lm(5), neighbours),
}


def assert_same_rows(count: Any, which: Any, expected_count: Any, expected_which: Any) -> None:
    assert count.dtype == which.dtype == np.int32
    np.testing.assert_array_equal(count, expected_count)
    for row in np.ndindex(count.shape):
        np.testing.assert_array_equal(which[row][: count[row]], expected_which[row][: count[row]])


@pytest.mark.parametrize("lengths", [(512, 512), (577, 640), (1, 700), (300, 129)])
@pytest.mark.parametrize("block_size", [128, (64, 32)])
@pytest.mark.parametrize("name", MODS)
def test_blocks_are_those_of_torch(name: str, block_size: Any, lengths: tuple[int, int]) -> None:
    torch.set_num_threads(1)
    expected = flex.create_block_mask(MODS[name], 2, 3, *lengths, device="cpu", BLOCK_SIZE=block_size)
    mask = create_block_mask(MODS[name], 2, 3, *lengths, BLOCK_SIZE=block_size)
    assert mask.shape == tuple(expected.shape) and mask.BLOCK_SIZE == expected.BLOCK_SIZE
    assert mask.sparsity() == pytest.approx(expected.sparsity())
    assert_same_rows(mask.kv_num_blocks, mask.kv_indices, expected.kv_num_blocks.numpy(), expected.kv_indices.numpy())
    assert_same_rows(
        mask.full_kv_num_blocks,
        mask.full_kv_indices,
        expected.full_kv_num_blocks.numpy(),
        expected.full_kv_indices.numpy(),
    )
    np.testing.assert_array_equal(mask.to_dense(), expected.to_dense().numpy())
    again = BlockMask.from_kv_blocks(
        expected.kv_num_blocks,
        expected.kv_indices,
        expected.full_kv_num_blocks,
        expected.full_kv_indices,
        block_size,
        seq_lengths=lengths,
    )
    np.testing.assert_array_equal(again.classes(), mask.classes())


def test_ready_made_neighbourhood_sees_a_whole_window() -> None:
    width, height, radius = 9, 6, 2
    seen = dense(masks.neighbourhood(width, height, radius), 1, 1, 54, 54)[0, 0]
    assert (seen.sum(1) == 25).all() and seen.diagonal().all()
    assert dense(masks.neighbourhood(4, 3, 3), 1, 1, 12, 12).all()
    mask = create_block_mask(masks.neighbourhood(width, height, radius), None, None, 54, 54, BLOCK_SIZE=8)
    np.testing.assert_array_equal(mask.classes(), dense_classes(seen[None, None], 8, 8))


def test_ready_made_scores() -> None:
    score, q, k = np.float64(3.0), np.arange(5)[:, None], np.arange(5)
    alibi = trace_score_mod(masks.alibi(8)).evaluate(score, 0, 1, q, k)
    np.testing.assert_allclose(alibi, 3.0 + 0.25 * (k - q))
    np.testing.assert_allclose(masks.alibi_slopes(12)[[7, 8, 11]], [2**-8, 2**-0.5, 2**-3.5], rtol=1e-6)
    capped = trace_score_mod(masks.soft_cap(2.0)).evaluate(np.array([0.1, 1e4, -1e4]), 0, 0, 0, 0)
    np.testing.assert_allclose(capped, [2 * np.tanh(0.05), 2, -2])


SORTED_64K = np.sort(np.random.default_rng(0).integers(0, 64, 1 << 16))


@pytest.mark.parametrize(
    "mod",
    [
        masks.causal,
        masks.sliding_window(1024),
        and_masks(masks.causal, masks.document(SORTED_64K)),
        masks.neighbourhood(256, 256, 8),
    ],
    ids=["causal", "window", "document", "neighbourhood"],
)
def test_64k_mask_is_small_and_quick(mod: Any) -> None:
    start = time.process_time()
    mask = create_block_mask(mod, None, None, 1 << 16, 1 << 16)
    assert time.process_time() - start < 2
    tracemalloc.start()
    create_block_mask(mod, None, None, 1 << 16, 1 << 16)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 << 20
    assert mask.shape == (1, 1, 1 << 16, 1 << 16)


def test_huge_block_is_evaluated_in_parts() -> None:
    tracemalloc.start()
    mask = create_block_mask(lambda b, h, q, k: q * 5 % 7 * (k % 3) != 60, None, None, 3000, 3000, BLOCK_SIZE=1 << 30)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert mask.classes().tolist() == [[[[PARTIAL]]]]  # all pairs are seen, but the block reaches past the lengths
    whole = create_block_mask(lambda b, h, q, k: q * 5 % 7 * (k % 3) != 60, None, None, 3000, 3000, BLOCK_SIZE=3000)
    assert whole.classes().tolist() == [[[[FULL]]]]
    assert peak < 64 << 20


def test_axes_the_mask_does_not_depend_on_are_stored_once() -> None:
    mask = create_block_mask(prefix, 8, 2, 512, 512)
    assert mask.kv_indices.shape[:2] == (8, 2)
    assert mask.kv_indices.strides[0] == 0 and mask.kv_indices.strides[1] != 0
    assert create_block_mask(masks.causal, None, None, 512, 512).shape == (1, 1, 512, 512)


def test_lists_are_trimmed_to_the_longest_row() -> None:
    mask = create_block_mask(masks.sliding_window(256), None, None, 4096, 4096)
    assert mask.kv_indices.shape == (1, 1, 32, 2) and mask.full_kv_indices.shape == (1, 1, 32, 1)
    assert create_block_mask(MODS["nothing"], None, None, 256, 256).kv_indices.shape == (1, 1, 2, 1)


@pytest.mark.parametrize(
    "index",
    [0, -1, (1, 2), (slice(0, 2), slice(1, 2)), (slice(None), 0, [1, 3]), (0, slice(None), slice(2, 5)), (1, [2, 0])],
)
def test_slices_are_those_of_torch_and_keep_a_mask_mod(index: Any) -> None:
    def mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx + 40 * h - 90 * b >= kv_idx

    mask = create_block_mask(mod, 2, 3, 577, 640)
    expected = flex.create_block_mask(mod, 2, 3, 577, 640, device="cpu")
    torch_index = (
        tuple(torch.tensor(i) if isinstance(i, list) else i for i in index) if isinstance(index, tuple) else index
    )
    part, expected_part = mask[index], expected[torch_index]
    np.testing.assert_array_equal(part.kv_num_blocks, expected_part.kv_num_blocks.numpy())
    np.testing.assert_array_equal(part.full_kv_num_blocks, expected_part.full_kv_num_blocks.numpy())
    # The part's own mask_mod gives the same blocks again.
    rebuilt = create_block_mask(part.mask_mod, *part.shape)
    np.testing.assert_array_equal(rebuilt.classes(), part.classes())


def test_slice_errors() -> None:
    mask = create_block_mask(masks.causal, 2, 2, 300, 300)
    for index, expected in (
        ((2,), "the mask has 2"),
        ((0, 0, 0, 0), "4 indices"),
        ((0, 0, slice(3, 3)), "selects nothing"),
    ):
        with pytest.raises(UsageError, match=expected):
            mask[index]
    with pytest.raises(UsageError, match="can only be the last"):
        mask[0, 0, [2, 0]]
    assert mask[0, 0, [0, 2]].shape == (1, 1, 128 + 44, 300)


def test_drawing() -> None:
    mask = create_block_mask(masks.causal, None, None, 512, 512)
    drawing = "(0, 0)\n░░      \n██░░    \n████░░  \n██████░░\n"
    assert mask.to_string() == drawing
    assert str(mask) == f"BlockMask(shape=(1, 1, 512, 512), sparsity=37.50%,\n{drawing.rstrip()}\n)"
    assert mask.to_string(grid_size=2) == "(0, 0)\n░░  \n██░░\n"
    assert len(create_block_mask(masks.causal, None, None, 8192, 8192).to_string(-1).splitlines()) == 65
    assert "... 6 in all" in create_block_mask(masks.causal, 2, 3, 512, 512).to_string()
    assert repr(mask).startswith("BlockMask(shape=(1, 1, 512, 512), BLOCK_SIZE=(128, 128)")


def test_index_outside_a_captured_array_is_reported_when_the_mask_is_built() -> None:
    documents = np.zeros(1000, np.int32)
    mod = masks.document(documents)
    assert create_block_mask(mod, None, None, 1000, 1000).sparsity() < 0
    with pytest.raises(UsageError, match=r"masks\.py.*`document_ids` of shape \(1000,\).* to 1000 .*0 to 999; make"):
        create_block_mask(mod, None, None, 1001, 1000)
    # Nothing of the result depends on it here, but a kernel would read it all the same.
    with pytest.raises(UsageError, match="`documents`"):
        create_block_mask(lambda b, h, q, k: (q < 0) & (documents[k + 1] == 0), None, None, 8, 1000)
    guarded = create_block_mask(lambda b, h, q, k: documents[F.minimum(k + 1, 999)] == 0, None, None, 8, 5000)
    assert guarded.sparsity() < 100
    # Bounds alone cannot tell that this index stays inside.
    create_block_mask(lambda b, h, q, k: documents[q - q // 2 * 2] == 0, None, None, 2500, 300)


def test_integer_overflow_is_reported_when_the_mask_is_built() -> None:
    mod = lambda b, h, q, k: q * k >= 0  # noqa: E731
    create_block_mask(mod, None, None, 1 << 15, 1 << 16)
    with pytest.raises(UsageError, match="int32"):
        create_block_mask(mod, None, None, 1 << 16, 1 << 16)
    with pytest.raises(UsageError, match="shift by 0 to 31"):
        create_block_mask(lambda b, h, q, k: 1 << k > 3, None, None, 40, 40)


def test_check_mod_covers_scores() -> None:
    bias = np.zeros((3, 100, 90))
    traced = trace_score_mod(lambda score, b, h, q, k: score + bias[h, q, k])
    check_mod(traced, 2, 3, 100, 90)
    for sizes in ((2, 4, 100, 90), (2, 3, 101, 90), (2, 3, 100, 91)):
        with pytest.raises(UsageError, match="`bias` of shape"):
            check_mod(traced, *sizes)
    by_score = trace_score_mod(lambda score, b, h, q, k: F.where(score > 0, bias[h, q, k], score * score))
    check_mod(by_score, 1, 3, 100, 90)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((masks.causal, 0, None, 8, 8), "B is 0; expected an integer above 0 or None"),
        ((masks.causal, None, None, 0, 8), "Q_LEN is 0"),
        ((masks.causal, None, None, 8, None), "KV_LEN is None"),
        ((masks.causal, None, None, 8, 8, (8, 0)), "BLOCK_SIZE is"),
        ((masks.causal, None, None, 8, 8, (8, 8, 8)), "BLOCK_SIZE is"),
        ((masks.causal, None, None, 8, 8, None), "BLOCK_SIZE is None"),
        ((masks.causal, 1 << 40, None, 8, 8), "B is 1099511627776; expected an integer above 0 or None, at most"),
        ((masks.causal, None, None, 10**5000, 8), "Q_LEN is a number of 5001 digits; expected"),
        ((masks.causal, None, None, 1 << 30, 1 << 30), "the mask has 70368744177664 blocks, expected at most"),
        ((10**5000, None, None, 8, 8), "a mask_mod is a function .* found a number of 5001 digits"),
        ((lambda b, h, q, k: q + k, None, None, 8, 8), "returns int32"),
    ],
)
def test_errors(arguments: Any, expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        create_block_mask(*arguments)


def test_sizes_may_be_numpys_or_bools() -> None:
    mask = create_block_mask(masks.causal, True, np.int64(2), np.int64(300), np.uint16(300), [128, np.int32(64)])  # type: ignore[arg-type]
    assert mask.shape == (1, 2, 300, 300) and mask.BLOCK_SIZE == (128, 64)


def test_from_kv_blocks_refuses_lists_that_do_not_fit() -> None:
    count, which = np.array([[[1, 2]]]), np.array([[[[0, 0], [0, 1]]]])
    mask = BlockMask.from_kv_blocks(count, which, mask_mod=masks.causal)
    assert mask.shape == (1, 1, 256, 256) and mask.sparsity() == 25
    bad: list[tuple[Any, ...]] = [(count + 1, which), (count, which + 1), (count[0], which), (count, which, count)]
    for arguments in bad:
        with pytest.raises(UsageError):
            BlockMask.from_kv_blocks(*arguments)


def test_empty_compositions() -> None:
    _, everything = None, trace_mask_mod(and_masks())
    assert everything.evaluate(0, 0, 0, np.arange(3), 0).tolist() == [True] * 3
    assert not trace_mask_mod(or_masks()).evaluate(0, 0, 0, np.arange(3), 0).any()
    with pytest.raises(UsageError, match="found 3"):
        and_masks(masks.causal, 3)  # type: ignore[arg-type]
