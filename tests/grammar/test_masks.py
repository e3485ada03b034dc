"""Masks are what trying every token shows, for vocabularies of each kind."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from itertools import product

import numpy as np
import pytest
from ascii_tokenizer import ascii_tokenizer
from made_tokenizers import byte_level_gguf, from_gguf, sentencepiece_gguf

from llmcl.errors import UsageError
from llmcl.grammar import Grammar, Grammars, Matcher, masks_of
from llmcl.tokenizer import Tokenizer

UNUSED = 5  # ids beyond the tokenizer's


def from_folder() -> Tokenizer:
    return Tokenizer(ascii_tokenizer(), vocab_size=99 + UNUSED, eos_token_ids=(2, 1))


def byte_level() -> Tokenizer:
    return from_gguf(byte_level_gguf(), eos_token_ids=(1,))


def sentencepiece() -> Tokenizer:
    return from_gguf(sentencepiece_gguf(), bos_token_id=1, eos_token_ids=(2,))


KINDS = [from_folder, byte_level, sentencepiece]
# Expressions, and all texts that match.
LANGUAGES = {
    r"(a|the|them)( |o){1,2}(x|é)?": [
        a + "".join(b) + c
        for a in ("a", "the", "them")
        for n in (1, 2)
        for b in product(" o", repeat=n)
        for c in ("", "x", "é")
    ],
    r"(Hello( world)?|Help)!?": [a + b for a in ("Hello", "Hello world", "Help") for b in ("", "!")],
}


def ids_of(mask: np.ndarray) -> set[int]:
    return {int(i) for i in np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))}


def walk(
    tokenizer: Tokenizer, matcher: Matcher, texts: set[bytes], check: Callable[[bytes, set[int], set[int]], None]
) -> None:
    """Follows a matcher by tokens that it allows, and checks each mask against what trying all tokens shows."""
    rng = np.random.default_rng(0)
    text = b""
    for _ in range(30):
        found = ids_of(matcher.mask())
        tried = {
            token
            for token in range(tokenizer.n_vocab)
            if (data := tokenizer.token_bytes(token)) and any(t.startswith(text + data) for t in texts)
        }
        if text in texts:
            tried |= tokenizer.eos_token_ids
        check(text, found, tried)
        token = int(rng.choice(sorted(found)))
        matcher.accept([token])
        if token in tokenizer.eos_token_ids:
            assert text in texts
            return
        text += tokenizer.token_bytes(token)
    raise AssertionError("it never ends")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("language", LANGUAGES)
def test_a_mask_is_what_trying_every_token_shows(kind: Callable[[], Tokenizer], language: str) -> None:
    tokenizer = kind()
    texts = {text.encode() for text in LANGUAGES[language]}
    compiled = Grammars(tokenizer, tokenizer.n_vocab + UNUSED).compile(Grammar(kind="regex", source=language))
    n_choices = 0

    def check(text: bytes, found: set[int], tried: set[int]) -> None:
        nonlocal n_choices
        following = {t[len(text)] for t in texts if t.startswith(text) and len(t) > len(text)}
        if len(following) == 1 and text not in texts:  # forced: as the tokenizer would cut it
            assert found and found <= tried, text
        else:
            assert found == tried, text
            n_choices += 1

    for _ in range(5):
        walk(tokenizer, compiled.matcher(), texts, check)
    assert n_choices >= 5


@pytest.mark.parametrize("kind", KINDS)
def test_any_json_text_is_followed_to_its_end(kind: Callable[[], Tokenizer]) -> None:
    tokenizer = kind()
    grammar = Grammar.of(schema={"type": "object", "properties": {"name": {"type": "string"}}})
    assert grammar is not None
    matcher = Grammars(tokenizer, tokenizer.n_vocab).compile(grammar).matcher()
    ids = tokenizer.encode('\n{"name": "a  \\"b\\" 77", "more": [1, true]}', add_special_tokens=False)
    for token in ids[1 + sum(tokenizer.token_bytes(i) == b" " for i in ids[:1]) :]:  # a space of SentencePiece's own
        assert token in ids_of(matcher.mask())
        matcher.accept([token])
    assert ids_of(matcher.mask()) == tokenizer.eos_token_ids
    matcher.accept([min(tokenizer.eos_token_ids)])
    assert ids_of(matcher.mask()) == tokenizer.eos_token_ids  # what comes after the end counts for nothing
    matcher.accept([min(tokenizer.eos_token_ids)])


def test_special_tokens_are_no_text() -> None:
    """Written out they are letters; as tokens a grammar has to name them, and the end is at the end alone."""
    tokenizer = byte_level()
    grammars = Grammars(tokenizer, tokenizer.n_vocab)
    start, end = (tokenizer.encode(text)[0] for text in ("<s>", "</s>"))
    matcher = grammars.compile(Grammar("grammar", 'start: "<s>" | "</s>x"')).matcher()
    assert not {start, end} & ids_of(matcher.mask())
    matcher = grammars.compile(Grammar("grammar", 'start: <s> "x"')).matcher()
    assert ids_of(matcher.mask()) == {start}
    assert end not in ids_of(grammars.compile(Grammar("regex", "(.|\n){2,}")).matcher().mask())


def test_drafts() -> None:
    tokenizer = from_folder()
    compiled = Grammars(tokenizer, tokenizer.n_vocab).compile(Grammar("regex", "ab[cd]+"))
    letters = {letter: tokenizer.encode(letter)[0] for letter in "abcdx"}
    draft = [letters[letter] for letter in "abccx"]
    matcher = compiled.matcher()
    assert matcher.n_allowed(draft) == 4 and matcher.n_allowed([letters["x"]]) == 0 == matcher.n_allowed([])
    masks = matcher.masks_along(draft[:4])
    other = compiled.matcher()
    for token, mask in zip(draft[:4], masks, strict=False):
        assert ids_of(other.mask()) == ids_of(mask)
        other.accept([token])
    assert len(masks) == 5 and ids_of(other.mask()) == ids_of(masks[-1])
    assert ids_of(matcher.mask()) == {letters["a"]}  # it is where it was
    with pytest.raises(UsageError, match="regex cannot be followed any further"):
        matcher.accept([letters["x"]])


@pytest.mark.parametrize(("kind", "source"), [("regex", r"[^\s\S]"), ("grammar", "start: start")])
def test_what_no_text_matches_is_said_so(kind: str, source: str) -> None:
    tokenizer = from_folder()
    matcher = Grammars(tokenizer, tokenizer.n_vocab).compile(Grammar(kind, source)).matcher()
    with pytest.raises(UsageError, match=f"{kind}: no token of the vocabulary can follow the answer so far; change it"):
        matcher.mask()


def test_several_answers_at_once() -> None:
    """As each of them alone; one that fails does not end the others."""
    tokenizer = from_folder()
    grammars = Grammars(tokenizer, tokenizer.n_vocab + UNUSED)

    def matchers() -> list[Matcher]:
        expressions = "a[bc]{1,5}", "[xyz]{3}", "a"
        return [grammars.compile(Grammar("regex", expression)).matcher() for expression in expressions]

    alone, together = matchers(), matchers()
    for text in "axa", "bya", "bza":
        masks = masks_of(together)
        for one, mask in zip(alone, masks, strict=True):
            if isinstance(mask, np.ndarray):
                assert mask.dtype == np.uint32 and np.array_equal(mask, one.mask())
        for letter, *both in zip(text, alone, together, strict=True):
            for matcher in both:
                with suppress(UsageError):
                    matcher.accept(tokenizer.encode(letter, add_special_tokens=False)[:1])
    assert [type(mask) for mask in masks_of(together)] == [np.ndarray, np.ndarray, UsageError]
    assert masks_of([]) == []
    (mask,) = masks_of(together[:1])
    assert isinstance(mask, np.ndarray)
