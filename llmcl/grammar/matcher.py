"""Tracks an answer's progress through a grammar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from llmcl.errors import LlmclError, UsageError, one_line

if TYPE_CHECKING:
    from llguidance import LLMatcher


class Matcher:
    """Decides which tokens may come next in one answer. `CompiledGrammar.matcher` creates a matcher per answer.

    n_words: 32-bit words per mask, ceil(vocabulary / 32). kind: the grammar's kind, for messages.
    """

    def __init__(self, matcher: LLMatcher, n_words: int, kind: str):
        self._matcher = matcher
        self._n_words = n_words
        self._kind = kind

    def mask(self) -> np.ndarray:
        """Returns the next token's mask, uint32 [n_words] (see `LogitBias.allow`), with at least one bit set.

        If the grammar forces the text, the mask allows a single token at a time, split as the tokenizer would.

        Raises UsageError if a step would take too much work, or if no token may follow.
        """
        return self._mask(self._matcher)

    def reset(self) -> None:
        """Returns to the start of the answer."""
        self._matcher.reset()

    def accept(self, tokens: Sequence[int]) -> None:
        """Advances the answer by these tokens. Tokens after the end are ignored.

        Raises UsageError for a token that the grammar forbids.
        """
        for token in tokens:
            self._consume(self._matcher, token)

    def n_allowed(self, draft: Sequence[int]) -> int:
        """Returns how many draft tokens, from the first, the grammar accepts in sequence."""
        return self._matcher.validate_tokens([int(token) for token in draft])

    def masks_along(self, draft: Sequence[int]) -> list[np.ndarray]:
        """Returns the masks before each draft token and after the last. The grammar must accept the draft. Raises as
        `mask`."""
        ahead = self._matcher.deep_copy()
        masks = [self._mask(ahead)]
        for token in draft:
            self._consume(ahead, token)
            masks.append(self._mask(ahead))
        return masks

    def _mask(self, matcher: LLMatcher) -> np.ndarray:
        mask = np.zeros(self._n_words, np.uint32)
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._check(matcher)
        if not mask.any():
            raise self._no_token()
        return mask

    def _no_token(self) -> UsageError:
        return UsageError(f"{self._kind}: no token of the vocabulary can follow the answer so far; change it")

    def _consume(self, matcher: LLMatcher, token: int) -> None:
        if not matcher.consume_token(int(token)) and not matcher.is_error():
            return
        self._check(matcher)

    def _check(self, matcher: LLMatcher) -> None:
        if (error := self._error(matcher)) is not None:
            raise error

    def _error(self, matcher: LLMatcher) -> UsageError | None:
        if not matcher.is_error():
            return None
        reason = one_line(matcher.get_error().partition("\n")[0], 300)
        if reason.startswith("NoExtension"):  # for example an empty character class
            return self._no_token()
        return UsageError(f"{self._kind} cannot be followed any further: {reason}; make it simpler")


class HasMask(Protocol):
    def mask(self) -> np.ndarray: ...


def masks_of(matchers: Sequence[HasMask]) -> list[np.ndarray | LlmclError]:
    """Returns for each matcher its `Matcher.mask`, or the error raised instead."""
    ours = [matcher for matcher in matchers if isinstance(matcher, Matcher)]
    if len(matchers) < 2 or len(ours) < len(matchers):
        return [_mask_or_error(matcher) for matcher in matchers]
    masks = np.zeros((len(ours), ours[0]._n_words), np.uint32)
    address, nbytes = masks.ctypes.data, masks.strides[0]
    for i, matcher in enumerate(ours):
        matcher._matcher.unsafe_compute_mask_ptr(address + i * nbytes, nbytes)
    results: list[np.ndarray | LlmclError] = []
    for matcher, mask, has_any in zip(ours, masks, masks.max(axis=1) > 0, strict=True):
        error = matcher._error(matcher._matcher) or (None if has_any else matcher._no_token())
        results.append(mask if error is None else error)
    return results


def _mask_or_error(matcher: HasMask) -> np.ndarray | LlmclError:
    try:
        return matcher.mask()
    except LlmclError as error:
        return error
