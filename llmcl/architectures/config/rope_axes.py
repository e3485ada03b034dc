"""Reads which of three positions (time, row, column) rotates each pair of a head, in Qwen-VL models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from llmcl.architectures.config.reader import Reader
from llmcl.architectures.families.family import Family

_AXES = 3
_USUAL = {"chunks": (16, 24, 24), "interleaved": (24, 20, 20)}  # in transformers without mrope_section


def axes_from_hf(rope: Reader, family: Family, n_pairs: int) -> tuple[int, ...]:
    """Returns the axis of each of n_pairs rotated pairs, or () if the model has one axis. rope: the rotary settings."""
    if family.rope_axes is None:
        return ()
    if (flag := rope.get("mrope_interleaved")) is not None:
        is_interleaved = family.rope_axes == "interleaved"
        if rope.flag("mrope_interleaved", default=is_interleaved) != is_interleaved:
            rope.fail("mrope_interleaved", flag, f"{str(is_interleaved).lower()} in {family.hf_class}")
    return _axes(rope, "mrope_section", family, n_pairs)


def axes_from_gguf(read: Reader, architecture: str, family: Family, n_pairs: int) -> tuple[int, ...]:
    """Returns the axes like `axes_from_hf`. GGUF files have a fourth section, which is 0."""
    return () if family.rope_axes is None else _axes(read, f"{architecture}.rope.dimension_sections", family, n_pairs)


def axes_of(sections: Sequence[int], layout: str, n_pairs: int) -> tuple[int, ...]:
    """Returns the axis of each pair. sections: pairs per axis.

    "chunks": the sections follow one another. "interleaved": the axes take turns, and pairs left over are the first's.
    """
    if layout == "chunks":
        return tuple(axis for axis, n in enumerate(sections) for _ in range(n))
    turns = ((pair, pair % _AXES) for pair in range(n_pairs))
    return tuple(axis if pair < _AXES * sections[axis] else 0 for pair, axis in turns)


def _axes(read: Reader, key: str, family: Family, n_pairs: int) -> tuple[int, ...]:
    assert family.rope_axes is not None
    value: Any = read.get(key)
    if value is None:
        sections: Sequence[int] = _USUAL[family.rope_axes]
        return axes_of(sections, family.rope_axes, n_pairs) if sum(sections) == n_pairs else ()
    sections = value.tolist() if isinstance(value, np.ndarray) else value
    if (
        not isinstance(sections, list)
        or any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in sections)
        or sum(sections) != n_pairs
        or any(sections[_AXES:])
        or len(sections) < _AXES
    ):
        read.fail(key, value, f"pairs for time, rows and columns, in all {n_pairs} (half of the rotated dimensions)")
    return axes_of(sections[:_AXES], family.rope_axes, n_pairs)
