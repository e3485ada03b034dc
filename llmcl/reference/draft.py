"""Speculative decoding: rows that verify drafted tokens, and the rule for accepting them.

A row in a verifying step holds the last sampled token or a drafted token. Leviathan et al., "Fast Inference from
Transformers via Speculative Decoding" (2023), accept by chance. Here each row's sample is fixed by its seed and step,
so a drafted token is accepted if sampling would have produced it anyway.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from llmcl.reference.arrays import Array


def draft_rows(draft: Sequence[int], last: int, position: int, step: int) -> tuple[list[int], list[tuple[int, int]]]:
    """Returns the rows' tokens (`last`, then the draft), and each row's position and step number."""
    return [last, *draft], [(position + r, step + r) for r in range(1 + len(draft))]


def draft_last_seen(last_seen: Array, tokens: Sequence[int], position: int) -> NDArray[np.int64]:
    """Latest positions [vocab] before a step with these tokens from `position` on -> [n, vocab], as seen by
    each row."""
    rows = np.tile(np.asarray(last_seen, np.int64), (len(tokens), 1))
    for i, token in enumerate(tokens):
        rows[i:, token] = position + i
    return rows


def draft_counts(counts: Array, tokens: Sequence[int]) -> NDArray[np.int64]:
    """Token counts [vocab] of the answer before a step with these tokens (the first already counted) -> [n, vocab], as
    seen by each row.
    """
    rows = np.tile(np.asarray(counts, np.int64), (len(tokens), 1))
    for i, token in enumerate(tokens[1:], start=1):
        rows[i:, token] += 1
    return rows


def accept_draft(tokens: Sequence[int], row_sampled: Sequence[int]) -> list[int]:
    """Returns the accepted samples: row 0's, then each row's sample as long as the row's token equals the previous
    sample.
    """
    sampled = [row_sampled[0]]
    for token, following in zip(tokens[1:], row_sampled[1:], strict=True):
        if token != sampled[-1]:
            break
        sampled.append(following)
    return sampled
