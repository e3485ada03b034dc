"""Keeps conversations of /v1/responses in memory, for later requests to continue."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

MOST = 256
MOST_CHARACTERS = 32 << 20

Messages = list[dict[str, Any]]


class Kept:
    """The most recently used conversations, limited by count and size."""

    def __init__(self, most: int = MOST, most_characters: int = MOST_CHARACTERS):
        self._most, self._most_characters = most, most_characters
        self._conversations: OrderedDict[str, tuple[Messages, int]] = OrderedDict()
        self._n_characters = 0

    def __len__(self) -> int:
        return len(self._conversations)

    def add(self, name: str, messages: Messages) -> None:
        """Stores a conversation and evicts the oldest while over the limits. Ignores one above the size limit."""
        size = _size(messages)
        if size > self._most_characters:
            return
        self._conversations[name] = messages, size
        self._n_characters += size
        while len(self) > self._most or self._n_characters > self._most_characters:
            _, (_, forgotten) = self._conversations.popitem(last=False)
            self._n_characters -= forgotten

    def get(self, name: str) -> Messages | None:
        """Returns the conversation that ended with response `name`; None if not kept."""
        if name not in self._conversations:
            return None
        self._conversations.move_to_end(name)
        return self._conversations[name][0]


def _size(value: Any) -> int:
    """Estimates a value's size: characters of all texts, plus overhead for containers."""
    if isinstance(value, str):
        return len(value) + 50
    if isinstance(value, dict):
        return 100 + sum(_size(key) + _size(item) for key, item in value.items())
    return 50 + sum(map(_size, value)) if isinstance(value, list) else 30
