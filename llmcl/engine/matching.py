"""The hook for structured output: what the token loops ask of `llmcl/grammar/`, which nothing else here imports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from llmcl.errors import LlmclError

if TYPE_CHECKING:
    from llmcl.grammar import Grammar as Grammar
    from llmcl.grammar import Grammars as Grammars
    from llmcl.tokenizer import Tokenizer


class TokenMatcher(Protocol):
    """Decides which tokens may come next in one answer."""

    def mask(self) -> np.ndarray:
        """Returns the next token's mask (see `LogitBias.allow`). Raises UsageError if no token may follow."""
        ...

    def reset(self) -> None:
        """Returns to the start of the answer."""

    def accept(self, tokens: Sequence[int]) -> None:
        """Advances the answer by these tokens. Raises UsageError for a token that may not come."""

    def n_allowed(self, draft: Sequence[int]) -> int:
        """Returns how many draft tokens, from the first, may come in sequence."""
        ...

    def masks_along(self, draft: Sequence[int]) -> list[np.ndarray]:
        """Returns the masks before each draft token and after the last. Raises as `mask`."""
        ...


class Compiled(Protocol):
    """A compiled schema, expression or grammar."""

    def matcher(self) -> TokenMatcher:
        """Returns a matcher for one answer."""
        ...


def masks_of(matchers: Sequence[TokenMatcher]) -> list[np.ndarray | LlmclError]:
    """Returns for each matcher its mask, or the error raised instead."""
    from llmcl.grammar import masks_of

    return masks_of(matchers) if matchers else []


def grammar_of(options: Any) -> Grammar | None:
    """Returns the grammar for an answer with these options, or None. Raises UsageError for more than one."""
    if all(value is None for value in (options.schema, options.regex, options.grammar, options.choices)):
        return None
    from llmcl.grammar import Grammar

    return Grammar.of(schema=options.schema, regex=options.regex, grammar=options.grammar, choices=options.choices)


def grammars_for(tokenizer: Tokenizer | None, vocab_size: int) -> Grammars:
    """Returns the compiler for a model's grammars."""
    from llmcl.grammar import Grammars

    return Grammars(tokenizer, vocab_size)
