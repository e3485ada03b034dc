"""Quantises float rows to ggml's block formats, in NumPy: for `--quantize` and `llmcl convert`.

The formats are defined in `formats.FORMATS` (drawn in docs/design/layouts.md). Q8_0 and Q4_0 match llama.cpp's
reference quantiser bit for bit. Q4_K chooses scales by a separate least-squares search.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import numpy as np

from llmcl.checkpoint.formats import FLOAT_FORMATS, FORMATS
from llmcl.checkpoint.tensors import TensorInfo
from llmcl.errors import CheckpointError, UsageError, shown

_log = logging.getLogger(__name__)

# Values of `--quantize`, with the file format.
QUANTIZE_FORMATS = {"q8_0": "Q8_0", "q4_0": "Q4_0", "q4_k": "Q4_K"}
# Embedding and output head affect every token and lose most, so they keep 8 bits, as in llama.cpp (more than 4 bits).
EMBEDDING_FORMAT = "Q8_0"
EMBEDDINGS = ("model.embed_tokens.weight", "lm_head.weight")
# A router's few rows choose the experts, and convolutions have few weights, so both keep the stored format. Names are
# from folders and GGUF files.
_ROUTERS = (
    ".mlp.gate.weight",
    ".mlp.shared_expert_gate.weight",
    ".mlp.router.weight",
    ".block_sparse_moe.gate.weight",
    ".router.layer.weight",
    ".router.proj.weight",
    ".feed_forward.gate.weight",
    ".ffn_gate_inp.weight",
    ".ffn_gate_inp_shexp.weight",
)
_VECTORS = (".ssm_a", ".ssm_d", ".ssm_norm.weight")  # Mamba's vectors, which GGUF files hold as matrices
_CONVOLUTIONS = (".conv.weight", ".conv1d.weight", ".ssm_conv1d.weight")


def is_router(tensor: str) -> bool:
    return tensor.endswith(_ROUTERS)


def is_convolution(tensor: str) -> bool:
    return tensor.endswith(_CONVOLUTIONS)


def is_vector(tensor: str) -> bool:
    return tensor.endswith(_VECTORS)


def check_quantize(name: str) -> str:
    """Returns `name` if `--quantize` knows it. Raises UsageError otherwise."""
    if not isinstance(name, str) or name not in QUANTIZE_FORMATS:
        raise UsageError(f"quantize is {shown(name)}; expected one of {', '.join(QUANTIZE_FORMATS)}")
    return name


def target_format(tensor: str, shape: tuple[int, ...], quantize: str) -> str | None:
    """Returns the format that `--quantize quantize` gives a tensor (Hugging Face name). None: unchanged (a norm, a
    router, a convolution, a bias).

    Raises UsageError, with the tensor name, if rows are not a whole number of blocks.
    """
    if len(shape) < 2 or is_router(tensor) or is_convolution(tensor) or tensor.endswith(".bias"):
        return None
    format = EMBEDDING_FORMAT if tensor in EMBEDDINGS else QUANTIZE_FORMATS[check_quantize(quantize)]
    block = FORMATS[format].block
    if shape[-1] % block:
        others = [name for name, other in QUANTIZE_FORMATS.items() if shape[-1] % FORMATS[other].block == 0]
        raise UsageError(
            f"tensor {tensor} has rows of {shape[-1]} values, which {quantize} cannot hold: it needs a multiple of "
            f"{block}; " + (f"use --quantize {' or '.join(others)}" if others else "load it without --quantize")
        )
    return format


def warn_of_rounding_again(tensors: Iterable[TensorInfo], quantize: str) -> None:
    """Logs a warning if `--quantize quantize` rounds quantised weights again. 8 bits lose next to nothing."""
    again = {
        tensor.format
        for tensor in tensors
        if tensor.format not in FLOAT_FORMATS
        and target_format(tensor.name, tensor.shape, quantize) not in (None, EMBEDDING_FORMAT, tensor.format)
    }
    if again:
        _log.warning(
            "the weights are quantised already (%s), and %s rounds them again, which may cost far more than either "
            "alone; quantise a file with 16 bits, or leave out --quantize",
            ", ".join(sorted(again)),
            quantize,
        )


def quantize_rows(values: np.ndarray, format: str, importance: np.ndarray | None = None) -> np.ndarray:
    """Quantises float32 [n_rows, k] to uint8 [n_rows, row_bytes] in `format`, a value in QUANTIZE_FORMATS.

    importance: float32, broadcast over values: how much an error counts; 8 bits ignore it. None: all errors alike.

    Raises CheckpointError for values that are not finite or too large for float16 scales.
    """
    n_rows = len(values)
    per_block = FORMATS[format].block
    blocks = np.ascontiguousarray(values, np.float32).reshape(-1, per_block)
    with np.errstate(over="ignore", invalid="ignore"):
        largest = np.max(np.abs(blocks), initial=0.0)
    if not np.isfinite(largest) or largest > 65504.0 * 7:
        raise CheckpointError(
            f"a weight is {largest}, too large for {format}; expected finite weights of ordinary size"
        )
    weight = None
    if importance is not None:
        columns = np.broadcast_to(importance, values.shape).reshape(blocks.shape)
        weight = columns * np.sqrt(blocks * blocks + np.mean(blocks * blocks, axis=1, keepdims=True))
    return _QUANTIZERS[format](blocks, weight).reshape(n_rows, -1)


def _halves(x: np.ndarray) -> np.ndarray:
    """Returns float32 [n] as float16 bytes, uint8 [n, 2]."""
    return x.astype("<f2").view(np.uint8).reshape(-1, 2)


def _inverse(x: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        inverse: np.ndarray = np.where(x == 0, np.float32(0), np.float32(1) / x)
    return inverse


def _round_away(x: np.ndarray) -> np.ndarray:
    """Rounds like C's roundf: halves away from zero."""
    rounded: np.ndarray = np.trunc(x + np.copysign(np.float32(0.5), x))
    return rounded


