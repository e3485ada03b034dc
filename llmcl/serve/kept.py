"""Keeps responses of /v1/responses, for later requests to read or to continue."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

MOST = 256
MOST_CHARACTERS = 32 << 20


@dataclass(frozen=True)
class KeptResponse:
    """A response with the conversation that it ends."""

    messages: list[dict[str, Any]]  # for chat templates, without instructions; the answer is the last
    response: dict[str, Any] = field(default_factory=dict)  # as sent to the client
    items: list[dict[str, Any]] = field(default_factory=list)  # the input, earlier turns included


class Storage(Protocol):
    """Keeps responses beyond the end of the process."""

    def load(self) -> Iterator[tuple[str, KeptResponse]]: ...
    def write(self, name: str, kept: KeptResponse) -> None: ...
    def remove(self, name: str) -> None: ...
    def close(self) -> None: ...


class Kept:
    """The most recently used responses, limited by count and size.

    storage: has the same responses; None: they are in memory alone.
    """

    def __init__(self, most: int = MOST, most_characters: int = MOST_CHARACTERS, storage: Storage | None = None):
        self._most, self._most_characters = most, most_characters
        self._responses: OrderedDict[str, tuple[KeptResponse, int]] = OrderedDict()
        self._n_characters = 0
        self._storage = storage
        for name, kept in [] if storage is None else storage.load():
            if not self._hold(name, kept) and storage is not None:
                storage.remove(name)

    def __len__(self) -> int:
        return len(self._responses)

    def add(self, name: str, kept: KeptResponse) -> None:
        """Stores a response and evicts the oldest while over the limits. One above the size limit is not kept."""
        if self._hold(name, kept) and self._storage is not None:
            self._storage.write(name, kept)

    def _hold(self, name: str, kept: KeptResponse) -> bool:
        """Returns whether the response was within the size limit."""
        size = _size(kept.messages) + _size(kept.response) + _size(kept.items)
        if size > self._most_characters:
            return False
        self._responses[name] = kept, size
        self._n_characters += size
        while len(self) > self._most or self._n_characters > self._most_characters:
            self.remove(next(iter(self._responses)))
        return True

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
        if self._storage is not None:
            self._storage.remove(name)
        return True

    def close(self) -> None:
        """Finishes writing."""
        if self._storage is not None:
            self._storage.close()


def _size(value: Any) -> int:
    """Estimates a value's size: characters of all texts, plus overhead for containers."""
    if isinstance(value, str):
        return len(value) + 50
    if isinstance(value, dict):
        return 100 + sum(_size(key) + _size(item) for key, item in value.items())
    return 50 + sum(map(_size, value)) if isinstance(value, list) else 30
