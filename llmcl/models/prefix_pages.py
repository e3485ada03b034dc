"""Which pages of a KV cache hold which beginnings of texts: a full page is found by its tokens and all before them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b


def page_keys(token_ids: Sequence[int], page_tokens: int, first: int = 0, before: bytes = b"") -> Iterator[bytes]:
    """A key for each full page of a text, from page `first` on: a hash of its tokens and of the key of the page before.

    before: the key of page first - 1. Two texts have the same key only where they are the same up to that page's end.
    """
    for start in range(first * page_tokens, len(token_ids) - page_tokens + 1, page_tokens):
        tokens = array("i", token_ids[start : start + page_tokens])
        before = blake2b(tokens.tobytes(), key=before, digest_size=16).digest()
        yield before


class PrefixPages:
    """The keys of n_pages pages, and the page of each key.

    A page is believed to hold a text only while both say so: `_key_of[page]` is the one place that counts, and an
    interrupt between two lines at most leaves a page that is not found any more.
    """

    def __init__(self, n_pages: int):
        self._key_of: list[bytes | None] = [None] * n_pages
        self._before: list[bytes] = [b""] * n_pages  # of a page that has a key, that of the page before it
        self._page_of: dict[bytes, int] = {}

    def __contains__(self, page: int) -> bool:
        return self._key_of[page] is not None

    def add(self, token_ids: Sequence[int], pages: Sequence[int], page_tokens: int) -> None:
        """The full pages among `pages`, which hold token_ids, are found from now on."""
        n_full = min(len(pages), len(token_ids) // page_tokens)
        first = n_full
        while first and self._key_of[pages[first - 1]] is None:
            first -= 1
        if first == n_full:
            return
        before = (self._key_of[pages[first - 1]] if first else None) or b""
        keys = page_keys(token_ids[: n_full * page_tokens], page_tokens, first, before)
        for page, key in zip(pages[first:], keys, strict=False):
            self.put(page, key, before)
            before = key

    def put(self, page: int, key: bytes, before: bytes) -> None:
        """The page is found from now on. before: the key of the page before; b"" for the first of a text."""
        self._before[page] = before
        self._key_of[page] = key
        self._page_of[key] = page

    def chains(self, pages: Iterable[int]) -> dict[int, tuple[bytes, bytes]]:
        """Of `pages` those that can be found, in their order, each behind the one before it: key and key before."""
        found: dict[int, tuple[bytes, bytes]] = {}
        known = {b""}  # as the first page of a text has it for the key before
        for page in pages:
            chain: dict[int, tuple[bytes, bytes]] = {}
            key = self._key_of[page]
            while key is not None and key not in known and (at := self._page_with(key)) is not None:
                chain[at] = key, self._before[at]
                key = self._before[at]
            if key in known:
                found.update(reversed(chain.items()))
                known.update(key for key, _ in chain.values())
        return found

    def find(self, token_ids: Sequence[int], page_tokens: int) -> list[int]:
        """The pages that hold the text's beginning, as many as there are."""
        found: list[int] = []
        for key in page_keys(token_ids, page_tokens):
            page = self._page_with(key)
            if page is None:
                break
            found.append(page)
        return found

    def _page_with(self, key: bytes) -> int | None:
        page = self._page_of.get(key)
        return page if page is not None and self._key_of[page] == key else None

    def forget(self, page: int) -> None:
        """What the page holds is about to change."""
        key, self._key_of[page] = self._key_of[page], None
        if key is not None and self._page_of.get(key) == page:
            del self._page_of[key]
