"""Converts a BlockMask for the kernels: each group of query rows gets the key ranges it sees, wholly or in part.

create_block_mask classified blocks. Inside partial blocks the kernel's smaller tiles are classified again, from bounds
alone. Neighbouring tiles in the same class form a range, so most masks need few ranges per group at any length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmcl.attention.block_grid import BATCH, EMPTY, PARTIAL, UNDECIDED, Boxes, Grid
from llmcl.attention.block_mask import BlockMask
from llmcl.errors import UsageError, counted

Int32Array = NDArray[np.int32]


@dataclass(frozen=True)
class KVBlockRanges:
    """Key ranges per group of query rows, with strides that address a group's record.

    A stride is 0 if all batches, heads or groups share a record.
    """

    ranges: Int32Array  # [...] in the format that kv_block_ranges.cl reads
    batch_records: int  # distance between the records of neighbouring batches
    head_records: int  # distance between the records of neighbouring heads
    group_records: int  # distance between the records of neighbouring row groups
    tiles: NDArray[np.int64]  # [records]: number of key tiles each record visits

    def longest_first(self, n_heads: int, n_groups: int) -> Int32Array:
        """Returns all (group, head) pairs as group n_heads + head, ordered by falling tile count in the first batch. If
        all counts are equal, orders head by head, so a head's keys stay in cache."""
        numbers = np.arange(n_groups * n_heads, dtype=np.int32).reshape(n_groups, n_heads)
        if len(self.tiles) == 1:
            return numbers.T.reshape(-1)
        records = np.arange(n_groups)[:, None] * self.group_records + np.arange(n_heads) * self.head_records
        return numbers.reshape(-1)[np.argsort(-self.tiles[records].reshape(-1), kind="stable")]


def all_keys(n_keys: int) -> KVBlockRanges:
    """Returns a single range over all keys."""
    return KVBlockRanges(np.array([0, n_keys, 0, 0], np.int32), 0, 0, 0, np.ones(1, np.int64))


def kv_block_ranges(mask: BlockMask, block_m: int, block_n: int) -> KVBlockRanges:
    """Returns the ranges for each group of `block_m` query rows, in tiles of `block_n` keys. block_m must divide the
    mask's query block size.

    Raises UsageError if the key block size isn't a multiple of 16.
    """
    if mask.BLOCK_SIZE[1] % 16:
        raise UsageError(f"the block mask has {counted(mask.BLOCK_SIZE[1], 'key')} a block; expected a multiple of 16")
    lists = mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices
    shared = [all(array.strides[axis] == 0 for array in lists) for axis in (0, 1)]
    batches, heads = (1 if same else size for same, size in zip(shared, mask.kv_num_blocks.shape, strict=False))
    n_groups = -(-mask.seq_lengths[0] // block_m)
    groups, ranges = [], []
    for number, (b, h) in enumerate(np.ndindex(batches, heads)):
        for group, of_group in _ranges_of_head(mask, b, h, block_m, block_n):
            groups.append(number * n_groups + group)
            ranges.append(of_group)
    group, kv_range = np.concatenate(groups), np.concatenate(ranges)
    # A record holds the first range, then the count and start of further ranges. A group without visible keys has the
    # range (0, 0).
    counts = np.bincount(group, minlength=batches * heads * n_groups)
    starts = np.cumsum(counts) - counts
    records = np.zeros((len(counts), 4), np.int32)
    some = counts > 0
    records[some, :2] = kv_range[starts[some]]
    records[some, 2], records[some, 3] = counts[some] - 1, 2 * len(counts) + starts[some] + 1
    flat = np.concatenate([records.reshape(-1), kv_range.reshape(-1)])
    tiles = np.zeros(len(counts), np.int64)
    np.add.at(tiles, group, -(-(kv_range[:, 1] - (kv_range[:, 0] & ~1)) // block_n))
    return KVBlockRanges(flat, 0 if batches == 1 else heads * n_groups, 0 if heads == 1 else n_groups, 1, tiles)


def _ranges_of_head(
    mask: BlockMask, b: int, h: int, block_m: int, block_n: int
) -> Iterator[tuple[NDArray[np.int64], Int32Array]]:
    """Yields some groups at a time: group numbers, and for each a range (first key | 1 if partial, end), both
    ascending."""
    (q_len, kv_len), (q_block, kv_block) = mask.seq_lengths, mask.BLOCK_SIZE
    blocks = mask.classes_of_head(b, h)
    in_block = np.arange(0, kv_block, block_n)
    edges = (np.arange(blocks.shape[1])[:, None] * kv_block + in_block).reshape(-1)
    edges = np.append(edges[edges < kv_len], kv_len)
    grid = Grid(mask.traced, b + 1, h + 1, q_len, kv_len, (block_m, block_n))
    step = max(1, BATCH // (q_block // block_m * (len(edges) - 1)))
    for start in range(0, len(blocks), step):
        strip = np.repeat(np.repeat(blocks[start : start + step], q_block // block_m, 0), len(in_block), 1)
        first_group = start * (q_block // block_m)
        strip = strip[: -(-q_len // block_m) - first_group, : len(edges) - 1]
        rows, tiles = np.nonzero(strip == PARTIAL)
        if rows.size:
            q_first = (rows + first_group) * block_m
            boxes = Boxes(q_first, np.minimum(q_first + block_m, q_len) - 1, edges[tiles], edges[tiles + 1] - 1)
            state, unsafe = grid.classes_of(b, h, boxes)
            strip[rows, tiles] = np.where(unsafe | (state == UNDECIDED), PARTIAL, state)
        # An empty tile at both row ends separates a row from its neighbours.
        flat = np.pad(strip, ((0, 0), (1, 1))).reshape(-1)
        changes = np.flatnonzero(flat[1:] != flat[:-1])
        firsts = changes[flat[changes + 1] != EMPTY] + 1
        lasts = changes[flat[changes] != EMPTY]
        width = strip.shape[1] + 2
        first_keys = edges[firsts % width - 1] | (flat[firsts] == PARTIAL)
        yield firsts // width + first_group, np.stack([first_keys, edges[lasts % width]], 1).astype(np.int32)
