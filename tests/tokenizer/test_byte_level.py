"""Byte-level BPE from GGUF metadata: small vocabularies in the form of each family, against the originals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tokenizers
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from made_tokenizers import FAMILIES, TEXTS, from_gguf, gguf_of, mixed_text, trained
from tokenizers import AddedToken

from llmcl.tokenizer import Tokenizer
from llmcl.tokenizer.gguf_tokenizer import NORMAL, build


@pytest.fixture(scope="module")
def pairs() -> dict[str, tuple[Tokenizer, tokenizers.Tokenizer]]:
    """Each family's tokenizer rebuilt from metadata, and the one that the metadata was written from."""
    originals = {pre: trained(pre) for pre in FAMILIES}
    return {pre: (from_gguf(gguf_of(original, pre)), original) for pre, original in originals.items()}


@pytest.mark.parametrize("pre", FAMILIES)
def test_byte_level_tokenizer_from_gguf_equals_the_original(pre: str, pairs: dict[str, Any]) -> None:
    ours, original = pairs[pre]
    for text in [*TEXTS, "<|user|>hi <think>so</think><|end|>", "<|end|>", "<|user|><|user|> <|end"]:
        ids = ours.encode(text)
        assert ids == original.encode(text).ids, text
        assert ours.decode(ids) == original.decode(ids), text
    assert ours.n_vocab == original.get_vocab_size()


@settings(max_examples=examples(200), deadline=None)
@given(text=mixed_text)
def test_byte_level_tokenizers_agree_on_mixed_text(pairs: dict[str, Any], text: str) -> None:
    for pre, (ours, original) in pairs.items():
        assert ours.encode(text) == original.encode(text).ids, pre


@settings(max_examples=examples(100), deadline=None)
@given(ids=st.lists(st.integers(0, 502), max_size=30))
def test_byte_level_decoding_of_any_ids_equals_the_original_and_the_stream(
    pairs: dict[str, Any], ids: list[int]
) -> None:
    ours, original = pairs["llama-bpe"]
    detokenizer = ours.detokenizer()
    assert "".join(map(detokenizer.push, ids)) + detokenizer.flush() == ours.decode(ids)
    assert ours.decode(ids) == original.decode(ids)


SAME = {
    "olmo": "gpt-2",
    "refact": "smollm",
    "lfm2": "llama-bpe",
    "glm4": "llama-bpe",
    "chatglm-bpe": "llama-bpe",
    "qwen35": "qwen2",
}  # rules under two names, or the same for this text

# What the families' rules say of one text, by hand.
WORDS = {
    "gpt-2": ["It", "'s", " 12345", " CAN", "'", "T", "  ", " x", "\n\n", " y", "!!", "\n"],
    "smollm": [
        "It",
        "'s",
        " ",
        "1",
        "2",
        "3",
        "4",
        "5",
        " CAN",
        "'",
        "T",
        "  ",
        " x",
        "\n\n",
        " y",
        "!!",
        "\n",
    ],
    "llama-bpe": ["It", "'s", " ", "123", "45", " CAN", "'T", "  ", " x", "\n\n", " y", "!!\n"],
    "qwen2": ["It", "'s", " ", "1", "2", "3", "4", "5", " CAN", "'T", "  ", " x", "\n\n", " y", "!!\n"],
    "gpt-4o": ["It's", " ", "123", "45", " CAN'T", "  ", " x", "\n\n", " y", "!!\n"],
}


@pytest.mark.parametrize("pre", [*WORDS, *SAME])
def test_words_are_cut_as_the_family_does(pre: str) -> None:
    like = SAME.get(pre, pre)
    backend, _ = build(gguf_of(trained(like), pre))
    assert backend.pre_tokenizer is not None
    text = "It's 12345 CAN'T   x\n\n y!!\n"
    spans = [span for _, span in backend.pre_tokenizer.pre_tokenize_str(text)]
    assert [text[begin:end] for begin, end in spans] == WORDS[like]


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("deepseek-llm", " |\u6f22\u5b57\u304b|1234|,| Foo|\n|\n| $|x|(|y|)| | e|?"),
        ("deepseek-v3", " |\u6f22\u5b57\u304b|123|4|,| Foo|\n\n| $|x|(y|)| | e|?"),
    ],
)
def test_deepseek_cuts_by_one_expression_after_the_other(pre: str, words: str) -> None:
    backend, _ = build(gguf_of(trained("gpt-2"), pre))
    assert backend.pre_tokenizer is not None
    text = " \u6f22\u5b57\u304b1234, Foo\n\n $x(y)  e?"
    spans = [span for _, span in backend.pre_tokenizer.pre_tokenize_str(text)]
    assert [text[begin:end] for begin, end in spans] == words.split("|")


def test_llama3_takes_a_whole_word_that_no_merge_leads_to() -> None:
    metadata = gguf_of(trained("llama-bpe"), "llama-bpe")
    metadata["tokenizer.ggml.tokens"].append("zqzqz")
    metadata["tokenizer.ggml.token_type"] = np.append(metadata["tokenizer.ggml.token_type"], NORMAL)
    assert from_gguf(metadata).encode("zqzqz") == [len(metadata["tokenizer.ggml.tokens"]) - 1]
    metadata["tokenizer.ggml.pre"] = "qwen2"
    assert len(from_gguf(metadata).encode("zqzqz")) > 1


def test_qwen_keeps_combining_marks_with_letters_from_3_5_on() -> None:
    for pre, words in ("qwen2", ["ki", "\u0306\u0323", "s"]), ("qwen35", ["ki\u0306\u0323s"]):
        backend, _ = build(gguf_of(trained(pre), pre))
        assert backend.pre_tokenizer is not None
        text = "ki\u0306\u0323s"
        spans = [span for _, span in backend.pre_tokenizer.pre_tokenize_str(text)]
        assert [text[begin:end] for begin, end in spans] == words


def test_qwen_composes_characters_and_the_others_do_not(pairs: dict[str, Any]) -> None:
    for pre, (ours, _) in pairs.items():
        assert (ours.encode("e\u0301") == ours.encode("é")) == pre.startswith("qwen")


def test_user_defined_tokens_are_text_and_control_tokens_are_not(pairs: dict[str, Any]) -> None:
    ours, original = pairs["smollm"]
    assert ours.decode(ours.encode("<|user|>a<think>b<|end|>")) == "a<think>b"
    assert len(ours.encode("<think>")) == len(ours.encode("<|end|>")) == 1
    assert ours.encode("<think>") == [original.token_to_id("<think>")]


def test_added_token_stands_for_its_own_text() -> None:
    backend = trained("gpt-2")
    backend.add_tokens([AddedToken("é", normalized=False)])  # as byte-level code this is the lone byte E9
    tokenizer = Tokenizer(backend, vocab_size=1000)
    assert tokenizer.decode(tokenizer.encode("caféé")) == "caféé"
