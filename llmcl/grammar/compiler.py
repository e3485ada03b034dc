"""Compiles grammars for a model's vocabulary and caches the result."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

from llmcl.errors import UsageError
from llmcl.grammar.grammar import Grammar
from llmcl.grammar.matcher import Matcher

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from llmcl.tokenizer import Tokenizer

MOST_KEPT = 32


class CompiledGrammar:
    """A compiled grammar. Creates matchers any number of times, from any thread."""

    def __init__(self, start: LLMatcher, n_words: int, kind: str):
        self._start = start
        self._n_words = n_words
        self._kind = kind

    def matcher(self) -> Matcher:
        """Returns a matcher at the start of an answer."""
        return Matcher(self._start.deep_copy(), self._n_words, self._kind)


class Grammars:
    """Compiles grammars for one model. Thread-safe: methods take a lock.

    tokenizer: None for a model with random weights; every grammar is then refused. vocab_size: rows in the logits.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int):
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._tokens: LLTokenizer | None = None
        self._kept: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Returns the compiled grammar, cached if possible. The first call for a model takes a second more, for the
        vocabulary.

        Raises UsageError if llguidance is missing, refuses the grammar (with the reason) or exceeds the time or memory
        limit, and for a model without a tokenizer or an end-of-text token.
        """
        with self._lock:
            compiled = self._kept.get(grammar)
            if compiled is None:
                compiled = self._kept[grammar] = self._compile(grammar)
                if len(self._kept) > MOST_KEPT:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(grammar)
            return compiled

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        if self._tokenizer is None:
            raise UsageError(f"{grammar.kind}: the model has no tokenizer, so its answers have no text to match")
        try:
            from llguidance import LLMatcher, LLParserLimits
        except ModuleNotFoundError as error:
            raise UsageError(f'{grammar.kind} needs the package llguidance: pip install "llmcl[grammar]"') from error
        from llmcl.grammar.trial import LIMITS, compiled_in_time, refused
        from llmcl.grammar.vocabulary import llguidance_tokenizer

        text = compiled_in_time(grammar)
        if self._tokens is None:
            self._tokens = llguidance_tokenizer(self._tokenizer, self._vocab_size)
        limits = LLParserLimits(**LIMITS)  # type: ignore[arg-type]
        start = LLMatcher(self._tokens, text, log_level=0, limits=limits)
        if start.is_error():
            raise refused(grammar, start.get_error())
        return CompiledGrammar(start, -(-self._vocab_size // 32), grammar.kind)
