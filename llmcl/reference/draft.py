"""Speculative decoding: rows that verify drafted tokens, and which of these are accepted.

A row of such a step is the token sampled last or a drafted one. Leviathan et al., "Fast Inference from Transformers via
Speculative Decoding" (2023), accept by chance. Here what each row samples is fixed by its seed and step, so a drafted
token is accepted if it is what would have been sampled anyway.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from llmcl.reference.arrays import Array


def draft_rows(draft: Sequence[int], last: int, position: int, step: int) -> tuple[list[int], list[tuple[int, int]]]:
    """The tokens of the rows, and position and step number of each: `last`, then the drafted tokens."""
    return [last, *draft], [(position + r, step + r) for r in range(1 + len(draft))]


def draft_last_seen(last_seen: Array, tokens: Sequence[int], position: int) -> NDArray[np.int64]:
    """Latest positions [vocab] before a step with these tokens from `position` on -> [n, vocab], as each row knows."""
    rows = np.tile(np.asarray(last_seen, np.int64), (len(tokens), 1))
    for i, token in enumerate(tokens):
        rows[i:, token] = position + i
    return rows


def draft_counts(counts: Array, tokens: Sequence[int]) -> NDArray[np.int64]:
    """How often the answer has each token [vocab] before a step with these tokens, of which the first is counted ->
    [n, vocab], as each row knows.
    """
    rows = np.tile(np.asarray(counts, np.int64), (len(tokens), 1))
    for i, token in enumerate(tokens[1:], start=1):
        rows[i:, token] += 1
    return rows


def accept_draft(tokens: Sequence[int], row_sampled: Sequence[int]) -> list[int]:
    """What is sampled: that of row 0, and of each row whose token is what the row before sampled, up to the first
    that is not.
    """
    sampled = [row_sampled[0]]
    for token, following in zip(tokens[1:], row_sampled[1:], strict=True):
        if token != sampled[-1]:
            break
        sampled.append(following)
    return sampled
