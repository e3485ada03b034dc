"""Shows an answer in channels to people: converted to the format with <think> tags."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from llmcl.tokenizer.answer_parts import Said, Thought
from llmcl.tokenizer.channel_reader import MARKS, ChannelReader, has_channels
from llmcl.tokenizer.special_markers import special_markers

if TYPE_CHECKING:
    from llmcl.tokenizer.tokenizer import Tokenizer

_NO_TOKEN = -1
_OPENING, _CLOSING = "<think>\n", "\n</think>\n\n"
_THOUGHTS = re.compile(rf"{_OPENING}.*?({_CLOSING}|\Z)", re.DOTALL)


class ShownText:
    """Puts thoughts between <think> and </think>, followed by the answer. `of` makes an object for each answer."""

    def __init__(self, reader: ChannelReader):
        self._reader = reader
        self._tags = ThinkTags()

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ShownText | None:
        """Returns a new object; None for a model without channels."""
        if not has_channels(tokenizer.chat_template):
            return None
        return cls(ChannelReader(special=special_markers(MARKS, tokenizer)))

    def push(self, text: str, token_id: int) -> str:
        """Takes a token and its detokenized text. Returns the text to show."""
        self._reader.push(text, token_id)
        return self._take()

    def flush(self, text: str) -> str:
        """Takes the last text. Returns the rest to show."""
        self._reader.push(text, _NO_TOKEN)
        self._reader.finish()
        return self._take()

    def _take(self) -> str:
        parts = [part for part in self._reader.take() if isinstance(part, (Said, Thought))]
        return "".join(self._tags.shown(part) for part in parts)


class ThinkTags:
    """Puts an answer's thoughts between tags, part by part."""

    def __init__(self) -> None:
        self._thinks = False

    def shown(self, part: Said | Thought) -> str:
        before, self._thinks = self._thinks, isinstance(part, Thought)
        return part.text if before == self._thinks else (_OPENING if self._thinks else _CLOSING) + part.text


def said(shown: str) -> str:
    """Returns the shown text without thoughts, as chat templates expect."""
    return _THOUGHTS.sub("", shown)
