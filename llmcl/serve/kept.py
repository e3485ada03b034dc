"""Keeps responses of /v1/responses in memory, for later requests to read or to continue."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

MOST = 256
MOST_CHARACTERS = 32 << 20


@dataclass(frozen=True)
class KeptResponse:
    """A response with the conversation that it ends."""

    messages: list[dict[str, Any]]  # for chat templates, without instructions; the answer is the last
    response: dict[str, Any] = field(default_factory=dict)  # as sent to the client
    items: list[dict[str, Any]] = field(default_factory=list)  # the input, earlier turns included


class Kept:
    """The most recently used responses, limited by count and size."""

    def __init__(self, most: int = MOST, most_characters: int = MOST_CHARACTERS):
        self._most, self._most_characters = most, most_characters
        self._responses: OrderedDict[str, tuple[KeptResponse, int]] = OrderedDict()
        self._n_characters = 0

    def __len__(self) -> int:
        return len(self._responses)

    def add(self, name: str, kept: KeptResponse) -> None:
        """Stores a response and evicts the oldest while over the limits. One above the size limit is not kept."""
        size = _size(kept.messages) + _size(kept.response) + _size(kept.items)
        if size > self._most_characters:
            return
        self._responses[name] = kept, size
        self._n_characters += size
        while len(self) > self._most or self._n_characters > self._most_characters:
            self.remove(next(iter(self._responses)))

    def get(self, name: str) -> KeptResponse | None:
        """Returns response `name`; None if not kept."""
        if name not in self._responses:
            return None
        self._responses.move_to_end(name)
        return self._responses[name][0]

    def remove(self, name: str) -> bool:
        """Forgets response `name`. Returns whether it was kept."""
        if name not in self._responses:
            return False
        _, size = self._responses.pop(name)
        self._n_characters -= size
        return True


def _size(value: Any) -> int:
    """Estimates a value's size: characters of all texts, plus overhead for containers."""
    if isinstance(value, str):
        return len(value) + 50
    if isinstance(value, dict):
        return 100 + sum(_size(key) + _size(item) for key, item in value.items())
    return 50 + sum(map(_size, value)) if isinstance(value, list) else 30
