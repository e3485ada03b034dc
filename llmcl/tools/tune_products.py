"""Tunes products: work-items per tile in decode, and sums per work-item in prefill.

Each product size in a model is compared with the twin and then timed, first with the default, then varying one constant
at a time, on weights that no cache holds. The fastest constants are stored per product size, where binding a product
looks them up (`ProductImplementation.chosen`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmcl import reference
from llmcl.architectures.config import ModelConfig
from llmcl.kernels import table
from llmcl.kernels.common.dtype import QUANTIZED, TILE_ROWS, tile_bytes
from llmcl.kernels.common.linear import LinearDecode, LinearPrefill, Product
from llmcl.kernels.common.weight import Weight, WeightPart, alloc_weight
from llmcl.ops.linear import linear_decode, linear_prefill
from llmcl.ops.load_weight import load_weight
from llmcl.runtime.device import Buffer, Device, Launch
from llmcl.tools.trials import ROUNDED_ACTIVATIONS, StoredRows, Trial, random_blocks, state_at, tolerance
from llmcl.tools.tune import DEFAULT, Measurement, Note, Tuning, best_of, measure_choice, repeat_fastest, search_each

COLD_BYTES = 256 << 20  # weights cycled through, so that no cache holds them
BASE_TILES = 32  # compared with the twin; all further tiles are copies


@dataclass(frozen=True)
class ProductSize:
    """A model's weight size [rows, k]. has_gate: gate and up tiles alternate."""

    rows: int
    k: int
    has_gate: bool

    @property
    def epilogue(self) -> str:
        return "swiglu" if self.has_gate else "store"

    @property
    def n_tiles(self) -> int:
        return -(-self.rows // TILE_ROWS)


def product_sizes(config: ModelConfig) -> list[ProductSize]:
    """Returns a model's distinct product sizes, without experts. Among the top matrices only the output head counts."""
    *_, head = config.top_matrices().values()
    plans = [plan for blocks in config.layers for block in blocks for plan in block.matrices(config).values()]
    sizes = [ProductSize(plan.rows, plan.k, plan.alternate) for plan in [*plans, head] if plan.n_experts == 1]
    return list(dict.fromkeys(sizes))


def tune_products(
    device: Device,
    config: ModelConfig,
    dtype: str,
    n_tokens: int,
    *,
    variant: str | None = None,
    note: Note = lambda row: None,
) -> Iterator[Tuning]:
    """Times each product size for one token and for n_tokens. Skips a variant without choices."""
    for size in product_sizes(config):
        if dtype in QUANTIZED and size.k % QUANTIZED[dtype].block:
            continue
        for n in (1, n_tokens):
            if (tuning := _tune(device, size, dtype, n, variant, note)) is not None:
                yield tuning


def _tune(device: Device, size: ProductSize, dtype: str, n: int, variant: str | None, note: Note) -> Tuning | None:
    row = table.pick(LinearDecode if n == 1 else LinearPrefill, device, dtype, size.k, variant)
    weights = _weights(device, size, dtype)
    out = device.alloc(4 * n * size.n_tiles * TILE_ROWS, "trial output")
    product = Product(weights[0][0], weights[0][0].parts[0], out, size.epilogue)
    choices, key = row.choices(device, product), row.tuned_key(product)
    trial = _trial(device, size, weights, n, row.name, key, out)
    kernel = "linear_decode" if n == 1 else "linear_prefill"
    allowed = ROUNDED_ACTIVATIONS if dtype in QUANTIZED else tolerance(row, dtype)

    def measure(label: str, constants: Mapping[str, int]) -> Measurement:
        tuning = measure_choice(trial, kernel, label, constants, {"constants": constants}, allowed)
        note(tuning)
        return tuning

    try:
        if not choices:
            return None
        rows = [measure(DEFAULT, {name: values[0] for name, values in choices.items()})]
        search_each(rows, choices, measure)
        repeat_fastest(rows, measure)
    finally:
        trial.release()
    title = f"{kernel}, {row.name} variant: {size.rows} rows of {size.k} columns, {dtype}"
    title += f", {n} tokens" if n > 1 else ", gate and up" if size.has_gate else ""
    return Tuning(kernel, row.name, key, rows, best_of(rows), title)


def _weights(device: Device, size: ProductSize, dtype: str) -> list[tuple[Weight, np.ndarray]]:
    """Returns weight copies with repeating tiles, and the values [base rows, k] of the repeated tiles."""
    n_base = min(size.n_tiles, BASE_TILES)
    base_rows = n_base * TILE_ROWS
    values = (np.random.default_rng(size.k).standard_normal((base_rows, size.k)) / np.sqrt(size.k)).astype(np.float32)
    if dtype in QUANTIZED:
        source = random_blocks(QUANTIZED[dtype].format, base_rows, size.k, seed=size.k)
    else:
        source = StoredRows("F32", values.view(np.uint8), (base_rows, size.k))
    base = alloc_weight(device, "trial tiles", base_rows, size.k, dtype)
    flags = device.zeros(4, "trial flags")
    for _ in load_weight(device, base, source, flags, 0):
        pass
    tiles = device.read(base.parts[0].buffer, np.uint8, (n_base, tile_bytes(size.k, dtype)))
    base.parts[0].buffer.release()
    flags.release()
    met = source.values() if dtype in QUANTIZED else reference.round_to(values, dtype)
    n_bytes = size.n_tiles * tiles.shape[1]
    weights = []
    for _ in range(max(1, min(16, COLD_BYTES // n_bytes))):
        buffer = device.alloc(n_bytes, "trial weight")
        for first in range(0, size.n_tiles, n_base):
            device.write(buffer, tiles[: size.n_tiles - first], first * tiles.shape[1])
        part = WeightPart(buffer, 0, size.n_tiles, dtype)
        weights.append((Weight("trial weight", size.n_tiles * TILE_ROWS, size.k, (part,)), met))
    return weights


def _trial(
    device: Device,
    size: ProductSize,
    weights: list[tuple[Weight, np.ndarray]],
    n: int,
    variant: str,
    key: str,
    out: Buffer,
) -> Trial:
    """bind takes constants and stores them as the tuned constants while the product is bound."""
    x = np.random.default_rng(n).standard_normal((n, size.k)).astype(np.float32)
    base = reference.linear(x, weights[0][1])
    expected = np.tile(base, -(-size.n_tiles * TILE_ROWS // base.shape[1]))[:, : size.n_tiles * TILE_ROWS]
    if size.has_gate:
        halves = expected.reshape(n, -1, 2, TILE_ROWS)
        expected = reference.swiglu(halves[:, :, 0].reshape(n, -1), halves[:, :, 1].reshape(n, -1))
    inputs, step = device.upload(x, "trial input"), state_at(device, 5, n)
    product: Any = linear_decode if n == 1 else linear_prefill

    def bind(constants: Mapping[str, int]) -> list[Launch]:
        before = device.cache.tuned.get(key)
        device.cache.tuned[key] = dict(constants)
        try:
            return [
                launch
                for weight, _ in weights
                for launch in product(device, weight, inputs, out, step, epilogue=size.epilogue, variant=variant)
            ]
        finally:
            del device.cache.tuned[key]
            if before is not None:
                device.cache.tuned[key] = before

    kept = (inputs, *(weight.parts[0].buffer for weight, _ in weights))
    return Trial(device, bind, step, out, expected, kept, copies=len(weights))
