"""As few of some things as have everything that any of them has."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from collections.abc import Set as AbstractSet
from typing import TypeVar

T = TypeVar("T", bound=Hashable)


def covering(found: Mapping[T, AbstractSet[object]], met: Collection[object] = ()) -> set[T]:
    """Of the keys as many as have all that is found in any of them and not in `met`: each time the one with most."""
    kept: set[T] = set()
    missing = set().union(*found.values()) - set(met)
    while missing:
        best = max(found, key=lambda one: len(found[one] & missing))
        kept.add(best)
        missing -= found[best]
    return kept
