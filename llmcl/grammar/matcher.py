"""Answers on their way through grammars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from llmcl.errors import LlmclError, UsageError, one_line

if TYPE_CHECKING:
    from llguidance import LLMatcher


class Matcher:
    """Which tokens may follow those of an answer so far. `CompiledGrammar.matcher` makes one for each answer.

    n_words: 32-bit words of a mask, ceil(vocabulary / 32). kind: of the grammar, for messages.
    """

    def __init__(self, matcher: LLMatcher, n_words: int, kind: str):
        self._matcher = matcher
        self._n_words = n_words
        self._kind = kind

    def mask(self) -> np.ndarray:
        """Bits uint32 [n_words] of the tokens that may come next: see `LogitBias.allow`. At least one is set.

        Text that the grammar leaves no choice of has one token at a time, as the tokenizer would cut it.

        Raises UsageError where that takes more work than a step may, or nothing may follow.
        """
        return self._mask(self._matcher)

    def reset(self) -> None:
        """The answer begins anew."""
        self._matcher.reset()

    def accept(self, tokens: Sequence[int]) -> None:
        """The answer goes on with these tokens. What comes after its end counts for nothing.

        Raises UsageError for one that may not come.
        """
        for token in tokens:
            self._consume(self._matcher, token)

    def n_allowed(self, draft: Sequence[int]) -> int:
        """How many of the first tokens of a draft may come next, one after the other."""
        return self._matcher.validate_tokens([int(token) for token in draft])

    def masks_along(self, draft: Sequence[int]) -> list[np.ndarray]:
        """The masks before each token of a draft that may come next, and the one after the last. Raises as `mask`."""
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
        if reason.startswith("NoExtension"):  # as of a class of characters that has none
            return self._no_token()
        return UsageError(f"{self._kind} cannot be followed any further: {reason}; make it simpler")


def masks_of(matchers: Sequence[Matcher]) -> list[np.ndarray | LlmclError]:
    """The mask of each of several answers, as of `Matcher.mask`, or what that raises."""
    if len(matchers) < 2 or not all(isinstance(matcher, Matcher) for matcher in matchers):
        return [_mask_or_error(matcher) for matcher in matchers]
    masks = np.zeros((len(matchers), matchers[0]._n_words), np.uint32)
    address, nbytes = masks.ctypes.data, masks.strides[0]
    inner = [matcher._matcher for matcher in matchers]
    for i, one in enumerate(inner):
        one.unsafe_compute_mask_ptr(address + i * nbytes, nbytes)
    found: list[np.ndarray | LlmclError] = []
    for matcher, mask, has_any in zip(matchers, masks, masks.max(axis=1) > 0, strict=True):
        error = matcher._error(matcher._matcher) or (None if has_any else matcher._no_token())
        found.append(mask if error is None else error)
    return found


def _mask_or_error(matcher: Matcher) -> np.ndarray | LlmclError:
    try:
        return matcher.mask()
    except LlmclError as error:
        return error
