"""The ranges of keys that kernels get: what they show of each pair is what the mask shows, in few ranges."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llmcl.attention import BlockMask, and_masks, create_block_mask, masks
from llmcl.attention.kv_block_ranges import KVBlockRanges, all_keys, kv_block_ranges
from llmcl.errors import UsageError

RANDOM = np.random.default_rng(0).integers(0, 5, 400).astype(np.int32)
SORTED = np.sort(RANDOM)
MASKS: dict[str, Any] = {
    "causal": masks.causal,
    "window": masks.sliding_window(50),
    "prefix": masks.prefix_lm(70),
    "documents": masks.document(SORTED),
    "causal documents": and_masks(masks.causal, masks.document(SORTED)),
    "unsorted": masks.document(RANDOM),
    "picture": masks.neighbourhood(20, 20, 3),
    "by head": lambda b, h, q, k: (k <= q) & (q - k < 40 * (h + 1)) & (b == 0),
    "nothing": lambda b, h, q, k: k < 0,
}


def ranges_of(ranges: KVBlockRanges, b: int, h: int, group: int) -> list[tuple[int, int, bool]]:
    """First key, end and whether it is partial of each range, as kv_block_ranges.cl reads them."""
    record = b * ranges.batch_records + h * ranges.head_records + group * ranges.group_records
    pairs = ranges.ranges.reshape(-1, 2)
    first, more, at = pairs[2 * record], *map(int, pairs[2 * record + 1])
    return [(int(x) & ~1, int(end), bool(x & 1)) for x, end in [first, *pairs[at : at + more]] if end > 0]


def shown(ranges: KVBlockRanges, seen: np.ndarray, block_m: int) -> np.ndarray:
    """bool [B, H, Q, KV]: the pairs that a kernel shows which asks the mask `seen` in partial ranges."""
    result = np.zeros_like(seen)
    for b, h, q in np.ndindex(*seen.shape[:3]):
        end_before = 0
        for first, end, partial in ranges_of(ranges, b, h, q // block_m):
            assert first % 16 == 0 and end_before <= first < end <= seen.shape[3]
            result[b, h, q, first:end] = seen[b, h, q, first:end] if partial else True
            end_before = end
    return result


@pytest.mark.parametrize(("block_size", "block_m", "block_n"), [(128, 32, 64), ((96, 48), 16, 64), ((40, 80), 8, 16)])
@pytest.mark.parametrize("name", MASKS)
def test_shows_what_the_mask_shows(name: str, block_size: Any, block_m: int, block_n: int) -> None:
    mask = create_block_mask(MASKS[name], 2, 3, 333, 400, block_size)
    b, h = np.arange(2)[:, None, None, None], np.arange(3)[:, None, None]
    seen = np.broadcast_to(MASKS[name](b, h, np.arange(333)[:, None], np.arange(400)), (2, 3, 333, 400))
    ranges = kv_block_ranges(mask, block_m, block_n)
    np.testing.assert_array_equal(shown(ranges, seen, block_m), seen)
    assert (ranges.head_records > 0) == (name == "by head")


def test_runs_are_few_and_end_with_the_tile() -> None:
    causal = kv_block_ranges(create_block_mask(masks.causal, None, None, 512, 512), 32, 64)
    assert ranges_of(causal, 0, 0, 5) == [(0, 128, False), (128, 192, True)]
    assert ranges_of(causal, 0, 0, 0) == [(0, 64, True)]
    window = kv_block_ranges(create_block_mask(masks.sliding_window(200), None, None, 512, 512), 32, 64)
    assert ranges_of(window, 0, 0, 12) == [(128, 256, True), (256, 384, False), (384, 448, True)]
    assert ranges_of(all_keys(77), 1, 2, 3) == [(0, 77, False)]


def test_only_listed_blocks_are_seen() -> None:
    """Lists of a user's own: of the blocks listed as partial what the mask_mod shows, those listed as full wholly."""
    listed = BlockMask.from_kv_blocks([[[1]]], [[[[1, 0, 0]]]], [[[1]]], [[[[2, 0, 0]]]], 64, masks.causal, (64, 192))
    assert ranges_of(kv_block_ranges(listed, 32, 32), 0, 0, 1) == [(128, 192, False)]
    everything = BlockMask.from_kv_blocks([[[2]]], [[[[0, 1, 0]]]], BLOCK_SIZE=64, seq_lengths=(64, 180))
    assert ranges_of(kv_block_ranges(everything, 64, 32), 0, 0, 0) == [(0, 128, False)]


def test_heads_may_have_as_many_blocks_and_others() -> None:
    counts = np.broadcast_to(np.ones(2, np.int32), (1, 2, 2))
    indices = np.array([[[[0], [0]], [[1], [1]]]])
    ranges = kv_block_ranges(BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=64, seq_lengths=(128, 128)), 64, 64)
    assert [ranges_of(ranges, 0, h, 0) for h in (0, 1)] == [[(0, 64, False)], [(64, 128, False)]]


def test_keys_of_a_block_are_whole_tiles() -> None:
    with pytest.raises(UsageError, match="24 keys a block; expected a multiple of 16"):
        kv_block_ranges(create_block_mask(masks.causal, None, None, 64, 64, (32, 24)), 32, 32)


def test_the_blocks_that_visit_most_tiles_come_first() -> None:
    def per_head(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx <= q_idx) & (q_idx - kv_idx < 40 * (h + 1))

    n_heads, length, block_m, block_n = 3, 300, 32, 16
    ranges = kv_block_ranges(
        create_block_mask(per_head, None, n_heads, length, length, BLOCK_SIZE=32), block_m, block_n
    )
    n_groups = -(-length // block_m)
    order = ranges.longest_first(n_heads, n_groups)
    assert sorted(order) == list(range(n_heads * n_groups))
    tiles = []
    for at in order:
        group, head = divmod(int(at), n_heads)
        rows = np.arange(group * block_m, min((group + 1) * block_m, length))[:, None]
        seen = per_head(0, head, rows, np.arange(length)[None, :]).any(0)
        tiles.append(len(np.unique(np.nonzero(seen)[0] // block_n)))
    assert tiles == sorted(tiles, reverse=True) and tiles[0] > tiles[-1]


def test_without_a_mask_heads_follow_each_other() -> None:
    assert all_keys(500).longest_first(2, 3).tolist() == [0, 2, 4, 1, 3, 5]
