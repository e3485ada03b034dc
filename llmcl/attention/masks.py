"""Ready-made masks and score functions with PyTorch's signatures; combine masks with `and_masks` and `or_masks`.

A mask_mod returns True for a visible key. Positions, batch and head are int32, scores float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from llmcl.attention.functions import tanh
from llmcl.errors import UsageError, shown

MaskMod = Callable[[Any, Any, Any, Any], Any]
ScoreMod = Callable[[Any, Any, Any, Any, Any], Any]


MAX_WHOLE, MAX_HEADS = (1 << 31) - 1, 1 << 16


def _check_positive(name: str, value: object) -> None:
    if not isinstance(value, (int, float, np.integer, np.floating)) or not 0 < value <= 1e30:
        raise UsageError(f"{name} is {shown(value)}; expected a number above 0")


def _whole(name: str, value: object, least: int = 1, most: int = MAX_WHOLE) -> int:
    if not isinstance(value, (int, np.integer)) or not least <= value <= most:
        raise UsageError(f"{name} is {shown(value)}; expected a whole number, {least} to {most}")
    return int(value)


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """A query sees itself and all earlier keys."""
    return kv_idx <= q_idx


def sliding_window(window: int) -> MaskMod:
    """A query sees itself and the window - 1 keys before it, as in Mistral."""
    _check_positive("window", window)

    def sliding_window_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx <= q_idx) & (q_idx - kv_idx < window)

    return sliding_window_mask


def window_both_ways(window: int) -> MaskMod:
    """A query sees itself and the window - 1 keys on either side, as in EmbeddingGemma."""
    _check_positive("window", window)

    def window_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx - kv_idx < window) & (kv_idx - q_idx < window)

    return window_mask


def prefix_lm(prefix_length: int) -> MaskMod:
    """All queries see the first prefix_length keys; later keys are causal."""

    def prefix_lm_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx < prefix_length) | (kv_idx <= q_idx)

    return prefix_lm_mask


def document(document_ids: Any) -> MaskMod:
    """Queries see all keys in their own document; combine with causal through `and_masks`.

    document_ids: integers [length], a NumPy array or torch tensor with each position's document.
    """
    if len(getattr(document_ids, "shape", ())) != 1:
        raise UsageError(
            f"document_ids has shape {tuple(getattr(document_ids, 'shape', ()))}; expected an array of integers "
            "with one axis, the document of each position"
        )

    def document_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return document_ids[q_idx] == document_ids[kv_idx]

    return document_mask


def neighbourhood(width: int, height: int, radius: int) -> MaskMod:
    """Positions are pixels of a width x height image, row by row. A query sees keys up to radius rows and columns away.

    As in NATTEN, a window at the border is moved inside the image, so every query sees (2 radius + 1)^2 keys if the
    image is large enough.
    """
    width, height, radius = _whole("width", width), _whole("height", height), _whole("radius", radius, 0)
    first_x, last_x = min(radius, width - 1), max(width - 1 - radius, 0)
    first_y, last_y = min(radius, height - 1), max(height - 1 - radius, 0)

    def centre(position: Any, first: int, last: int) -> Any:
        if first > last:  # the window covers the axis: any centre in the middle sees the whole axis
            return (first + last) // 2
        return np.minimum(np.maximum(position, first), last)

    def neighbourhood_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        q_x, q_y = centre(q_idx % width, first_x, last_x), centre(q_idx // width, first_y, last_y)
        return (abs(q_x - kv_idx % width) <= radius) & (abs(q_y - kv_idx // width) <= radius)

    return neighbourhood_mask


def alibi_slopes(n_heads: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Returns float32 [n_heads]: 2^(-8 (h + 1) / n) if n is a power of two. Otherwise the slopes for the power below n,
    then every second slope for the power above n (ALiBi, Press et al., 2021)."""
    n_heads = _whole("n_heads", n_heads, most=MAX_HEADS)
    whole = 1 << (n_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (h + 1) / whole) for h in range(whole)]
    slopes += [2.0 ** (-4.0 * (2 * h + 1) / whole) for h in range(n_heads - whole)]
    return np.asarray(slopes, np.float32)


def alibi(n_heads: int) -> ScoreMod:
    """Adds slope[h] (kv_idx - q_idx): scores fall with distance, at a rate per head."""
    slopes = alibi_slopes(n_heads)

    def alibi_score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + slopes[h] * (kv_idx - q_idx)

    return alibi_score


def soft_cap(cap: float) -> ScoreMod:
    """cap tanh(score / cap): keeps scores between -cap and cap, as in Gemma-2."""
    _check_positive("cap", cap)

    def soft_cap_score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return cap * tanh(score * (1.0 / cap))

    return soft_cap_score
