"""Converts a model's vocabulary for llguidance."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

from llguidance import LLTokenizer

from llmcl.errors import LlmclError, UsageError
from llmcl.tokenizer import Tokenizer


class _Tokens:
    """The tokenizer interface that llguidance expects, with llguidance's names."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        self.tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.n_vocab)]
        self.tokens += [b""] * (vocab_size - len(self.tokens))
        special = {i for i in range(tokenizer.n_vocab) if not self.tokens[i] and tokenizer.token(i)}
        special |= tokenizer.eos_token_ids
        for i in special:
            self.tokens[i] = (tokenizer.token(i) or f"<{i}>").encode()
        self.special_token_ids = sorted(special)
        self.eos_token_id = min(tokenizer.eos_token_ids)
        self._tokenize = tokenize_exactly(tokenizer, {t: i for i, t in enumerate(self.tokens) if i not in special})

    def __call__(self, text: str | bytes) -> list[int]:
        return self._tokenize(text if isinstance(text, str) else text.decode("utf-8", "replace"))


def tokenize_exactly(tokenizer: Tokenizer, id_of: dict[bytes, int]) -> Callable[[str], list[int]]:
    """Returns a tokenize function for text in the middle of an answer: the tokens' bytes join to exactly the text.

    Used for text forced by a grammar; never raises. Where the tokenizer would add a space or a special token, it takes
    the longest matching token each time. id_of: ids of all tokens except special tokens.
    """
    longest = max(map(len, id_of), default=0)

    def longest_tokens(data: bytes) -> list[int]:
        ids: list[int] = []
        at = 0
        while at < len(data):
            sizes = range(min(longest, len(data) - at), 0, -1)
            size = next((n for n in sizes if data[at : at + n] in id_of), 0)
            if not size:
                return ids  # no vocabulary lacks a byte; if one does, the rest stays unknown
            ids.append(id_of[data[at : at + size]])
            at += size
        return ids

    def tokenize(text: str) -> list[int]:
        data, before = text.encode("utf-8", "replace"), b"\n"
        try:
            # A line break precedes the text, for tokenizers that put a space before the first word.
            ids = tokenizer.encode(before.decode() + text, add_special_tokens=False)
        except LlmclError:
            return longest_tokens(data)
        parts = [tokenizer.token_bytes(i) for i in ids]
        for n, size in enumerate(accumulate(map(len, parts), initial=0)):
            if b"".join(parts[:n]).strip(b" ") == before and b"".join(parts[n:]) == data:
                return ids[n:] if all(parts[n:]) else longest_tokens(data)
            if size > len(before) + 1:
                break
        return longest_tokens(data)

    return tokenize


def llguidance_tokenizer(tokenizer: Tokenizer, vocab_size: int) -> LLTokenizer:
    """Builds the llguidance tokenizer; takes a second for 128 thousand tokens. vocab_size: the model's, which may
    include ids without a token.

    Raises UsageError for a model without an end-of-text token.
    """
    if not tokenizer.eos_token_ids:
        raise UsageError("the model has no end-of-text token, so an answer that matches a grammar could not end")
    tokens = _Tokens(tokenizer, vocab_size)
    return LLTokenizer(tokens, eos_token=sorted(tokenizer.eos_token_ids))  # type: ignore[arg-type]
