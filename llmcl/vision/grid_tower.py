"""Towers for pictures of any size: a grid of patches with 2D rotary positions, and cells of patches merged to rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmcl.attention.mods import bind_mods, trace_mods
from llmcl.kernels.common.dtype import TILE_ROWS
from llmcl.kernels.common.mods import NO_MODS, Mods
from llmcl.kernels.common.step_state import StepState
from llmcl.kernels.common.weight import Weight
from llmcl.models.encoder_blocks import ONE_TEXT
from llmcl.models.image_rows import ImageRows
from llmcl.ops.add_bias import add_bias
from llmcl.ops.add_positions import add_positions
from llmcl.ops.attention import attention_prefill, rope_append
from llmcl.ops.bias_gelu import bias_gelu
from llmcl.ops.biased_gate import biased_gate
from llmcl.ops.layer_norm import layer_norm
from llmcl.ops.linear import linear_prefill
from llmcl.ops.qkv_adjust import qkv_adjust
from llmcl.ops.rms_norm import rms_norm
from llmcl.runtime.device import Buffer, Device, Launch
from llmcl.vision.attention import tower_attention
from llmcl.vision.tensors import VisionTensors, padded
from llmcl.vision.vision import Pixels


@dataclass(frozen=True)
class GridSettings:
    hidden: int
    intermediate: int
    n_heads: int
    eps: float
    patch: int  # pixels per side
    cell: int  # patches per side that give a row
    row_frequencies: np.ndarray  # float32 [head / 4]: radians per patch downwards
    column_frequencies: np.ndarray  # float32 [head / 4]: radians per patch to the right
    window: int = 0  # patches per side of an attention window, 0: none
    full_layers: frozenset[int] = frozenset()  # with windows: the layers without them
    by_line: bool = False  # a token ends each row of cells, so each is an ImageRows, with positions as text

    @property
    def head(self) -> int:
        return self.hidden // self.n_heads

    @property
    def head_dim(self) -> int:
        """Returns the head size on the device, where zeros pad both halves."""
        return padded(self.head)


@dataclass(frozen=True)
class Norm:
    weight: Buffer  # float32 [columns]
    bias: Buffer | None = None  # None: RMS norm

    def launches(self, device: Device, x: Buffer, out: Buffer, eps: float) -> list[Launch]:
        if self.bias is None:
            return rms_norm(device, x, self.weight, out, eps)
        return layer_norm(device, x, self.weight, self.bias, eps, out)


@dataclass(frozen=True)
class GridLayer:
    norms: tuple[Norm, Norm]  # before attention and before the MLP
    qkv: Weight
    qkv_bias: Buffer | None
    out: Weight
    out_bias: Buffer | None
    up: Weight  # with a gate: tiles of gate and up alternate
    up_bias: Buffer  # with a gate: float32 [2, intermediate]
    gated: bool
    down: Weight
    down_bias: Buffer | None


@dataclass(frozen=True)
class Merger:
    """Joins a cell's patches to one long row and projects it."""

    norm: Norm
    norm_after: bool  # of the long row, not of each patch
    eps: float
    first: Weight
    first_bias: Buffer
    second: Weight
    second_bias: Buffer | None
    join: Weight | None = None  # a product before `first` (Mistral 3)


@dataclass(frozen=True)
class GridWeights:
    patch: Weight  # [hidden, 3 patch^2]
    layers: list[GridLayer]
    merger: Merger
    patch_bias: Buffer | None = None
    pre: Norm | None = None  # before the first layer
    learned: np.ndarray | None = None  # float32 [side^2, hidden]: learned positions of a square grid
    deepstack: tuple[tuple[int, Merger], ...] = ()  # layer, and the merger of its output


