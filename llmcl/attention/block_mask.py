"""Block masks: which blocks of keys a block of queries sees, wholly or in part; built without an L x L intermediate.

               keys ->
    queries  [ █ █ ░       ]    █ full: every pair is seen, the mask is not evaluated
       |     [ █ █ █ ░     ]    ░ partial: the mask is evaluated for each pair
       v     [ █ █ █ █ ░   ]      empty: the block is never visited

Names and meanings are those of torch.nn.attention.flex_attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcl.attention.block_grid import EMPTY, FULL, PARTIAL, Grid
from llmcl.attention.masks import MaskMod
from llmcl.attention.tracing.graph import Array
from llmcl.attention.tracing.trace import TracedMod, trace_mask_mod
from llmcl.errors import UsageError, shown

Int32Array = NDArray[np.int32]

DEFAULT_BLOCK_SIZE = 128
_MAX_SIZE = (1 << 31) - 1
_MAX_BLOCKS = 1 << 28  # a byte each, plus a few copies


def and_masks(*mask_mods: MaskMod) -> MaskMod:
    """Combines masks: a pair is visible if every mask shows it. Without masks every pair is visible."""
    _check_callables(mask_mods)

    def and_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        result: Any = True
        for mask_mod in mask_mods:
            result = mask_mod(b, h, q_idx, kv_idx) & result
        return result

    return and_mask


def or_masks(*mask_mods: MaskMod) -> MaskMod:
    """Combines masks: a pair is visible if any mask shows it. Without masks no pair is visible."""
    _check_callables(mask_mods)

    def or_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        result: Any = False
        for mask_mod in mask_mods:
            result = mask_mod(b, h, q_idx, kv_idx) | result
        return result

    return or_mask


def _check_callables(mask_mods: Sequence[object]) -> None:
    for mask_mod in mask_mods:
        if not callable(mask_mod):
            raise UsageError(f"a mask_mod is a function of (b, h, q_idx, kv_idx); found {shown(mask_mod)}")


def create_block_mask(
    mask_mod: MaskMod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    BLOCK_SIZE: int | tuple[int, int] = DEFAULT_BLOCK_SIZE,
    *,
    device: object = None,
    _compile: bool = False,
) -> BlockMask:
    """Builds the block mask for `mask_mod(b, h, q_idx, kv_idx) -> bool`.

    B, H: batch size and query heads; None if the mask is the same for all (stored once). BLOCK_SIZE: (rows, columns)
    per block, or an int for both. A block that reaches past Q_LEN or KV_LEN is never full, as in PyTorch. device,
    _compile: accepted for compatibility with PyTorch, without effect; the host builds the mask.

    Raises UsageError for a mask that cannot be traced, an index outside a captured array, and sizes below 1.
    """
    block_size = _block_size(BLOCK_SIZE)
    for name, value in {"B": B, "H": H, "Q_LEN": Q_LEN, "KV_LEN": KV_LEN}.items():
        if value is None and name in ("B", "H"):
            continue
        if not isinstance(value, (int, np.integer)) or not 0 < value <= _MAX_SIZE:
            or_none = " or None" if name in "BH" else ""
            raise UsageError(f"{name} is {shown(value)}; expected an integer above 0{or_none}, at most {_MAX_SIZE}")
    batch, heads, Q_LEN, KV_LEN = int(B or 1), int(H or 1), int(Q_LEN), int(KV_LEN)
    if (blocks := batch * heads * -(-Q_LEN // block_size[0]) * -(-KV_LEN // block_size[1])) > _MAX_BLOCKS:
        raise UsageError(f"the mask has {blocks} blocks, expected at most {_MAX_BLOCKS}; give a larger BLOCK_SIZE")
    traced = trace_mask_mod(mask_mod)
    classes = Grid(traced, batch, heads, Q_LEN, KV_LEN, block_size).classify()
    shape = (batch, heads, *classes.shape[2:])
    partial, full = _to_lists(classes == PARTIAL), _to_lists(classes == FULL)
    return BlockMask(
        seq_lengths=(Q_LEN, KV_LEN),
        kv_num_blocks=_broadcast(partial[0], shape),
        kv_indices=_broadcast(partial[1], shape),
        full_kv_num_blocks=_broadcast(full[0], shape),
        full_kv_indices=_broadcast(full[1], shape),
        BLOCK_SIZE=block_size,
        mask_mod=mask_mod,
        traced=traced,
    )


def check_mod(traced: TracedMod, B: int, H: int, Q_LEN: int, KV_LEN: int) -> None:
    """Raises UsageError if a mod would index a captured array out of bounds, or an integer would leave int32.

    Covers any b < B, h < H, q_idx < Q_LEN, kv_idx < KV_LEN, and any score. Costs about as much as a block mask.
    """
    block_size = (max(DEFAULT_BLOCK_SIZE, -(-Q_LEN // 512)), max(DEFAULT_BLOCK_SIZE, -(-KV_LEN // 512)))
    Grid(traced, B, H, Q_LEN, KV_LEN, block_size).check()


def _block_size(value: int | tuple[int, int]) -> tuple[int, int]:
    pair = value if isinstance(value, (tuple, list)) else (value, value)
    if len(pair) != 2 or not all(isinstance(size, (int, np.integer)) and 0 < size <= _MAX_SIZE for size in pair):
        raise UsageError(f"BLOCK_SIZE is {shown(value)}; expected an integer above 0, or two: for queries and for keys")
    return int(pair[0]), int(pair[1])


def _broadcast(array: Int32Array, shape: tuple[int, ...]) -> Int32Array:
    return np.broadcast_to(array, (*shape[:2], *array.shape[2:]))


def _to_lists(dense: Array) -> tuple[Int32Array, Int32Array]:
    """Returns the number of true columns in each row of bool [B, H, rows, columns], and their indices padded with
    zeros."""
    counts = np.count_nonzero(dense, axis=-1).astype(np.int32)
    indices = np.zeros((*dense.shape[:3], max(1, int(counts.max()))), np.int32)
    for at in np.ndindex(*dense.shape[:2]):
        places = np.flatnonzero(dense[at])
        rows = np.repeat(np.arange(dense.shape[2]), counts[at])
        starts = np.cumsum(counts[at]) - counts[at]
        indices[at][rows, np.arange(len(rows)) - starts[rows]] = places - rows * dense.shape[3]
    return counts, indices


@dataclass(frozen=True)
class BlockMask:
    """The key blocks visible to each query block, in PyTorch's format.

    kv_num_blocks int32 [B, H, n_q_blocks]: number of partial blocks in each block row. kv_indices int32 [B, H,
    n_q_blocks, most]: their column numbers in ascending order, padded with 0. full_kv_*: the same for full blocks.
    `most` is the largest number in any row, at least 1. BLOCK_SIZE is (queries, keys). If the mask doesn't depend on b
    or h, the axis is a broadcast view (stride 0).

    `mask[b, h, q_blocks]`, with ints, slices or lists of block numbers, returns a sub-mask with all axes kept.
    """

    seq_lengths: tuple[int, int]
    kv_num_blocks: Int32Array
    kv_indices: Int32Array
    full_kv_num_blocks: Int32Array
    full_kv_indices: Int32Array
    BLOCK_SIZE: tuple[int, int]
    mask_mod: MaskMod
    traced: TracedMod

    @classmethod
    def from_kv_blocks(
        cls,
        kv_num_blocks: Any,
        kv_indices: Any,
        full_kv_num_blocks: Any = None,
        full_kv_indices: Any = None,
        BLOCK_SIZE: int | tuple[int, int] = DEFAULT_BLOCK_SIZE,
        mask_mod: MaskMod | None = None,
        seq_lengths: tuple[int, int] | None = None,
    ) -> BlockMask:
        """Builds a mask from block lists [B, H, n_q_blocks] and [B, H, n_q_blocks, any], as arrays or torch tensors.

        mask_mod is evaluated in partial blocks; without a mask_mod partial blocks are fully visible. Without
        seq_lengths the mask covers whole blocks, with as many columns as kv_indices. Raises UsageError for inconsistent
        arrays.
        """
        block_size = _block_size(BLOCK_SIZE)
        if (full_kv_num_blocks is None) != (full_kv_indices is None):
            raise UsageError("full_kv_num_blocks and full_kv_indices are given together or not at all")
        num_blocks, indices = np.asarray(kv_num_blocks, np.int32), np.asarray(kv_indices, np.int32)
        full_num = np.zeros_like(num_blocks) if full_kv_num_blocks is None else np.asarray(full_kv_num_blocks, np.int32)
        full = np.zeros((*num_blocks.shape, 1), np.int32) if full_kv_indices is None else full_kv_indices
        full = np.asarray(full, np.int32)
        lengths = seq_lengths or (num_blocks.shape[-1] * block_size[0], indices.shape[-1] * block_size[1])
        n_kv = -(-lengths[1] // block_size[1])
        for name, count, which in (("kv", num_blocks, indices), ("full_kv", full_num, full)):
            if count.ndim != 3 or which.ndim != 4 or which.shape[:3] != count.shape or count.shape != num_blocks.shape:
                raise UsageError(
                    f"{name}_num_blocks has shape {count.shape} and {name}_indices {which.shape}; expected "
                    "[B, H, n_q_blocks] and [B, H, n_q_blocks, n]"
                )
            used = np.arange(which.shape[-1]) < count[..., None]
            if count.min() < 0 or count.max() > which.shape[-1] or np.any(used & ((which < 0) | (which >= n_kv))):
                raise UsageError(f"{name}_indices names key blocks outside 0 to {n_kv - 1}, or fewer than counted")
        if -(-lengths[0] // block_size[0]) != num_blocks.shape[-1]:
            raise UsageError(f"{num_blocks.shape[-1]} rows of {block_size[0]} queries do not make {lengths[0]} queries")
        mod = mask_mod if mask_mod is not None else and_masks()
        return cls(lengths, num_blocks, indices, full_num, full, block_size, mod, trace_mask_mod(mod))

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, Q_LEN, KV_LEN)."""
        b, h, _ = self.kv_num_blocks.shape
        return (b, h, *self.seq_lengths)

    def numel(self) -> int:
        """Pairs of query and key, seen or not."""
        b, h, q, kv = self.shape
        return b * h * q * kv

    def sparsity(self) -> float:
        """Returns the percentage of pairs in blocks that aren't visited, counted like PyTorch.

        Negative if blocks reach far past the lengths.
        """
        visited = int(self.kv_num_blocks.sum(dtype=np.int64)) + int(self.full_kv_num_blocks.sum(dtype=np.int64))
        return 100 * (1 - visited * self.BLOCK_SIZE[0] * self.BLOCK_SIZE[1] / self.numel())

    def to_dense(self) -> Int32Array:
        """Returns int32 [B, H, n_q_blocks, n_kv_blocks]: 1 for a visited block."""
        visited: NDArray[np.bool_] = self.classes() != EMPTY
        return visited.astype(np.int32)

    def classes(self) -> NDArray[np.int8]:
        """int8 [B, H, n_q_blocks, n_kv_blocks]: 0 empty, 1 partial, 2 full."""
        b, h, n_q = self.kv_num_blocks.shape
        heads = [self.classes_of_head(*at) for at in np.ndindex(b, h)]
        return np.stack(heads).reshape(b, h, n_q, -1)

    def classes_of_head(self, b: int, h: int) -> NDArray[np.int8]:
        """Returns one head's classes, [n_q_blocks, n_kv_blocks]."""
        n_kv = -(-self.seq_lengths[1] // self.BLOCK_SIZE[1])
        dense = np.zeros((self.kv_num_blocks.shape[2], n_kv), np.int8)
        for kind, counts, which in (
            (PARTIAL, self.kv_num_blocks[b, h], self.kv_indices[b, h]),
            (FULL, self.full_kv_num_blocks[b, h], self.full_kv_indices[b, h]),
        ):
            row, place = np.nonzero(np.arange(which.shape[-1]) < counts[:, None])
            dense[row, which[row, place]] = kind
        return dense

    def __getitem__(self, index: Any) -> BlockMask:
        """Returns the sub-mask at [b, h, q_blocks]. Its mask_mod counts b, h and q_idx within the sub-mask."""
        items = index if isinstance(index, tuple) else (index,)
        if len(items) > 3:
            raise UsageError(f"a block mask is indexed by [b, h, q_blocks]; found {len(items)} indices")
        items = (*items, *[slice(None)] * (3 - len(items)))
        sizes = self.kv_num_blocks.shape
        chosen = [_numbers(*one) for one in zip(items, sizes, ("b", "h", "q block"), strict=True)]
        part = np.ix_(*chosen)
        is_whole = all(np.array_equal(numbers, np.arange(size)) for numbers, size in zip(chosen, sizes, strict=True))
        mod = self.mask_mod if is_whole else self._part_of_mask(*chosen)
        last_rows = min(self.BLOCK_SIZE[0], self.seq_lengths[0] - int(chosen[2][-1]) * self.BLOCK_SIZE[0])
        return BlockMask(
            ((len(chosen[2]) - 1) * self.BLOCK_SIZE[0] + last_rows, self.seq_lengths[1]),
            self.kv_num_blocks[part],
            self.kv_indices[part],
            self.full_kv_num_blocks[part],
            self.full_kv_indices[part],
            self.BLOCK_SIZE,
            mod,
            self.traced if is_whole else trace_mask_mod(mod),
        )

    def _part_of_mask(self, b_numbers: Array, h_numbers: Array, q_blocks: Array) -> MaskMod:
        """Wraps mask_mod for a sub-mask's numbering.

        The numbers are captured arrays, so all sub-masks with the same shape share their code.
        """
        mask_mod, block_q = self.mask_mod, self.BLOCK_SIZE[0]
        n_q_blocks = self.kv_num_blocks.shape[2]
        if self.seq_lengths[0] % block_q and (q_blocks[:-1] == n_q_blocks - 1).any():
            raise UsageError(
                f"query block {n_q_blocks - 1} is shorter than the others, so it can only be the last of a part"
            )

        def part_of_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return mask_mod(b_numbers[b], h_numbers[h], q_blocks[q_idx // block_q] * block_q + q_idx % block_q, kv_idx)

        return part_of_mask

    def to_string(self, grid_size: int | tuple[int, int] = (20, 20), limit: int = 4) -> str:
        """Draws each head with two characters a block: full blocks █, partial ░, empty blank.

        grid_size: most rows and columns, -1 for no limit. In a larger mask several blocks share a character: ░ unless
        all are full or all empty. limit: number of heads drawn.
        """
        classes = self.classes()
        rows, columns = (grid_size, grid_size) if isinstance(grid_size, int) else grid_size
        drawings = []
        for number, (b, h) in enumerate(np.ndindex(*classes.shape[:2])):
            if number == limit:
                drawings.append(f"... {classes.shape[0] * classes.shape[1]} in all; index the mask or raise limit\n")
                break
            drawings.append(f"({b}, {h})\n{_draw(classes[b, h], rows, columns)}")
        return "\n".join(drawings)

    def __str__(self) -> str:
        return f"BlockMask(shape={self.shape}, sparsity={self.sparsity():.2f}%,\n{self.to_string().rstrip()}\n)"

    def __repr__(self) -> str:
        name = getattr(self.mask_mod, "__name__", None) or self.traced.name
        return (
            f"BlockMask(shape={self.shape}, BLOCK_SIZE={self.BLOCK_SIZE}, sparsity={self.sparsity():.2f}%, "
            f"mask_mod={name})"
        )


def _numbers(item: Any, size: int, name: str) -> NDArray[np.int64]:
    """Converts an int, slice or array to at least one index."""
    if isinstance(item, slice):
        numbers = np.arange(size)[item]
    else:
        numbers = np.atleast_1d(np.asarray(item)).astype(np.int64)
        if np.any((numbers < -size) | (numbers >= size)):
            raise UsageError(f"the {name} index {shown(item)} is out of range; the mask has {size}")
        numbers = numbers % size
    if numbers.size == 0:
        raise UsageError(f"the {name} index {shown(item)} selects nothing of {size}")
    return numbers


def _draw(classes: NDArray[np.int8], rows: int, columns: int) -> str:
    n_q, n_kv = classes.shape
    row_step = 1 if rows < 1 else -(-n_q // rows)
    column_step = 1 if columns < 1 else -(-n_kv // columns)
    lines = []
    for row in range(0, n_q, row_step):
        line = ""
        for column in range(0, n_kv, column_step):
            part = classes[row : row + row_step, column : column + column_step]
            line += 2 * ("█" if (part == FULL).all() else " " if (part == EMPTY).all() else "░")
        lines.append(line)
    return "\n".join(lines) + "\n"
