"""Keys of pages: equal only where the texts are, up to the end of the page."""

from __future__ import annotations

import numpy as np

from llmcl.models.prefix_pages import PrefixPages, page_keys

PAGE = 64
TEXT = np.random.default_rng(0).integers(0, 1000, 5 * PAGE + 10).tolist()


def test_a_key_depends_on_each_token_of_its_page_and_before() -> None:
    keys = list(page_keys(TEXT, PAGE))
    assert len(keys) == len(set(keys)) == 5
    for at in range(len(TEXT)):
        changed = list(page_keys([*TEXT[:at], TEXT[at] + 1, *TEXT[at + 1 :]], PAGE))
        assert [a == b for a, b in zip(keys, changed, strict=True)] == [i < at // PAGE for i in range(5)]
    assert keys[3:] == list(page_keys(TEXT, PAGE, 3, keys[2]))
    assert list(page_keys(TEXT[PAGE:], PAGE)) != keys[1:]


def test_pages_are_found_until_they_are_forgotten() -> None:
    prefixes = PrefixPages(9)
    prefixes.add(TEXT[: 3 * PAGE], [8, 0, 5], PAGE)
    prefixes.add(TEXT, [8, 0, 5, 3, 1, 7], PAGE)
    assert prefixes.find(TEXT, PAGE) == [8, 0, 5, 3, 1] and 7 not in prefixes
    assert prefixes.find([*TEXT[: 2 * PAGE], 5], PAGE) == [8, 0]
    prefixes.add(TEXT, [8, 2, 6], PAGE)  # the same text once more: read twice at the same time
    assert prefixes.find(TEXT, PAGE) == [8, 2, 6, 3, 1]
    prefixes.forget(0)
    prefixes.forget(6)
    assert prefixes.find(TEXT, PAGE) == [8, 2]
    prefixes.forget(8)
    assert prefixes.find(TEXT, PAGE) == [] and 2 in prefixes
