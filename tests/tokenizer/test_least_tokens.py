"""A text is refused before it is encoded only where it has more tokens than there is room for."""

from __future__ import annotations

import math
import unicodedata
from functools import cache
from typing import Any

import pytest
import tokenizers
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from made_tokenizers import SPECIAL, from_gguf, gguf_of, mixed_text, sentencepiece_gguf, trained
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from llmcl.errors import ContextLengthError
from llmcl.tokenizer import Tokenizer
from llmcl.tokenizer.tokenizer import byte_level_alphabet

# What becomes shorter: composed, Hangul, compatible characters, spaces beside special tokens, BOS again and again.
SHRINKING = [
    "t\x1e\U00040000" * 9,
    "\u03b1\u0313\u0340\u0345",
    "\u1112\u1161\u11ab",
    "\u212a\u0327",
    "\U0001d400",
    "\uff21",
    "\u3000",
    "  \n",
]
texts = st.lists(st.sampled_from([*SHRINKING, *SPECIAL, "<s>", "<think>", "fox", " the"]) | mixed_text).map("".join)


@cache
def known(kind: str) -> Tokenizer:
    """Tokenizers of which the longest token is known to say something."""
    if kind == "sentencepiece":
        return from_gguf(sentencepiece_gguf(), bos_token_id=1)
    if kind == "bytes without tokens":
        metadata = gguf_of(trained("smollm"), "smollm")
        lost = {"t", "\u011e", "\u00f1"}  # of a text, 0x1e and the first byte of some characters
        metadata["tokenizer.ggml.tokens"] = [
            f"unused {i}" if token in lost else token for i, token in enumerate(metadata["tokenizer.ggml.tokens"])
        ]
        metadata["tokenizer.ggml.merges"] = [m for m in metadata["tokenizer.ggml.merges"] if not lost & {*m}]
        return from_gguf(metadata, bos_token_id=1)
    if kind in ("smollm", "qwen2", "llama3"):
        return from_gguf(gguf_of(trained(kind), kind), bos_token_id=1)
    made = trained("gpt-4o")
    if kind == "takes spaces":
        made.add_special_tokens([AddedToken("<|wide|>", lstrip=True, rstrip=True, special=True)])
    else:
        made.normalizer = normalizers.Sequence([getattr(normalizers, kind)(), normalizers.Replace("xyz", "x")])
    return Tokenizer(made, vocab_size=600, bos_token_id=1)


@pytest.mark.parametrize(
    "kind",
    [
        "smollm",
        "bytes without tokens",
        "qwen2",
        "llama3",
        "sentencepiece",
        "takes spaces",
        "NFC",
        "NFKC",
        "NFKD",
        "NFD",
        "Lowercase",
    ],
)
def test_a_text_has_at_least_so_many_tokens(kind: str) -> None:
    tokenizer = known(kind)

    @settings(max_examples=examples(200), deadline=None)
    @given(texts, st.integers(1, 40))
    def check(text: str, times: int) -> None:
        text = text.replace("<|end|>", "<|wide|>") if kind == "takes spaces" else text
        text += {"NFC": "xyz", "takes spaces": "<|wide|>    "}.get(kind, "<|user|>") * times
        assert tokenizer._least_tokens(text) <= len(tokenizer.encode(text))

    check()
    assert tokenizer._least_tokens("a b" * 1000) > 10


@pytest.mark.slow
@pytest.mark.parametrize("form", ["NFC", "NFD", "NFKC", "NFKD"])
def test_no_character_is_made_of_more_than_four_times_its_bytes(form: Any) -> None:
    for code in range(0x110000):
        if 0xD800 <= code < 0xE000:
            continue
        char = chr(code)
        assert len(char.encode()) <= 4 * len(unicodedata.normalize(form, char).encode())
        parts = unicodedata.normalize("NFD", char)
        if len(parts) > 1 and form in ("NFC", "NFKC") and unicodedata.normalize(form, parts) == char:
            assert 4 + len(parts[1:].encode()) <= 4 * len(char.encode())  # the first may be another's, such as a bold A


def dropping(kind: str) -> tokenizers.Tokenizer:
    """Tokenizers that lose a part of a text, or make one token of any number of characters."""
    made = trained("gpt-4o")
    if kind == "no unknown token":
        made = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    elif kind == "joined unknown tokens":
        made = tokenizers.Tokenizer(models.BPE({"a": 0, "<unk>": 1}, [], unk_token="<unk>", fuse_unk=True))
    elif kind == "a word a token":
        made = tokenizers.Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    elif kind == "removed spaces":
        made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), made.pre_tokenizer])
    elif kind == "spaces at the ends":
        made.normalizer = normalizers.Strip()
    elif kind == "an expression":
        made.normalizer = normalizers.Replace(Regex("b+"), "b")
    else:
        made.normalizer = normalizers.Replace("b", "")
    return made


@pytest.mark.parametrize(
    "kind",
    [
        *("no unknown token", "joined unknown tokens", "a word a token", "removed spaces", "spaces at the ends"),
        *("an expression", "a removed letter"),
    ],
)
def test_where_text_goes_without_tokens_nothing_is_said(kind: str) -> None:
    made = dropping(kind)
    made.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = Tokenizer(made, vocab_size=600)
    assert tokenizer._least_tokens("b " * 10**6) == 0
    assert len(tokenizer.encode(" " * 40_000 + "b" * 40_000, most=100_000)) < 100_000


def test_a_text_of_megabytes_is_refused_before_it_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = known("smollm")
    encoded: list[int] = []

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(backend, name)

        def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
            encoded.extend(map(len, texts))
            return backend.encode_batch_fast(texts, **options)

    backend = tokenizer._backend
    monkeypatch.setattr(tokenizer, "_backend", Counting())
    text = "a fox " * 2 * 10**6
    longest = max(len(token) for token in backend.get_vocab() if {*token} <= {*byte_level_alphabet()})
    with pytest.raises(ContextLengthError, match=r"at least \d+ tokens, the context 4096; .*\(--ctx-size, max_context"):
        tokenizer.encode(text, most=4096)
    assert not encoded and tokenizer._least_tokens(text) >= math.ceil(len(text) / max(longest, len("<|user|>")))
    assert len(tokenizer.encode(text[:120_000], most=10**6)) > 20_000 and encoded == [120_000], "it may fit, and does"


def test_any_number_of_bos_is_one_at_once() -> None:
    """Each took a copy of all behind it."""
    tokenizer = known("smollm")
    assert tokenizer.encode("<|user|>" * 300_000 + "a", most=64) == tokenizer.encode("<|user|>a")
    assert tokenizer.encode("<|user|>" * 9) == [1]
