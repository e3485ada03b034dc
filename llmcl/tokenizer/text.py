"""Token ids to text as they arrive: whole characters only, and never a part of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence

from llmcl.errors import UsageError, shown


class Detokenizer:
    """Turns token ids into text one by one. All `push` results and the `flush` together are the decoded text.

    Every token stands for a run of bytes, so nothing is ever decoded twice: a UTF-8 decoder keeps the one to
    three bytes of a character that is not complete yet. Bytes that can never become a character give U+FFFD,
    as `bytes.decode("utf-8", "replace")` does.

    Args:
        token_bytes: the bytes a token id stands for; empty for special tokens.
        strip_leading_space: leave out one space at the start of the text. SentencePiece models write a word
            as space + word, the first word of a text included.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], *, strip_leading_space: bool = False) -> None:
        self._token_bytes = token_bytes
        self._strip_leading_space = strip_leading_space
        self._at_start = True
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that became final with this token; often empty, never part of a character."""
        return self._from_start(self._utf8.decode(self._token_bytes(token_id)))

    def flush(self) -> str:
        """What an incomplete character at the end decodes to. The next `push` begins another text."""
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
    """Ends a stream of text before the first stop string that it completes.

    "First" is the stop string that ends earliest, and of those the longest one; so the answer depends on the
    text alone and not on how it was cut into pieces. At most `max(len(stop)) - 1` characters are held back.

    Args:
        stop: the stop strings; none at all lets everything pass.
    Raises:
        UsageError: a stop string is empty, or `stop` is something else.
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
        """The text that is safe to show, and whether a stop string is complete; text after it is dropped."""
        if self._matched or not self._stop:
            return ("", True) if self._matched else (text, False)
        text = self._held + text
        found = [(start + len(stop), start) for stop in self._stop if (start := text.find(stop)) >= 0]
        if found:
            self._matched, self._held = True, ""
            return text[: min(found)[1]], True
        n_held = self._n_held_back(text)
        self._held = text[len(text) - n_held :]
        return text[: len(text) - n_held], False

    def flush(self) -> str:
        """What was held back, because the text ended before a stop string was complete."""
        held, self._held = self._held, ""
        return held

    def _n_held_back(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for n in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-n:]) for stop in self._stop):
                return n
        return 0
