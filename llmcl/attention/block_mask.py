"""Block masks: which blocks of keys a block of queries sees, wholly or in part; built without an L x L intermediate.

               keys ->
    queries  [ █ █ ░       ]    █ full: every pair is seen, the mask is not evaluated
       |     [ █ █ █ ░     ]    ░ partial: the mask is evaluated for each pair
       v     [ █ █ █ █ ░   ]      empty: the block is never visited

Names and meanings are those of torch.nn.attention.flex_attention.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcl.attention.graph import Array
from llmcl.attention.intervals import bounds
from llmcl.attention.trace import TracedMod, trace_mask_mod
from llmcl.errors import UsageError

MaskMod = Callable[[Any, Any, Any, Any], Any]
Int32Array = NDArray[np.int32]

DEFAULT_BLOCK_SIZE = 128
EMPTY, PARTIAL, FULL, UNDECIDED = 0, 1, 2, 3
# Elements of one NumPy temporary, of up to 8 bytes; an expression has about ten of them alive.
BATCH = 1 << 18
SAMPLES = 8  # along each axis of a block
SUBBLOCKS = 8

# Elementwise evaluation is in the precision of the kernels, so that a comparison of floats falls out as it does there.
FLOAT = np.float32


def and_masks(*mask_mods: MaskMod) -> MaskMod:
    """The mask of the pairs that all the masks let through; all pairs for no mask."""
    _check_callables(mask_mods)

    def and_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        result: Any = True
        for mask_mod in mask_mods:
            result = mask_mod(b, h, q_idx, kv_idx) & result
        return result

    return and_mask


def or_masks(*mask_mods: MaskMod) -> MaskMod:
    """The mask of the pairs that any of the masks lets through; no pair for no mask."""
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
            raise UsageError(f"a mask_mod is a function of (b, h, q_idx, kv_idx); found {mask_mod!r}")


def create_block_mask(
    mask_mod: MaskMod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    BLOCK_SIZE: int | tuple[int, int] = DEFAULT_BLOCK_SIZE,
) -> BlockMask:
    """The blocks that `mask_mod(b, h, q_idx, kv_idx) -> bool` leaves visible.

    B, H: batch size and query heads, None where the mask is the same for all (stored once). BLOCK_SIZE: rows and
    columns of a block, an int for both. A block that reaches past Q_LEN or KV_LEN is never full, as in PyTorch.

    Raises UsageError for a mask that cannot be traced, an index outside a captured array, and sizes below 1.
    """
    block_size = _block_size(BLOCK_SIZE)
    for name, value in {"B": B, "H": H, "Q_LEN": Q_LEN, "KV_LEN": KV_LEN}.items():
        if (value is None and name in ("B", "H")) or (isinstance(value, (int, np.integer)) and value > 0):
            continue
        raise UsageError(f"{name} is {value!r}; expected an integer above 0" + (" or None" if name in "BH" else ""))
    traced = trace_mask_mod(mask_mod)
    classes = _Grid(traced, B or 1, H or 1, Q_LEN, KV_LEN, block_size).classify()
    shape = (B or 1, H or 1, *classes.shape[2:])
    partial, full = _to_lists(classes == PARTIAL), _to_lists(classes == FULL)
    return BlockMask(
        seq_lengths=(int(Q_LEN), int(KV_LEN)),
        kv_num_blocks=_broadcast(partial[0], shape),
        kv_indices=_broadcast(partial[1], shape),
        full_kv_num_blocks=_broadcast(full[0], shape),
        full_kv_indices=_broadcast(full[1], shape),
        BLOCK_SIZE=block_size,
        mask_mod=mask_mod,
        traced=traced,
    )


def check_mod(traced: TracedMod, B: int, H: int, Q_LEN: int, KV_LEN: int) -> None:
    """Raises UsageError when a mod would index a captured array out of its bounds, or an integer would leave int32,
    for any b < B, h < H, q_idx < Q_LEN, kv_idx < KV_LEN. Costs about as much as a block mask; a score is unknown.
    """
    block_size = (max(DEFAULT_BLOCK_SIZE, -(-Q_LEN // 512)), max(DEFAULT_BLOCK_SIZE, -(-KV_LEN // 512)))
    _Grid(traced, B, H, Q_LEN, KV_LEN, block_size).check()


def _block_size(value: int | tuple[int, int]) -> tuple[int, int]:
    pair = (value, value) if isinstance(value, (int, np.integer)) else tuple(value)
    if len(pair) != 2 or not all(isinstance(size, (int, np.integer)) and size > 0 for size in pair):
        raise UsageError(f"BLOCK_SIZE is {value!r}; expected an integer above 0, or two: for queries and for keys")
    return int(pair[0]), int(pair[1])


def _broadcast(array: Int32Array, shape: tuple[int, ...]) -> Int32Array:
    return np.broadcast_to(array, (*shape[:2], *array.shape[2:]))


def _to_lists(dense: Array) -> tuple[Int32Array, Int32Array]:
    """From bool [B, H, rows, columns]: the number of true columns of each row, and which they are, then zeros."""
    counts = dense.sum(-1, dtype=np.int32)
    indices = np.zeros((*dense.shape[:3], max(1, int(counts.max()))), np.int32)
    for at in np.ndindex(*dense.shape[:2]):
        rows, columns = np.nonzero(dense[at])
        starts = np.cumsum(counts[at]) - counts[at]
        indices[at][rows, np.arange(len(rows)) - starts[rows]] = columns
    return counts, indices


@dataclass(frozen=True)
class _Boxes:
    """Boxes of positions, one for each element of arrays that broadcast: first and last query and key of each."""

    q_first: Array
    q_last: Array
    kv_first: Array
    kv_last: Array


@dataclass(frozen=True)
class _Grid:
    """The blocks of a mask: [B, H, ceil(Q_LEN / block_q), ceil(KV_LEN / block_kv)].

    A block is decided by the cheapest means that does it: bounds of the mask over the block; a pair that is seen and
    one that is not among a few samples; bounds over parts of the block; evaluation of every pair.
    """

    traced: TracedMod
    B: int
    H: int
    q_len: int
    kv_len: int
    block_size: tuple[int, int]

    def classify(self) -> NDArray[np.int8]:
        """EMPTY, PARTIAL or FULL for each block; axes b and h have length 1 where the mask does not depend on them."""
        n_q, n_kv = -(-self.q_len // self.block_size[0]), -(-self.kv_len // self.block_size[1])
        classes = np.empty((*self._heads(), n_q, n_kv), np.int8)
        for b, h in np.ndindex(*self._heads()):
            for start, state, unsafe in self._strips(b, h):
                self._decide(b, h, start, state, unsafe)
                classes[b, h, start : start + len(state)] = state
        ragged = np.zeros((n_q, n_kv), np.bool_)
        ragged[-1, :] |= self.q_len % self.block_size[0] != 0
        ragged[:, -1] |= self.kv_len % self.block_size[1] != 0
        classes[(classes == FULL) & ragged] = PARTIAL
        return classes

    def check(self) -> None:
        for b, h in np.ndindex(*self._heads()):
            for start, _, unsafe in self._strips(b, h):
                self._evaluate_unsafe(b, h, start, unsafe)

    def _heads(self) -> tuple[int, int]:
        depends = self.traced.depends
        return self.B if "b" in depends else 1, self.H if "h" in depends else 1

    def _strips(self, b: int, h: int) -> Iterator[tuple[int, NDArray[np.int8], Array]]:
        """First row, what the bounds tell of each block, and which are unsafe, for some rows of blocks at once."""
        block_q, block_kv = self.block_size
        kv = np.arange(0, self.kv_len, block_kv, dtype=np.int64)[None, :]
        n_q = -(-self.q_len // block_q)
        rows = max(1, BATCH // kv.size)
        for start in range(0, n_q, rows):
            q = (np.arange(start, min(start + rows, n_q), dtype=np.int64) * block_q)[:, None]
            boxes = _Boxes(q, np.minimum(q + block_q, self.q_len) - 1, kv, np.minimum(kv + block_kv, self.kv_len) - 1)
            state, unsafe = self._bounds(b, h, boxes)
            yield start, state, unsafe

    def _bounds(self, b: int, h: int, boxes: _Boxes) -> tuple[NDArray[np.int8], Array]:
        unknown = np.asarray(np.nan, FLOAT)
        ranges = {
            "score": (unknown, unknown),
            "b": (np.asarray(b), np.asarray(b)),
            "h": (np.asarray(h), np.asarray(h)),
            "q_idx": (boxes.q_first, boxes.q_last),
            "kv_idx": (boxes.kv_first, boxes.kv_last),
        }
        graph = self.traced.graph
        low, high, unsafe = bounds(graph, self.traced.root, ranges, FLOAT)
        shape = np.broadcast_shapes(boxes.q_first.shape, boxes.kv_first.shape)
        if self.traced.kind == "score_mod":
            state = np.full(shape, UNDECIDED, np.int8)
        else:
            state = np.broadcast_to(np.where(low, FULL, np.where(high, UNDECIDED, EMPTY)), shape).astype(np.int8)
        return state, np.broadcast_to(unsafe, shape)

    def _decide(self, b: int, h: int, start: int, state: NDArray[np.int8], unsafe: Array) -> None:
        self._evaluate_unsafe(b, h, start, unsafe)
        state[unsafe] = UNDECIDED  # what the bounds say there holds for the values that int32 can hold only
        for step in (self._sample, self._subdivide, self._evaluate):
            rows, columns = np.nonzero(state == UNDECIDED)
            if rows.size:
                state[rows, columns] = step(b, h, rows + start, columns)

    def _spread(self, rows: Array, columns: Array, points: int) -> tuple[Array, Array]:
        """Positions [n, points, 1] and [n, 1, points] from the first to the last of each block."""
        positions = []
        for block, size, length in ((rows, self.block_size[0], self.q_len), (columns, self.block_size[1], self.kv_len)):
            first = block * size
            extent = np.minimum(first + size, length) - 1 - first
            positions.append(first[:, None] + extent[:, None] * np.arange(points) // (points - 1))
        return positions[0][:, :, None], positions[1][:, None, :]

    def _sample(self, b: int, h: int, rows: Array, columns: Array) -> NDArray[np.int8]:
        result = np.full(rows.shape, UNDECIDED, np.int8)
        batch = BATCH // SAMPLES**2
        for at in range(0, rows.size, batch):
            q, kv = self._spread(rows[at : at + batch], columns[at : at + batch], SAMPLES)
            seen = self.traced.evaluate(0, b, h, q, kv, dtype=FLOAT)
            both = seen.any((1, 2)) & ~seen.all((1, 2))
            result[at : at + batch][both] = PARTIAL
        return result

    def _subdivide(self, b: int, h: int, rows: Array, columns: Array) -> NDArray[np.int8]:
        result = np.full(rows.shape, UNDECIDED, np.int8)
        if min(self.block_size) < 2 * SUBBLOCKS:
            return result
        batch = BATCH // SUBBLOCKS**2
        for at in range(0, rows.size, batch):
            edges = []
            for block, size, length in (
                (rows[at : at + batch], self.block_size[0], self.q_len),
                (columns[at : at + batch], self.block_size[1], self.kv_len),
            ):
                first = block[:, None] * size + np.arange(SUBBLOCKS + 1) * size // SUBBLOCKS
                edges.append(np.minimum(first, length))
            # A part that lies outside the mask repeats the last position inside.
            q_first = np.minimum(edges[0][:, :-1], self.q_len - 1)[:, :, None]
            kv_first = np.minimum(edges[1][:, :-1], self.kv_len - 1)[:, None, :]
            q_last = np.maximum(edges[0][:, 1:, None] - 1, q_first)
            kv_last = np.maximum(edges[1][:, None, 1:] - 1, kv_first)
            parts, unsafe = self._bounds(b, h, _Boxes(q_first, q_last, kv_first, kv_last))
            parts[unsafe] = UNDECIDED
            result[at : at + batch] = _join(
                (parts == FULL).any((1, 2)), (parts == EMPTY).any((1, 2)), (parts == UNDECIDED).any((1, 2))
            )
        return result

    def _evaluate(self, b: int, h: int, rows: Array, columns: Array, *, check: bool = False) -> NDArray[np.int8]:
        """The pairs of the blocks one by one, many blocks or a part of one block at a time."""
        block_q, block_kv = min(self.block_size[0], self.q_len), min(self.block_size[1], self.kv_len)
        tile_kv = min(block_kv, BATCH)
        tile_q = min(block_q, max(1, BATCH // tile_kv))
        batch = max(1, BATCH // (tile_q * tile_kv))
        result = np.empty(rows.shape, np.int8)
        for at in range(0, rows.size, batch):
            q_first = rows[at : at + batch, None, None] * self.block_size[0]
            kv_first = columns[at : at + batch, None, None] * self.block_size[1]
            any_seen = np.zeros(len(q_first), np.bool_)
            any_hidden = np.zeros(len(q_first), np.bool_)
            for q_start, kv_start in itertools.product(range(0, block_q, tile_q), range(0, block_kv, tile_kv)):
                q = q_first + np.arange(q_start, min(q_start + tile_q, block_q))[:, None]
                kv = kv_first + np.arange(kv_start, min(kv_start + tile_kv, block_kv))
                # Pairs outside the mask repeat those at its edge.
                q, kv = np.minimum(q, self.q_len - 1), np.minimum(kv, self.kv_len - 1)
                seen = self.traced.evaluate(0, b, h, q, kv, dtype=FLOAT, check_overflow=check)
                any_seen |= seen.any((1, 2))
                any_hidden |= ~seen.all((1, 2))
                if not check and (any_seen & any_hidden).all():
                    break
            result[at : at + batch] = _join(any_seen, any_hidden, np.zeros_like(any_seen))
        return result

    def _evaluate_unsafe(self, b: int, h: int, start: int, unsafe: Array) -> None:
        rows, columns = np.nonzero(unsafe)
        if rows.size:
            self._evaluate(b, h, rows + start, columns, check=True)


def _join(any_full: Array, any_empty: Array, any_undecided: Array) -> NDArray[np.int8]:
    """The class of a block from those of its parts."""
    decided = np.where(any_full, FULL, EMPTY)
    return np.where(any_full & any_empty, PARTIAL, np.where(any_undecided, UNDECIDED, decided)).astype(np.int8)


@dataclass(frozen=True)
class BlockMask:
    """Which key blocks each query block sees, in PyTorch's format.

    kv_num_blocks int32 [B, H, n_q_blocks] and kv_indices int32 [B, H, n_q_blocks, most]: how many partial blocks a row
    of blocks has, and which, in ascending order; entries past the number are 0. full_kv_*: the same for full blocks.
    `most` is the largest number in any row, and at least 1. BLOCK_SIZE is (queries, keys). Axes of B and H on which
    the mask does not depend are broadcast views (strides of 0).

    `mask[b, h, q_blocks]` with ints, slices or lists of block numbers gives the mask of a part; all axes stay.
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
        """A mask from lists of blocks, [B, H, n_q_blocks] and [B, H, n_q_blocks, any], arrays or torch tensors.

        mask_mod is evaluated in the partial blocks; without it they are seen whole. Without seq_lengths the lengths
        are those of whole blocks, as many columns as kv_indices has. Raises UsageError for arrays that do not fit.
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
        """Percentage of the pairs whose blocks are not visited, as PyTorch counts: negative where blocks reach far past
        the lengths."""
        visited = int(self.kv_num_blocks.sum(dtype=np.int64)) + int(self.full_kv_num_blocks.sum(dtype=np.int64))
        return 100 * (1 - visited * self.BLOCK_SIZE[0] * self.BLOCK_SIZE[1] / self.numel())

    def to_dense(self) -> Int32Array:
        """int32 [B, H, n_q_blocks, n_kv_blocks]: 1 for a block that is visited."""
        visited: NDArray[np.bool_] = self.classes() != EMPTY
        return visited.astype(np.int32)

    def classes(self) -> NDArray[np.int8]:
        """int8 [B, H, n_q_blocks, n_kv_blocks]: 0 empty, 1 partial, 2 full."""
        n_kv = -(-self.seq_lengths[1] // self.BLOCK_SIZE[1])
        dense = np.zeros((*self.kv_num_blocks.shape, n_kv), np.int8)
        for kind, count, which in (
            (PARTIAL, self.kv_num_blocks, self.kv_indices),
            (FULL, self.full_kv_num_blocks, self.full_kv_indices),
        ):
            b, h, row, place = np.nonzero(np.arange(which.shape[-1]) < count[..., None])
            dense[b, h, row, which[b, h, row, place]] = kind
        return dense

    def __getitem__(self, index: Any) -> BlockMask:
        """The part at [b, h, q_blocks]; its mask_mod counts b, h and q_idx within the part."""
        items = index if isinstance(index, tuple) else (index,)
        if len(items) > 3:
            raise UsageError(f"a block mask is indexed by [b, h, q_blocks]; found {len(items)} indices")
        chosen = [
            _numbers(item, size, name)
            for item, size, name in zip(
                (*items, *[slice(None)] * (3 - len(items))),
                self.kv_num_blocks.shape,
                ("b", "h", "q block"),
                strict=True,
            )
        ]
        part = np.ix_(*chosen)
        mod = self.mask_mod
        if any(
            numbers.size != size or (np.diff(numbers, prepend=-1) != 1).any()
            for numbers, size in zip(chosen, self.kv_num_blocks.shape, strict=True)
        ):
            mod = self._part_of_mask(*chosen)
        last_rows = min(self.BLOCK_SIZE[0], self.seq_lengths[0] - int(chosen[2][-1]) * self.BLOCK_SIZE[0])
        return BlockMask(
            ((len(chosen[2]) - 1) * self.BLOCK_SIZE[0] + last_rows, self.seq_lengths[1]),
            self.kv_num_blocks[part],
            self.kv_indices[part],
            self.full_kv_num_blocks[part],
            self.full_kv_indices[part],
            self.BLOCK_SIZE,
            mod,
            self.traced if mod is self.mask_mod else trace_mask_mod(mod),
        )

    def _part_of_mask(self, b_numbers: Array, h_numbers: Array, q_blocks: Array) -> MaskMod:
        """The mask_mod in the numbering of a part. The numbers are captured arrays, so that the code is the same for
        all parts of one shape."""
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
        """A drawing of each head, two characters a block: full blocks █, partial ones ░, empty ones blank.

        grid_size: rows and columns at most; several blocks share a character where there are more, which is ░ unless
        all are full or all empty. -1: no limit. limit: how many heads are drawn.
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
    """The indices that an int, a slice or an array stands for; at least one."""
    if isinstance(item, slice):
        numbers = np.arange(size)[item]
    else:
        numbers = np.atleast_1d(np.asarray(item)).astype(np.int64)
        if np.any((numbers < -size) | (numbers >= size)):
            raise UsageError(f"the {name} index {item!r} is out of range; the mask has {size}")
        numbers = numbers % size
    if numbers.size == 0:
        raise UsageError(f"the {name} index {item!r} selects nothing of {size}")
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
