"""Turns the strings at which DRY's repetitions end into sequences of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

from llmcl.errors import UsageError, shown
from llmcl.ops.dry import Breakers
from llmcl.ops.sample import SamplingParams
from llmcl.tokenizer import Tokenizer

MAX_STRINGS, MAX_BYTES = 64, 40  # a string's length is llama.cpp's limit
MAX_KEPT = 16


def checked_breakers(strings: object) -> tuple[str, ...]:
    """Returns the strings as a tuple. Raises UsageError for anything else."""
    few = isinstance(strings, (list, tuple)) and len(strings) <= MAX_STRINGS
    if not few or not all(map(_is_breaker, strings)):  # type: ignore[call-overload]
        expected = f"a list of up to {MAX_STRINGS} strings of 1 to {MAX_BYTES} bytes in UTF-8"
        raise UsageError(f"dry_sequence_breakers is {shown(strings)}; expected {expected}")
    return tuple(strings)  # type: ignore[arg-type]


def _is_breaker(text: object) -> bool:
    try:
        return isinstance(text, str) and 0 < len(text.encode()) <= MAX_BYTES
    except UnicodeEncodeError:  # half a surrogate pair
        return False


class _Vocabulary:
    """A model's tokens as bytes. Special tokens have the text that the vocabulary gives them."""

    def __init__(self, tokenizer: Tokenizer):
        self.texts = [tokenizer.token_bytes(i) or (tokenizer.token(i) or "").encode() for i in range(tokenizer.n_vocab)]
        self.by_last_byte: dict[int, list[int]] = {}
        for i, text in enumerate(self.texts):
            if text:
                self.by_last_byte.setdefault(text[-1], []).append(i)
        self.breakers: dict[tuple[str, ...], Breakers] = {}  # the results so far, MAX_KEPT at most


_vocabularies: WeakKeyDictionary[Tokenizer, _Vocabulary] = WeakKeyDictionary()


def with_breakers(params: SamplingParams, strings: Sequence[str], tokenizer: Tokenizer | None) -> SamplingParams:
    """Returns the parameters with DRY's breakers. Without a tokenizer, tokens have no text and nothing is a breaker."""
    strings = tuple(strings)
    if not params.repels or tokenizer is None or not strings:
        return params
    if (vocabulary := _vocabularies.get(tokenizer)) is None:
        vocabulary = _vocabularies[tokenizer] = _Vocabulary(tokenizer)
    if (breakers := vocabulary.breakers.get(strings)) is None:
        sequences = (each for text in strings for each in _sequences(tokenizer, vocabulary, text))
        breakers = Breakers.of(sequences, len(vocabulary.texts))
        if len(vocabulary.breakers) >= MAX_KEPT:
            vocabulary.breakers.clear()
        vocabulary.breakers[strings] = breakers
    return replace(params, dry_breakers=breakers)


def _sequences(tokenizer: Tokenizer, vocabulary: _Vocabulary, text: str) -> Iterator[tuple[int, ...]]:
    """Yields each token that contains the text, and each token that ends with its beginning, with the rest's tokens."""
    whole = text.encode()
    yield from ((i,) for i, token in enumerate(vocabulary.texts) if whole in token)
    for n in range(1, len(text)):
        begun, tail = text[:n].encode(), tokenizer.encode(text[n:], False)
        for i in vocabulary.by_last_byte.get(begun[-1], ()):
            if vocabulary.texts[i].endswith(begun) and whole not in vocabulary.texts[i]:
                yield i, *tail
