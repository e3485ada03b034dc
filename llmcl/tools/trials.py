"""Runs a kernel against its NumPy twin outside the test suite: for `llmcl tune` and `llmcl doctor`.

A `Trial` is a problem on a device: inputs, the twin's output, and a function that binds launches for a choice of
variant and constants. An error is the largest difference over the largest expected magnitude.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmcl import reference
from llmcl.checkpoint.formats import FORMATS
from llmcl.checkpoint.quantize import quantize_rows
from llmcl.kernels.common.attention import CAPACITY_MULTIPLE, AttentionShape
from llmcl.kernels.common.dtype import QUANTIZED
from llmcl.kernels.common.step_state import StepState
from llmcl.kernels.common.weight import Weight, WeightPart, alloc_weight
from llmcl.kernels.implementation import Implementation
from llmcl.ops.attention import attention_decode, attention_prefill
from llmcl.ops.linear import linear_decode, linear_prefill
from llmcl.ops.load_weight import load_weight
from llmcl.runtime.device import Buffer, Device, Launch

EPS = 1e-5  # epsilon in normalisation
ROUNDED_ACTIVATIONS = 2e-2  # allowed error for 8-bit activations
NAN = np.uint32(0x7FC07FC0)  # NaN as float32 and, in each half, as float16 and bfloat16


@dataclass(frozen=True)
class Trial:
    """A kernel's problem on a device, with the expected output."""

    device: Device
    bind: Callable[..., list[Launch]]  # bind(**choices) -> launches that write `out`
    step: StepState  # the step's state and tokens
    out: Buffer  # float32, to be compared with `expected`
    expected: np.ndarray
    buffers: Sequence[Buffer] = ()  # further buffers to release
    copies: int = 1  # how often the launches repeat the work
    before: np.ndarray | None = None  # content of `out` before the launches, if they add to it

    def run(self, launches: Sequence[Launch]) -> None:
        for launch in launches:
            launch.enqueue(self.step.max_tokens)

    def error(self, launches: Sequence[Launch]) -> float:
        """Runs the launches once on an output filled with NaN or `before`. Returns infinity for a nonfinite result."""
        if self.before is None:
            self.device.fill(self.out, NAN)
        else:
            self.device.write(self.out, self.before)
        self.run(launches)
        return relative_error(self.device.read(self.out, np.float32, self.expected.shape), self.expected)

    def release(self) -> None:
        for buffer in (self.out, self.step.state, self.step.tokens, self.step.sampled, *self.buffers):
            buffer.release()


def tolerance(implementation: Implementation, dtype: str) -> float:
    """Returns the allowed error for a kernel: float32 sums, or matrix units with 16-bit operands."""
    if not implementation.rounds_to_16_bits or dtype == "float32":
        return 2e-5
    return 2.0**-7 if dtype == "bfloat16" else 2.0**-10


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    if not np.all(np.isfinite(actual)):
        return float("inf")
    return float(np.max(np.abs(actual - expected)) / max(float(np.max(np.abs(expected))), 1e-300))