def cell_order(rows: int, columns: int, cell: int) -> np.ndarray:
    """Returns every patch's row and column, [2, n], cell by cell."""
    grid = np.indices((rows, columns)).reshape(2, rows // cell, cell, columns // cell, cell)
    return grid.swapaxes(2, 3).reshape(2, -1)


def rope_rows(settings: GridSettings, places: np.ndarray) -> np.ndarray:
    """Returns float32 [n, head_dim], cosines before sines; padding stays unrotated. places: `cell_order`."""
    row, column = places.astype(np.float32)[:, :, np.newaxis]
    angles = np.concatenate([row * settings.row_frequencies, column * settings.column_frequencies], axis=1)
    angles = np.pad(angles, ((0, 0), (0, (settings.head_dim - settings.head) // 2)))
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def interpolated(learned: np.ndarray, rows: int, columns: int, places: np.ndarray) -> np.ndarray:
    """Stretches a square grid's learned positions bilinearly to [rows, columns]; returns one per place."""
    side = int(len(learned) ** 0.5)
    taps, shares = [], []
    for place, size in zip(places, (rows, columns), strict=True):
        source = place.astype(np.float32) * np.float32(side - 1) / np.float32(max(size - 1, 1))
        low = np.floor(source)
        taps.append([np.minimum(low.astype(np.int64) + i, side - 1) for i in (0, 1)])
        shares.append([1 - (source - low), source - low])
    pairs = [(i, j) for i in (0, 1) for j in (0, 1)]
    parts = [learned[taps[0][i] * side + taps[1][j]] * (shares[0][i] * shares[1][j])[:, np.newaxis] for i, j in pairs]
    positions: np.ndarray = parts[0] + parts[1] + parts[2] + parts[3]
    return positions


def alternating(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """Alternates tiles (16 rows) of both matrices, like `GatedMlpWeights.gate_up`."""
    pair = [matrix.reshape(-1, TILE_ROWS, matrix.shape[1]) for matrix in (gate, up)]
    return np.stack(pair, axis=1).reshape(-1, gate.shape[1])


def upload_heads(settings: GridSettings, tensors: VisionTensors, name: str, qkv: np.ndarray) -> Weight:
    """Uploads the projection to queries, keys and values, [3 hidden, hidden], with padded heads."""
    return tensors.upload(name, _padded_halves(settings, qkv))


def upload_head_biases(settings: GridSettings, tensors: VisionTensors, name: str, qkv: np.ndarray) -> Buffer:
    return tensors.device.upload(_padded_halves(settings, qkv[:, np.newaxis]), name)


def upload_out(settings: GridSettings, tensors: VisionTensors, name: str, out: np.ndarray) -> Weight:
    """Uploads the projection of attention's output, [hidden, hidden], with padded heads."""
    return tensors.upload(name, np.ascontiguousarray(_padded_halves(settings, out.T).T))


def _padded_halves(settings: GridSettings, matrix: np.ndarray) -> np.ndarray:
    zeros = (settings.head_dim - settings.head) // 2
    halves = matrix.reshape(-1, settings.head // 2, matrix.shape[1])
    return np.ascontiguousarray(np.pad(halves, ((0, 0), (0, zeros), (0, 0))).reshape(-1, matrix.shape[1]))


class GridTower:
    """Computes one picture after another. Buffers and launches stay while pictures have equal grids."""

    def __init__(self, device: Device, settings: GridSettings, weights: GridWeights):
        self.device, self.settings, self.weights = device, settings, weights
        self._plan: _Plan | None = None

    def rows(self, pixels: Pixels) -> list[ImageRows]:
        """Computes the rows for float32 patches [n, 3 patch^2], in `cell_order`."""
        cell, by_line = self.settings.cell, self.settings.by_line
        grid = (len(pixels.grids), pixels.grids[0][1]) if by_line else pixels.grids[0]
        if self._plan is None or self._plan.grid != grid:
            self._plan = None
            self._plan = _Plan(self.device, self.settings, self.weights, grid)
        n = grid[0] * grid[1]
        rows, *deepstack = self._plan.run(pixels.values)
        assert len(pixels.values) == n * cell**2
        if by_line:
            lines = range(0, n, grid[1])
            return [ImageRows(rows, grid[1], pixels.digest + line.to_bytes(4, "little"), start=line) for line in lines]
        return [ImageRows(rows, n, pixels.digest, grid, tuple(deepstack))]


class _Plan:
    """The buffers and launches for a grid of cells."""

    def __init__(self, device: Device, settings: GridSettings, weights: GridWeights, grid: tuple[int, int]):
        self.device, self.settings, self.weights, self.grid = device, settings, weights, grid
        cell, hidden = settings.cell, settings.hidden
        n, rows = grid[0] * grid[1] * cell**2, grid[0] * grid[1]
        self._n, self._n_rows = n, rows
        self._step, self._cell_step = StepState(device, n), StepState(device, rows)
        self._step.write_tokens([0] * n, 0)
        self._cell_step.write_tokens([0] * rows, 0)
        places = cell_order(grid[0] * cell, grid[1] * cell, cell)
        self._places = places
        self._patches = device.alloc(4 * n * weights.patch.k, "patches")
        self._x, self._normed = (device.alloc(4 * n * hidden, name) for name in ("patch rows", "normed patches"))
        text = weights.merger.second.rows
        self._outs = [device.alloc(4 * rows * text, "image rows") for _ in range(1 + len(weights.deepstack))]
        self._launches = [*self._all_launches()]

    def run(self, values: np.ndarray) -> list[Buffer]:
        zeros = self.weights.patch.k - values.shape[1]
        self.device.write(self._patches, np.pad(values, ((0, 0), (0, zeros))))
        for launch, n in self._launches:
            launch.enqueue(n)
        copies = []
        for out in self._outs:
            rows = self.device.alloc(out.nbytes, "image rows")
            self.device.copy(out, rows)
            copies.append(rows)
        return copies

    def _all_launches(self) -> Iterator[tuple[Launch, int]]:
        """Yields launches, each with its number of rows: patches or cells."""
        mergers = dict(self.weights.deepstack)
        outs = dict(zip(mergers, self._outs[1:], strict=True))
        yield from ((launch, self._n) for launch in self._start())
        for i, launches in enumerate(self._layer_launches()):
            yield from ((launch, self._n) for launch in launches)
            if i in mergers:
                yield from self._merge(mergers[i], outs[i])
        yield from self._merge(self.weights.merger, self._outs[0])

    def _start(self) -> Iterator[Launch]:
        device, settings, weights, x = self.device, self.settings, self.weights, self._x
        yield from linear_prefill(device, weights.patch, self._patches, x, self._step)
        if weights.learned is not None:
            rows, columns = (settings.cell * size for size in self.grid)
            values = interpolated(weights.learned, rows, columns, self._places)
            positions = device.upload(values, "patch positions")
            no_second = device.upload(np.array([ONE_TEXT], np.int32), "no second text")
            assert weights.patch_bias is not None
            yield from add_positions(device, self._step, x, positions, weights.patch_bias, no_second, settings.hidden)
        if weights.pre is not None:
            yield from weights.pre.launches(device, x, x, settings.eps)

    def _layer_launches(self) -> Iterator[list[Launch]]:
        device, settings, step, x, normed = self.device, self.settings, self._step, self._x, self._normed
        n, heads, size = self._n, settings.n_heads, settings.head_dim
        shape = tower_attention(n, heads, size, settings.head**-0.5, self.weights.layers[0].qkv.dtype)
        qkv, attended = device.alloc(12 * n * heads * size, "qkv"), device.alloc(4 * n * heads * size, "attended")
        gate_up = device.alloc(4 * n * max(layer.up.rows for layer in self.weights.layers), "gate and up")
        ffn = device.alloc(4 * n * max(layer.down.k for layer in self.weights.layers), "ffn")
        k, v = (device.zeros(heads * shape.capacity * shape.row_bytes, name) for name in ("keys", "values"))
        rope = device.upload(rope_rows(settings, self._places), "patch rotation")
        window = self._window_mods(shape.capacity) if settings.window else NO_MODS
        for i, layer in enumerate(self.weights.layers):
            before_attention, before_mlp = layer.norms
            mods = NO_MODS if i in settings.full_layers else window
            hidden = gate_up if not layer.gated else ffn
            yield [
                *before_attention.launches(device, x, normed, settings.eps),
                *linear_prefill(device, layer.qkv, normed, qkv, step),
                *qkv_adjust(
                    device, qkv, layer.qkv_bias, None, n_q_heads=heads, n_kv_heads=heads, head_dim=size, eps=0.0
                ),
                *rope_append(device, shape, qkv, rope, step, k, v),
                *attention_prefill(device, shape, qkv, step, k, v, attended, mods=mods),
                *linear_prefill(device, layer.out, attended, x, step, epilogue="add"),
                *([] if layer.out_bias is None else add_bias(device, x, layer.out_bias)),
                *before_mlp.launches(device, x, normed, settings.eps),
                *linear_prefill(device, layer.up, normed, gate_up, step),
                *(
                    biased_gate(device, gate_up, layer.up_bias, ffn, "swiglu")
                    if layer.gated
                    else bias_gelu(device, gate_up, layer.up_bias, tanh=True)
                ),
                *linear_prefill(device, layer.down, hidden, x, step, epilogue="add"),
                *([] if layer.down_bias is None else add_bias(device, x, layer.down_bias)),
            ]

    def _window_mods(self, capacity: int) -> Mods:
        """Returns a mask: patches see their window."""
        settings = self.settings
        rows, columns = self._places // settings.window
        windows = rows * (columns.max() + 1) + columns
        windows = np.pad(windows, (0, capacity - len(windows)), constant_values=-1).astype(np.int32)

        def same_window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return windows[q_idx] == windows[kv_idx]

        return bind_mods(self.device, *trace_mods(None, same_window))

    def _merge(self, merger: Merger, out: Buffer) -> Iterator[tuple[Launch, int]]:
        device, n, cells, step = self.device, self._n, self._n_rows, self._cell_step
        long = self._normed
        norm_rows = cells if merger.norm_after else n
        yield from ((launch, norm_rows) for launch in merger.norm.launches(device, self._x, long, merger.eps))
        if merger.join is not None:
            yield from ((launch, cells) for launch in linear_prefill(device, merger.join, long, self._x, step))
            long = self._x
        first = device.alloc(4 * cells * merger.first.rows, "merged patches")
        launches = [
            *linear_prefill(device, merger.first, long, first, step),
            *bias_gelu(device, first, merger.first_bias, tanh=False),
            *linear_prefill(device, merger.second, first, out, step),
            *([] if merger.second_bias is None else add_bias(device, out, merger.second_bias)),
        ]
        yield from ((launch, cells) for launch in launches)