def _q8_0(blocks: np.ndarray, weight: np.ndarray | None) -> np.ndarray:
    d = np.max(np.abs(blocks), axis=1) / np.float32(127)
    q = _round_away(blocks * _inverse(d)[:, None]).astype(np.int8)
    return np.concatenate([_halves(d), q.view(np.uint8)], axis=1)


def _q4_0(blocks: np.ndarray, weight: np.ndarray | None) -> np.ndarray:
    at = np.argmax(np.abs(blocks), axis=1)
    d = np.take_along_axis(blocks, at[:, None], axis=1)[:, 0] / np.float32(-8)
    if weight is not None:
        d = _best_scale(blocks, weight, d).astype("<f2").astype(np.float32)
    q = np.clip(np.trunc(blocks * _inverse(d)[:, None] + np.float32(8.5)), 0, 15).astype(np.uint8)
    return np.concatenate([_halves(d), q[:, :16] | q[:, 16:] << 4], axis=1)


def _best_scale(x: np.ndarray, weight: np.ndarray, start: np.ndarray) -> np.ndarray:
    """Returns the scales float32 [n] for x [n, 32] ~ scale q, q in -8..7, with the least weighted square error.

    The search tries scales around `start` [n], and refits each to its q by least squares.
    """
    best, best_error = start, np.full(start.shape, np.inf, np.float32)
    for factor in np.linspace(0.8, 1.2, 17, dtype=np.float32):
        q = np.clip(np.rint(x * _inverse(start * factor)[:, None]), -8, 7)
        wq = weight * q
        scale = (wq * x).sum(1) * _inverse((wq * q).sum(1))
        error = (weight * (q * scale[:, None] - x) ** 2).sum(1)
        better = error < best_error
        best_error, best = np.where(better, error, best_error), np.where(better, scale, best)
    return best.astype(np.float32)