def stored(values: np.ndarray, dtype: str) -> np.ndarray:
    """Converts floats to their stored bits as float32, float16 or bfloat16: float32 or uint16."""
    rounded = reference.round_to(values, dtype)
    if dtype == "float16":
        return rounded.astype(np.float16).view(np.uint16)
    return rounded if dtype == "float32" else (rounded.view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def cache_bytes(keys: np.ndarray, values: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Converts float [heads, capacity, head_dim] keys and values to a KV cache's bytes (kernels/common/kv_cache.cl)."""
    if dtype in QUANTIZED:
        return reference.pack_keys(keys), reference.pack_values(values)
    heads, _, head_dim = keys.shape
    tiles = np.ascontiguousarray(keys.reshape(heads, -1, 16, head_dim).swapaxes(2, 3))
    return stored(tiles, dtype), stored(values, dtype)


def state_at(device: Device, position: int, n_tokens: int) -> StepState:
    step = StepState(device, n_tokens)
    device.write(step.state, np.array([position, n_tokens, 0], np.int32))
    return step


@dataclass(frozen=True)
class AttentionProblem:
    """Random queries, keys and values. Keys and values are rounded to the cache's dtype; cache entries past the last
    key are NaN."""

    shape: AttentionShape
    qkv: np.ndarray  # [n, n_q_heads + 2 n_kv_heads, head_dim]
    keys: np.ndarray  # [kv_len, n_kv_heads, head_dim], rounded
    values: np.ndarray

    @classmethod
    def random(
        cls, n_q_heads: int, n_kv_heads: int, head_dim: int, kv_dtype: str, n: int, position: int, exact: bool = False
    ) -> AttentionProblem:
        """exact: see AttentionShape.exact_queries."""
        rng = np.random.default_rng(n + position)
        capacity = -(-(position + n) // CAPACITY_MULTIPLE) * CAPACITY_MULTIPLE
        qkv = rng.standard_normal((n, n_q_heads + 2 * n_kv_heads, head_dim)).astype(np.float32)
        keys, values = reference.round_to(rng.standard_normal((2, position + n, n_kv_heads, head_dim)), kv_dtype)
        shape = AttentionShape(n_q_heads, n_kv_heads, head_dim, capacity, kv_dtype, exact_queries=exact)
        return cls(shape, qkv, keys, values)

    def upload(self, device: Device, n_cached: int) -> tuple[Buffer, Buffer]:
        """Uploads caches with the first n_cached keys and values."""
        shape = self.shape
        caches = np.full((2, shape.n_kv_heads, shape.capacity, shape.head_dim), np.nan, np.float32)
        caches[:, :, :n_cached] = np.stack([self.keys, self.values])[:, :n_cached].swapaxes(1, 2)
        keys, values = cache_bytes(caches[0], caches[1], shape.kv_dtype)
        return device.upload(keys, "trial keys"), device.upload(values, "trial values")


def prefill_trial(device: Device, problem: AttentionProblem) -> Trial:
    """Prefills n tokens after a cached context. bind takes attention_prefill's variant and request."""
    shape, n = problem.shape, problem.qkv.shape[0]
    position = problem.keys.shape[0] - n
    k, v = problem.upload(device, position + n)
    qkv = device.upload(problem.qkv, "trial queries")
    step = state_at(device, position, n)
    out = device.alloc(4 * n * shape.n_q_heads * shape.head_dim, "trial output")
    expected = _causal_attention(problem.qkv[:, : shape.n_q_heads], problem.keys, problem.values, position)

    def bind(**choices: Any) -> list[Launch]:
        return attention_prefill(device, shape, qkv, step, k, v, out, **choices)

    return Trial(device, bind, step, out, expected, (qkv, k, v))


def decode_trial(device: Device, problem: AttentionProblem, copies: int = 1) -> Trial:
    """Decodes one token, which the kernel rotates by a right angle (exact in every dtype) and appends.

    copies: number of KV caches to attend to in turn, so that none is in the processor's cache. bind takes
    attention_decode's n_splits, variant and block_n.
    """
    shape = problem.shape
    q_heads, kv_heads, half = shape.n_q_heads, shape.n_kv_heads, shape.head_dim // 2
    position = problem.keys.shape[0] - 1
    rope = np.zeros((1, shape.head_dim), np.float32)
    rope[:, half:] = 1.0  # cosines 0, sines 1
    qkv = problem.qkv.copy()
    rotated_key = problem.keys[position]
    qkv[0, q_heads : q_heads + kv_heads] = np.concatenate([rotated_key[:, half:], -rotated_key[:, :half]], axis=1)
    qkv[0, q_heads + kv_heads :] = problem.values[position]
    caches = [problem.upload(device, position) for _ in range(copies)]
    uploaded, turned = device.upload(qkv, "trial queries"), device.upload(rope, "trial rotation")
    step = state_at(device, position, 1)
    out = device.alloc(4 * q_heads * shape.head_dim, "trial output")
    queries = reference.rope(qkv[:, :q_heads], rope[:, :half], rope[:, half:])
    expected = reference.attention_decode(queries, problem.keys, problem.values, position)[0]

    def bind(*, n_splits: int, **choices: Any) -> list[Launch]:
        part_ml = device.alloc(4 * q_heads * n_splits * 2, "trial parts")
        part_acc = device.alloc(4 * q_heads * n_splits * shape.head_dim, "trial parts")
        arguments = {"n_splits": n_splits, **choices}
        return [
            launch
            for k, v in caches
            for launch in attention_decode(
                device, shape, uploaded, turned, step, k, v, part_ml, part_acc, out, **arguments
            )
        ]

    kept = (uploaded, turned, *(buffer for pair in caches for buffer in pair))
    return Trial(device, bind, step, out, expected, kept, copies)


def linear_trial(
    device: Device,
    rows: int,
    k: int,
    dtype: str,
    n: int,
    *,
    epilogue: str = "store",
    norm: bool = False,
    exact: bool = False,
) -> Trial:
    """Multiplies n tokens by a weight [rows, k]; with "swiglu" the row halves are gate and up.

    n = 1 runs linear_decode, which takes norm; else linear_prefill. bind takes the variant. exact: activations stay
    float32 even if the device would round them.
    """
    rng = np.random.default_rng(rows + k + n)
    values = reference.round_to(rng.standard_normal((rows, k)) / np.sqrt(k), dtype)
    x = rng.standard_normal((n, k)).astype(np.float32)
    scale = (1.0 + 0.2 * rng.standard_normal(k)).astype(np.float32)
    tiles = reference.to_tiles(stored(values, dtype))
    if epilogue == "swiglu":  # gate and up tiles alternate
        tiles = np.ascontiguousarray(tiles.reshape(2, -1, k, 16).swapaxes(0, 1)).reshape(tiles.shape)
    part = WeightPart(device.upload(tiles, "trial weight"), 0, len(tiles), dtype)
    weight = Weight("trial weight", rows, k, (part,), exact)
    norms = device.upload(scale, "trial norm")
    expected = reference.linear(reference.rms_norm(x, scale, EPS) if norm else x, values)
    before = None
    if epilogue == "swiglu":
        expected = reference.swiglu(expected[:, : rows // 2], expected[:, rows // 2 :])
    elif epilogue == "add":
        before = rng.standard_normal((n, rows)).astype(np.float32)
        expected = expected + before
    fixed: dict[str, Any] = {"epilogue": epilogue}
    if n == 1:
        fixed |= {"norm": norms if norm else None, "eps": EPS}
    return _product_trial(device, weight, x, expected, before=before, buffers=(norms,), **fixed)


def quantized_trial(device: Device, rows: int, k: int, dtype: str, n: int, *, exact: bool) -> Trial:
    """Multiplies by a weight that stays quantised, loaded as from a file; bind as in linear_trial.

    exact: activations stay float32 even if the device would round them to 8 bits.
    """
    rng = np.random.default_rng(rows + k + n)
    values = (rng.standard_normal((rows, k)) / np.sqrt(k)).astype(np.float32)
    format = QUANTIZED[dtype].format
    source = StoredRows(format, quantize_rows(values, format), (rows, k))
    weight = alloc_weight(device, "trial weight", rows, k, dtype, exact_activations=exact)
    flags = device.zeros(4, "trial flags")
    for _ in load_weight(device, weight, source, flags, 0):
        pass
    x = rng.standard_normal((n, k)).astype(np.float32)
    return _product_trial(device, weight, x, reference.linear(x, source.values()), buffers=(flags,))


def _product_trial(
    device: Device,
    weight: Weight,
    x: np.ndarray,
    expected: np.ndarray,
    *,
    before: np.ndarray | None = None,
    buffers: Sequence[Buffer] = (),
    **fixed: Any,
) -> Trial:
    """Multiplies x, float32 [n, k], by a weight. bind takes the op's arguments that are not in `fixed`."""
    inputs, step = device.upload(x, "trial input"), state_at(device, 5, len(x))
    out = device.alloc(4 * expected.size, "trial output")
    product = linear_decode if len(x) == 1 else linear_prefill

    def bind(**choices: Any) -> list[Launch]:
        return product(device, weight, inputs, out, step, **fixed, **choices)

    kept = (*(part.buffer for part in weight.parts), inputs, *buffers)
    return Trial(device, bind, step, out, expected, kept, before=before)


@dataclass(frozen=True)
class StoredRows:
    """Rows in a checkpoint's storage format: uint8 [n, row_bytes]."""

    format: str
    data: np.ndarray
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        return int(self.data.shape[1])

    def rows(self, start: int, stop: int) -> np.ndarray:
        return self.data[start:stop]

    def values(self) -> np.ndarray:
        return reference.dequantize(self.format, self.data)


# Byte offsets of a block's float16 values.
HALVES = {
    "F16": [0],
    "Q8_0": [0],
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "MXFP4": [],
    "NVFP4": [],
    "IQ4_NL": [0],
    "IQ4_XS": [0],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "IQ3_S": [0],
    "IQ3_XXS": [0],
    "IQ2_XXS": [0],
    "IQ2_XS": [0],
    "IQ2_S": [0],
    "IQ1_S": [0],
    "IQ1_M": [],  # d is in four parts
    "TQ1_0": [52],
    "TQ2_0": [64],
}


def random_blocks(format: str, n: int, k: int, seed: int = 0) -> StoredRows:
    """Returns rows in a format from HALVES with random bits, except for floats: they are finite and weight-sized. Every
    format has random rows, while `quantize_rows` supports few formats.
    """
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (n * k // FORMATS[format].block, FORMATS[format].nbytes), np.uint8)
    for at in HALVES[format]:
        scales = (0.1 * rng.standard_normal((len(blocks),))).astype(np.float16)
        scales[0] = np.float16(2e-7)  # a subnormal scale
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    if format == "MXFP4":
        blocks[:, 0] = rng.integers(119, 126, len(blocks))
    if format == "IQ1_M":
        blocks[:, 55] = blocks[:, 55] & 0x8F | 0x20  # d from 2^-7 to 2^-3
    return StoredRows(format, blocks.reshape(n, -1), (n, k))


def _causal_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, position: int) -> np.ndarray:
    """reference.attention by head instead of by row: equal in float64, and quick at 512 tokens."""
    n, n_heads, head_dim = q.shape
    group = n_heads // k.shape[1]
    visible = np.arange(k.shape[0])[None] <= position + np.arange(n)[:, None]
    out = np.empty(q.shape)
    for h in range(n_heads):
        scores = q[:, h].astype(np.float64) @ k[:, h // group].astype(np.float64).T / np.sqrt(head_dim)
        weights = np.where(visible, np.exp(scores - np.where(visible, scores, -np.inf).max(1, keepdims=True)), 0.0)
        out[:, h] = weights @ v[:, h // group].astype(np.float64) / weights.sum(1, keepdims=True)
    return out
