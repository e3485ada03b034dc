"""The text of an answer in channels as people are shown it: as that of a model that thinks between tags."""

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
    """Thoughts between <think> and </think>, and then what is said. `of` makes one for each answer of a model."""

    def __init__(self, reader: ChannelReader):
        self._reader = reader
        self._tags = ThinkTags()

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ShownText | None:
        """None for a model whose answers have no channels."""
        if not has_channels(tokenizer.chat_template):
            return None
        return cls(ChannelReader(special=special_markers(MARKS, tokenizer)))

    def push(self, text: str, token_id: int) -> str:
        """What is to be shown from this token on, whose text is as the detokenizer gives it."""
        self._reader.push(text, token_id)
        return self._take()

    def flush(self, text: str) -> str:
        """The rest of an answer that ends with this text."""
        self._reader.push(text, _NO_TOKEN)
        self._reader.finish()
        return self._take()

    def _take(self) -> str:
        parts = [part for part in self._reader.take() if isinstance(part, (Said, Thought))]
        return "".join(self._tags.shown(part) for part in parts)


class ThinkTags:
    """Puts the thoughts of an answer between tags, part by part."""

    def __init__(self) -> None:
        self._thinks = False

    def shown(self, part: Said | Thought) -> str:
        before, self._thinks = self._thinks, isinstance(part, Thought)
        return part.text if before == self._thinks else (_OPENING if self._thinks else _CLOSING) + part.text


def said(shown: str) -> str:
    """Of what was shown what was said: without the thoughts, as templates of conversations expect it."""
    return _THOUGHTS.sub("", shown)