def _q4_k(blocks: np.ndarray, weight: np.ndarray | None) -> np.ndarray:
    x = blocks.reshape(-1, 8, 32)
    scale, minimum = _scale_and_min(x, None if weight is None else weight.reshape(x.shape))
    d, d_min = scale.max(axis=1) / np.float32(63), minimum.max(axis=1) / np.float32(63)
    sc = np.rint(scale * _inverse(d)[:, None]).astype(np.uint8)
    mn = np.rint(minimum * _inverse(d_min)[:, None]).astype(np.uint8)
    halves = np.concatenate([_halves(d), _halves(d_min)], axis=1)
    stored = halves.view("<f2").astype(np.float32)  # the scales as a reader will see them
    step, offset = stored[:, :1] * sc, stored[:, 1:] * mn
    q = np.clip(np.rint((x + offset[..., None]) * _inverse(step)[..., None]), 0, 15).astype(np.uint8)

    # 6 bits each; the last four scales and minima store their upper two bits in the first eight bytes
    packed = np.empty((len(x), 12), np.uint8)
    packed[:, 0:4] = sc[:, :4] | sc[:, 4:] >> 4 << 6
    packed[:, 4:8] = mn[:, :4] | mn[:, 4:] >> 4 << 6
    packed[:, 8:12] = (sc[:, 4:] & 15) | mn[:, 4:] << 4
    nibbles = (q[:, 0::2] | q[:, 1::2] << 4).reshape(len(x), 128)
    return np.concatenate([halves, packed, nibbles], axis=1)


def _scale_and_min(x: np.ndarray, weight: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Fits (scale, minimum >= 0) [..., groups] with x ~ q scale - minimum, q in 0..15, by weighted least squares.

    The search starts from several ranges, some clipping the extremes slightly. Each start is refined by refitting scale
    and minimum to its q, and the best fit wins. weight: of each value's square error; None: its magnitude plus the root
    mean square of its group.
    """
    if weight is None:
        weight = np.abs(x) + np.sqrt(np.mean(x * x, axis=-1, keepdims=True))
    low, high = np.minimum(x.min(axis=-1), 0), np.maximum(x.max(axis=-1), 0)
    best_scale, best_min = (high - low) / np.float32(15), -low
    best_error = np.full(low.shape, np.inf, np.float32)
    sum_w, sum_wx = weight.sum(-1), (weight * x).sum(-1)
    for cut in np.linspace(-1.0, 1.0, 6, dtype=np.float32):
        scale, minimum = (high - low) / (np.float32(15) + cut), -low
        for refit in (True, False):
            q = np.clip(np.rint((x + minimum[..., None]) * _inverse(scale)[..., None]), 0, 15)
            error = (weight * (q * scale[..., None] - minimum[..., None] - x) ** 2).sum(-1)
            better = error < best_error
            best_error = np.where(better, error, best_error)
            best_scale, best_min = np.where(better, scale, best_scale), np.where(better, minimum, best_min)
            if not refit:
                break
            wq = weight * q
            sum_q, sum_qq, sum_qx = wq.sum(-1), (wq * q).sum(-1), (wq * x).sum(-1)
            det = sum_w * sum_qq - sum_q * sum_q
            solvable = det > 0
            inverse = _inverse(np.where(solvable, det, 0).astype(np.float32))
            scale_fit = (sum_w * sum_qx - sum_q * sum_wx) * inverse
            min_fit = (sum_q * sum_qx - sum_qq * sum_wx) * inverse
            negative = min_fit < 0  # minima are stored without a sign
            scale_fit = np.where(negative, sum_qx * _inverse(sum_qq), scale_fit)
            usable = solvable & (scale_fit > 0)
            scale = np.where(usable, scale_fit, scale)
            minimum = np.where(usable, np.maximum(min_fit, 0), minimum)
    return best_scale.astype(np.float32), best_min.astype(np.float32)


_QUANTIZERS: dict[str, Callable[[np.ndarray, np.ndarray | None], np.ndarray]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_K": _q4_k,
}
