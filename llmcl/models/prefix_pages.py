"""Finds KV cache pages by text. A full page is keyed by its tokens and all tokens before."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b

_KEY_BYTES = 16


def page_keys(token_ids: Sequence[int], page_tokens: int, first: int = 0, before: bytes = b"") -> Iterator[bytes]:
    """Yields a key for each full page from page `first` on: a hash of the page's tokens and the previous page's key.

    before: the key of page first - 1, or for page 0 a root of fewer bytes. Two texts with a root share a key only if
    both are equal up to the end of the page.
    """
    for start in range(first * page_tokens, len(token_ids) - page_tokens + 1, page_tokens):
        tokens = array("i", token_ids[start : start + page_tokens])
        before = blake2b(tokens.tobytes(), key=before, digest_size=_KEY_BYTES).digest()
        yield before


class PrefixPages:
    """Maps n_pages pages to keys and keys to pages.

    A page counts as findable only while both maps agree, and `_key_of[page]` decides. An interrupt between two lines at
    most leaves a page no longer found.
    """

    def __init__(self, n_pages: int):
        self._key_of: list[bytes | None] = [None] * n_pages
        self._before: list[bytes] = [b""] * n_pages  # per page with a key, the previous page's key
        self._page_of: dict[bytes, int] = {}

    def __contains__(self, page: int) -> bool:
        return self._key_of[page] is not None

    def add(self, token_ids: Sequence[int], pages: Sequence[int], page_tokens: int, root: bytes = b"") -> None:
        """Makes the full pages among `pages`, which hold token_ids, findable by texts with the same root."""
        n_full = min(len(pages), len(token_ids) // page_tokens)
        first = n_full
        while first and self._key_of[pages[first - 1]] is None:
            first -= 1
        if first == n_full:
            return
        before = (self._key_of[pages[first - 1]] if first else None) or root
        keys = page_keys(token_ids[: n_full * page_tokens], page_tokens, first, before)
        for page, key in zip(pages[first:], keys, strict=False):
            self.put(page, key, before)
            before = key

    def put(self, page: int, key: bytes, before: bytes) -> None:
        """Makes a page findable. before: the previous page's key, or the root for a text's first page."""
        self._before[page] = before
        self._key_of[page] = key
        self._page_of[key] = page

    def chains(self, pages: Iterable[int]) -> dict[int, tuple[bytes, bytes]]:
        """Returns the findable pages among `pages`, each after its predecessor, with key and previous key."""
        findable: dict[int, tuple[bytes, bytes]] = {}
        known = {before for before in self._before if len(before) < _KEY_BYTES}  # roots: previous keys of first pages
        for page in pages:
            chain: dict[int, tuple[bytes, bytes]] = {}
            key = self._key_of[page]
            while key is not None and key not in known and (at := self._page_with(key)) is not None:
                chain[at] = key, self._before[at]
                key = self._before[at]
            if key in known:
                findable.update(reversed(chain.items()))
                known.update(key for key, _ in chain.values())
        return findable

    def find(self, token_ids: Sequence[int], page_tokens: int, root: bytes = b"") -> list[int]:
        """Returns all pages with the beginning of the text."""
        prefix_pages: list[int] = []
        for key in page_keys(token_ids, page_tokens, before=root):
            page = self._page_with(key)
            if page is None:
                break
            prefix_pages.append(page)
        return prefix_pages

    def _page_with(self, key: bytes) -> int | None:
        page = self._page_of.get(key)
        return page if page is not None and self._key_of[page] == key else None

    def forget(self, page: int) -> None:
        """Removes a page whose content is about to change."""
        key, self._key_of[page] = self._key_of[page], None
        if key is not None and self._page_of.get(key) == page:
            del self._page_of[key]
