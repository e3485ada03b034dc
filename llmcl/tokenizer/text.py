"""Converts arriving token ids to text: whole characters only, and never part of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence

from llmcl.errors import UsageError, shown


class Detokenizer:
    """Converts token ids to text one by one. All `push` results plus the `flush` result are the decoded text.

    Every token stands for a run of bytes, so nothing is decoded twice: a UTF-8 decoder keeps the one to three bytes of
    an incomplete character. Invalid bytes give U+FFFD, like `bytes.decode("utf-8", "replace")`.

    Args:
        token_bytes: returns a token id's bytes; empty for special tokens.
        strip_leading_space: drop one space at the start of the text. SentencePiece models write a word
            as space + word, including the first word of a text.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], *, strip_leading_space: bool = False) -> None:
        self._token_bytes = token_bytes
        self._strip_leading_space = strip_leading_space
        self._at_start = True
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Returns the text completed by this token; often empty, never part of a character."""
        return self._from_start(self._utf8.decode(self._token_bytes(token_id)))

    def flush(self) -> str:
        """Decodes an incomplete character at the end. The next `push` begins a new text."""
        text = self._from_start(self._utf8.decode(b"", final=True))
        self._utf8.reset()
        self._at_start = True
        return text

    def _from_start(self, text: str) -> str:
        if text and self._at_start:
            self._at_start = False
            if self._strip_leading_space:
                return text.removeprefix(" ")
        return text


class StopMatcher:
    """Ends a stream of text before the first completed stop string.

    "First" means the stop string that ends earliest, and among several the longest, so the result depends on the text
    alone and not on the pieces. At most `max(len(stop)) - 1` characters are held back.

    Args:
        stop: the stop strings; with none everything passes.

    Raises:
        UsageError: a stop string is empty, or `stop` has another type.
    """

    def __init__(self, stop: str | Sequence[str]) -> None:
        self._stop = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, Iterable) else (None,)
        if not all(isinstance(text, str) for text in self._stop):
            raise UsageError(f"stop is {shown(stop)}; expected a string or several")
        if "" in self._stop:
            raise UsageError("A stop string is empty, which would stop before the first character: leave it out.")
        self._longest = max(map(len, self._stop), default=0)
        self._held = ""
        self._matched = False

    def push(self, text: str) -> tuple[str, bool]:
        """Returns the text that is safe to show, and whether a stop string is complete; later text is dropped."""
        if self._matched or not self._stop:
            return ("", True) if self._matched else (text, False)
        text = self._held + text
        matches = [(start + len(stop), start) for stop in self._stop if (start := text.find(stop)) >= 0]
        if matches:
            self._matched, self._held = True, ""
            return text[: min(matches)[1]], True
        n_held = self._n_held_back(text)
        self._held = text[len(text) - n_held :]
        return text[: len(text) - n_held], False

    def flush(self) -> str:
        """Returns the text held back when the stream ended inside a possible stop string."""
        held, self._held = self._held, ""
        return held

    def _n_held_back(self, text: str) -> int:
        """Returns the length of the longest suffix of `text` that begins a stop string."""
        for n in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-n:]) for stop in self._stop):
                return n
        return 0
