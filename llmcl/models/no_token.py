"""Explains on the host why no token could be chosen. Runs only after the failure, so normal steps pay nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from llmcl.errors import DeviceError
from llmcl.kernels.common.dtype import QUANTIZED
from llmcl.models.model import Model
from llmcl.models.paged_kv_cache import PagedKVCache
from llmcl.models.sequence import SequenceState

MAX_SQUARE = 1.8e19  # the square of a larger number overflows float32
FLOAT16_MOST = 65504


def check_logits(model: Model, sequence: SequenceState, logits: np.ndarray, first: int = 0) -> None:
    """Raises DeviceError for the first row of logits [n, vocab] without probabilities: with a NaN, a positive infinity,
    or only negative infinities. first: position of the token before row 0.
    """
    bad = np.flatnonzero(~np.isfinite(logits.max(axis=1)))
    if bad.size:
        what = f"no probabilities after token {first + bad[0]} of the text"
        raise DeviceError(why_no_token(model, sequence, logits[bad[0]], what))


def check_scored(model: Model, sequence: SequenceState, token_ids: Sequence[int]) -> None:
    """Recomputes the logits of token_ids, chunk by chunk, for an empty sequence. Raises the errors of
    `check_logits`.
    """
    first, vocab_size = 0, model.config.vocab_size
    for buffer, n in model.logit_chunks(sequence, token_ids):
        check_logits(model, sequence, model.device.read(buffer, np.float32, (n, vocab_size)), first)
        first += n


def why_no_token(
    model: Model, sequence: SequenceState, logits: np.ndarray | None = None, what: str = "no token can be chosen"
) -> str:
    """Returns a message for the user: the state of the logits, the first bad layer, and possible remedies.

    logits: [vocab]; None uses the last step's logits. what: the consequence, as the message's first words.
    """
    if logits is None:
        logits = model.device.read(model.act.logits, np.float32, (model.config.vocab_size,))
    return f"{what}: {_logits(logits)}; {_cause(model, sequence)}"


def _logits(logits: np.ndarray) -> str:
    for what, wrong in ("NaN", np.isnan(logits)), ("infinite", np.isposinf(logits)), ("-infinity", np.isneginf(logits)):
        if wrong.any():
            count = "all" if wrong.all() else f"{int(wrong.sum())} of"
            return f"{count} {logits.size} logits are {what}"
    return "the scores of the tokens overflow float32"


def _cause(model: Model, sequence: SequenceState) -> str:
    blocks = (block for layer in model.weights.layers for block in layer)
    remedy = _remedy({part.dtype for block in blocks for weight in block.matrices for part in weight.parts})
    for i, cached in enumerate(_cached(model, sequence)):
        for name, numbers in cached.items():
            if model.cache.shape.kv_dtype == "float16" and np.isinf(numbers).any():
                return (
                    f"{name} of layer {i} exceed {FLOAT16_MOST}, the largest number of the float16 KV cache: use "
                    "--kv-dtype bfloat16 (kv_dtype)"
                )
            if not np.isfinite(numbers).all():
                return (
                    f"{name} of layer {i} are the first that are no finite numbers, so what goes into that layer may "
                    f"exceed {MAX_SQUARE}, the largest number whose square float32 holds: {remedy}"
                )
    return f"all keys and values are finite, so the last layers, the weights or the device are at fault: {remedy}"


def _cached(model: Model, sequence: SequenceState) -> Iterator[dict[str, np.ndarray]]:
    """Yields the keys and values, or latents, of each layer for the text so far: [n_kv_heads, n, head_dim]. Yields
    nothing for a quantised cache.
    """
    cache, page_tokens, kv_dtype = model.cache, model.cache.shape.page_tokens, model.cache.shape.kv_dtype
    if kv_dtype in QUANTIZED:
        return
    at = np.arange(sequence.position)
    if isinstance(cache, PagedKVCache):
        at = np.asarray(sequence.pages)[at // page_tokens] * page_tokens + at % page_tokens
    stored = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}[kv_dtype]
    for k, v, shape in zip(cache.k, cache.v, cache.shapes, strict=True):
        if k is None or shape is None:
            yield {}
            continue
        heads, dim = shape.n_kv_heads, shape.head_dim
        if v is None:
            rows = model.device.read(k, stored, (heads, shape.capacity, dim))
            yield {"latents": _widened(rows[:, at], kv_dtype)}
            continue
        keys = model.device.read(k, stored, (heads, shape.capacity // 16, dim, 16)).swapaxes(2, 3)
        values = model.device.read(v, stored, (heads, shape.capacity, dim))
        cached = {"keys": keys.reshape(heads, shape.capacity, dim)[:, at], "values": values[:, at]}
        yield {name: _widened(bits, kv_dtype) for name, bits in cached.items()}


def _widened(bits: np.ndarray, kv_dtype: str) -> np.ndarray:
    """Converts cache bits to floats."""
    return (bits.astype(np.uint32) << 16).view(np.float32) if kv_dtype == "bfloat16" else bits


def _remedy(dtypes: set[str]) -> str:
    if "float16" in dtypes:
        return "use --dtype bfloat16 or float32 (dtype)"
    others = "another --device (`llmcl doctor` checks its kernels), or another checkpoint"
    return f"try {others}" if dtypes == {"float32"} else f"try --dtype float32 (dtype), {others}"
