"""Classifies mask blocks as empty, partial or full: by bounds where they decide, else by evaluation."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmcl.attention.tracing.graph import Array
from llmcl.attention.tracing.intervals import bounds
from llmcl.attention.tracing.trace import TracedMod

EMPTY, PARTIAL, FULL, UNDECIDED = 0, 1, 2, 3
# Elements in a NumPy temporary, up to 8 bytes each; an expression keeps about ten temporaries alive.
BATCH = 1 << 18
SAMPLES = 8  # along each axis of a block
SUBBLOCKS = 8

# Elementwise evaluation uses the kernels' precision, so float comparisons give the kernels' results.
FLOAT = np.float32


@dataclass(frozen=True)
class Boxes:
    """Boxes of positions (first and last query and key), as arrays that broadcast."""

    q_first: Array
    q_last: Array
    kv_first: Array
    kv_last: Array


@dataclass(frozen=True)
class Grid:
    """The mask blocks [B, H, ceil(Q_LEN / block_q), ceil(KV_LEN / block_kv)].

    Decides each block by the cheapest sufficient test: bounds over the block; a visible and a hidden pair among a few
    samples; bounds over sub-blocks; evaluation of every pair.
    """

    traced: TracedMod
    B: int
    H: int
    q_len: int
    kv_len: int
    block_size: tuple[int, int]

    def classify(self) -> NDArray[np.int8]:
        """Returns EMPTY, PARTIAL or FULL per block. Axes b and h have length 1 if the mask doesn't depend on them."""
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
        """Yields (first block row, states from the bounds, unsafe flags) for several block rows at a time."""
        block_q, block_kv = self.block_size
        kv = np.arange(0, self.kv_len, block_kv, dtype=np.int64)[None, :]
        n_q = -(-self.q_len // block_q)
        rows = max(1, BATCH // kv.size)
        for start in range(0, n_q, rows):
            q = (np.arange(start, min(start + rows, n_q), dtype=np.int64) * block_q)[:, None]
            boxes = Boxes(q, np.minimum(q + block_q, self.q_len) - 1, kv, np.minimum(kv + block_kv, self.kv_len) - 1)
            state, unsafe = self.classes_of(b, h, boxes)
            yield start, state, unsafe

    def classes_of(self, b: int, h: int, boxes: Boxes) -> tuple[NDArray[np.int8], Array]:
        """Returns each box's state according to the bounds, and whether a value may leave int32 or an array there
        (unsafe)."""
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
        state[unsafe] = UNDECIDED  # bounds are only valid for values within int32
        for step in (self._sample, self._subdivide, self._evaluate):
            undecided = state == UNDECIDED
            if not undecided.any():
                return
            rows, columns = np.nonzero(undecided)
            state[rows, columns] = step(b, h, rows + start, columns)

    def _spread(self, rows: Array, columns: Array, points: int) -> tuple[Array, Array]:
        """Returns sample positions [n, points, 1] and [n, 1, points], from first to last in each block."""
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
            # A sub-block outside the mask repeats the last position inside.
            q_first = np.minimum(edges[0][:, :-1], self.q_len - 1)[:, :, None]
            kv_first = np.minimum(edges[1][:, :-1], self.kv_len - 1)[:, None, :]
            q_last = np.maximum(edges[0][:, 1:, None] - 1, q_first)
            kv_last = np.maximum(edges[1][:, None, 1:] - 1, kv_first)
            parts, unsafe = self.classes_of(b, h, Boxes(q_first, q_last, kv_first, kv_last))
            parts[unsafe] = UNDECIDED
            result[at : at + batch] = _join(
                (parts == FULL).any((1, 2)), (parts == EMPTY).any((1, 2)), (parts == UNDECIDED).any((1, 2))
            )
        return result

    def _evaluate(self, b: int, h: int, rows: Array, columns: Array, *, check: bool = False) -> NDArray[np.int8]:
        """Evaluates every pair: many blocks, or part of a large block, at a time."""
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
                # Pairs outside the mask repeat the pairs at the edge.
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
    """Combines the classes of the sub-blocks into the block's class."""
    decided = np.where(any_full, FULL, EMPTY)
    return np.where(any_full & any_empty, PARTIAL, np.where(any_undecided, UNDECIDED, decided)).astype(np.int8)
