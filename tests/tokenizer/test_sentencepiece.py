"""SentencePiece from GGUF metadata, against its definition written out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from made_tokenizers import TEXTS, from_gguf, sentencepiece_gguf, sentencepiece_reference

from llmcl.errors import UnsupportedModelError
from llmcl.tokenizer import Tokenizer
from llmcl.tokenizer.gguf_tokenizer import merges_from_scores


def test_sentencepiece_encodes_by_its_definition(sentencepiece: tuple[Tokenizer, dict[str, Any]]) -> None:
    tokenizer, metadata = sentencepiece
    for text in TEXTS:
        assert tokenizer.encode(text) == [1, *sentencepiece_reference(metadata, text)], text
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert max(len(metadata["tokenizer.ggml.tokens"][i]) for i in tokenizer.encode(" ".join(TEXTS))) > 3


@settings(max_examples=examples(200), deadline=None)
@given(text=st.text("aesthrn 12é日🙂7\n=-", max_size=30))
def test_sentencepiece_encodes_mixed_text_by_its_definition(
    sentencepiece: tuple[Tokenizer, dict[str, Any]], text: str
) -> None:
    tokenizer, metadata = sentencepiece
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == sentencepiece_reference(metadata, text)
    assert tokenizer.decode(ids) == tokenizer._backend.decode(ids) == text


@settings(max_examples=examples(200), deadline=None)
@given(ids=st.lists(st.integers(0, 500) | st.sampled_from([3 + b for b in "é日🙂 ".encode()]), max_size=20))
def test_sentencepiece_streams_what_it_decodes(sentencepiece: tuple[Tokenizer, dict[str, Any]], ids: list[int]) -> None:
    tokenizer, _ = sentencepiece
    detokenizer = tokenizer.detokenizer()
    assert "".join(map(detokenizer.push, ids)) + detokenizer.flush() == tokenizer.decode(ids)


def test_sentencepiece_space_before_the_text(sentencepiece: tuple[Tokenizer, dict[str, Any]]) -> None:
    tokenizer, metadata = sentencepiece
    ids = tokenizer.encode("the end", add_special_tokens=False)
    assert ids == tokenizer.encode("x the end", add_special_tokens=False)[-len(ids) :]
    assert tokenizer.decode(ids) == "the end"
    plain = from_gguf(metadata | {"tokenizer.ggml.add_space_prefix": False}, bos_token_id=1)
    for text in ("the end", " the end", "  "):
        assert plain.encode(text) == [1, *sentencepiece_reference(metadata, text, prefix=False)]
        assert plain.decode(plain.encode(text)) == text


def test_sentencepiece_text_after_a_special_token_gets_its_space(
    sentencepiece: tuple[Tokenizer, dict[str, Any]],
) -> None:
    tokenizer, metadata = sentencepiece
    user = metadata["tokenizer.ggml.tokens"].index("<|user|>")
    parts = [sentencepiece_reference(metadata, text) for text in ("the", "end")]
    assert tokenizer.encode("the<|user|>end</s>") == [1, *parts[0], user, *parts[1], 2]


def test_sentencepiece_invalid_bytes_leave_valid_ones_alone(
    sentencepiece: tuple[Tokenizer, dict[str, Any]],
) -> None:
    tokenizer, _ = sentencepiece
    assert tokenizer.decode([3 + byte for byte in b"\xc3\xa9\xff"]) == "é\ufffd"


def test_sentencepiece_unigram_is_refused_by_name() -> None:
    metadata = sentencepiece_gguf()
    metadata["tokenizer.ggml.scores"] = metadata["tokenizer.ggml.scores"] * np.float32(0.37)
    with pytest.raises(UnsupportedModelError, match="Unigram"):
        from_gguf(metadata, bos_token_id=1)


def test_gemma4_joins_what_its_merges_say() -> None:
    """Against the library with what Gemma's tokenizer.json says, whose words are whole texts."""
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    metadata = sentencepiece_gguf()
    tokens, types, scores = (metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type", "scores"))
    merges = merges_from_scores(tokens, list(scores), list(types))[::2]  # in no order that scores could give
    library = Library(
        models.BPE({token: i for i, token in enumerate(tokens)}, merges, byte_fallback=True, fuse_unk=True)
    )
    library.normalizer = normalizers.Replace(" ", "\u2581")
    library.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    library.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    of_gemma4 = {"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.merges": [" ".join(pair) for pair in merges]}
    tokenizer = from_gguf(metadata | of_gemma4, bos_token_id=1)
    lengths = set()
    for text in TEXTS:
        ids = library.encode(text).ids
        assert tokenizer.encode(text) == [1, *ids], text
        assert tokenizer.decode(ids) == library.decode(ids) == text
        lengths |= {len(tokens[i]) for i in ids}
    assert {1, 2, 3} < lengths
