"""What vocabularies of published GGUF files have beyond the usual: texts that stand twice, rules by other names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tokenizers
from made_tokenizers import (
    GPT_4O_SPLIT,
    LLAMA3_SPLIT,
    QWEN2_SPLIT,
    TEXTS,
    from_gguf,
    gguf_of,
    sentencepiece_gguf,
    trained,
)
from tokenizers import Regex, models, pre_tokenizers

from llmcl.checkpoint.pre_tokenizers import PRE_TOKENIZERS
from llmcl.tokenizer.gguf_tokenizer import CONTROL, NORMAL, build

Metadata = dict[str, Any]


def with_tokens(metadata: Metadata, *tokens: str, kind: int = NORMAL) -> Metadata:
    """The metadata with further tokens at the end."""
    n = len(tokens)
    changed = metadata | {"tokenizer.ggml.tokens": [*metadata["tokenizer.ggml.tokens"], *tokens]}
    for key, value in (("token_type", kind), ("scores", -1000.0)):
        if (values := metadata.get(f"tokenizer.ggml.{key}")) is not None:
            changed[f"tokenizer.ggml.{key}"] = np.append(values, [value] * n)
    return changed


@pytest.mark.parametrize("make", [lambda: gguf_of(trained("smollm"), "smollm"), sentencepiece_gguf])
def test_of_a_text_that_stands_twice_the_first_id_counts(make: Callable[[], Metadata]) -> None:
    """Official files of Gemma 4 have three such; others have two empty tokens."""
    metadata = make()
    ids: dict[str, Any] = {"bos_token_id": 1}
    plain = from_gguf(metadata, **ids)
    n = plain.n_vocab
    first = next(i for i in range(n) if len(plain.decode([i]).strip()) > 1)
    text = metadata["tokenizer.ggml.tokens"][first]
    ours = from_gguf(with_tokens(metadata, text, text, "", ""), **ids)
    assert ours.n_vocab == n + 4
    for sample in TEXTS:
        assert ours.encode(sample) == plain.encode(sample)
    assert ours.decode([n]) == ours.decode([n + 1]) == plain.decode([first])
    assert ours.token(n) == text
    assert ours.decode([n + 2, n + 3]) == ""


def test_a_control_token_that_stands_twice_adds_no_text() -> None:
    metadata = gguf_of(trained("smollm"), "smollm")
    ours = from_gguf(with_tokens(metadata, "<|end|>", kind=CONTROL))
    assert ours.decode(ours.encode("a<|end|>")) == "a"
    assert ours.decode([ours.n_vocab - 1]) == ""


@pytest.mark.parametrize(
    ("name", "strips"),
    [
        ("Phi 3 mini 4k instruct", True),
        ("Phi-3-mini-4k-instruct", True),
        ("phi3", True),
        ("Phi-4", False),
        (None, False),
    ],
)
def test_special_tokens_of_phi3_take_whitespace_along(name: str | None, strips: bool) -> None:
    ours = from_gguf(gguf_of(trained("smollm"), "smollm") | ({} if name is None else {"general.name": name}))
    assert (ours.encode("<|user|>\n a<|end|>\nb") == ours.encode("<|user|>a<|end|>b")) == strips
    assert ours.encode("a \n b") != ours.encode("ab")


# Rules under other names, as llama.cpp has them, and expressions in the form of the families' own tokenizer.json.
TEKKEN_SPLIT = GPT_4O_SPLIT.replace(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace(r"\p{N}{1,3}", r"\p{N}")
GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
DEFAULT_SPLITS = [r"[\p{P}\$\+<=>\^~\|]+", GPT2_SPLIT, r"\p{N}+", "[0-9][0-9][0-9]"]
DIGIT_SPLITS = [r"\p{N}", GPT2_SPLIT]
RULES: dict[str, tuple[list[str], bool, bool, bool]] = {  # expressions, NFC, whole words, BOS
    "dbrx smaug-bpe glm4 chatglm-bpe": ([LLAMA3_SPLIT], False, False, False),
    "falcon3 falcon-h1 pixtral midm-2.0 lfm2 llama-bpe": ([LLAMA3_SPLIT], False, True, True),
    "deepseek-r1-qwen megrez qwen2": ([QWEN2_SPLIT], True, False, False),
    "hunyuan stablelm2 grok-2 solar-open": ([QWEN2_SPLIT], False, False, False),
    "llama4 kanana2 minimax-m2 gpt-4o": ([GPT_4O_SPLIT], False, False, False),
    "tekken": ([TEKKEN_SPLIT], False, True, True),
    "olmo mpt": ([GPT2_SPLIT], True, False, False),
    "exaone4 granite-docling phi-2 gpt-2": ([GPT2_SPLIT], False, False, False),
    "starcoder codeshell exaone smollm refact": (DIGIT_SPLITS, False, False, False),
    "command-r": (DIGIT_SPLITS, True, False, False),
    "default": (DEFAULT_SPLITS, False, False, False),
    "superbpe": ([r"\p{N}+", r"(?=(\d{3})+(?!\d))"], False, False, False),
    "deepseek-coder": (
        [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}"],
        False,
        False,
        False,
    ),
}


def cut_by(expressions: list[str], text: str) -> list[str]:
    backend = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(e), "isolated") for e in expressions])
    return [text[begin:end] for _, (begin, end) in backend.pre_tokenize_str(text)]


@pytest.mark.parametrize("names", RULES)
def test_names_stand_for_the_rules_of_their_families(names: str) -> None:
    expressions, composes, whole_words, adds_bos = RULES[names]
    for name in names.split():
        metadata = gguf_of(trained("gpt-2"), name)
        del metadata["tokenizer.ggml.add_bos_token"]
        backend, bos = build(metadata)
        assert bos == adds_bos, name
        assert (backend.normalizer is not None) == composes, name
        assert isinstance(backend.model, models.BPE)
        assert backend.model.ignore_merges == whole_words, name
        assert backend.pre_tokenizer is not None
        for text in [
            *TEXTS,
            "1234567 x12345\u0661\u0662 $5.00+=<|^`~ CamelCaseWORDS don't DON'T \u30ab\u30bf\u30ab\u30ca",
        ]:
            spans = [span for _, span in backend.pre_tokenizer.pre_tokenize_str(text)]
            assert [text[begin:end] for begin, end in spans] == cut_by(expressions, text), (name, text)


# What further rules make of one text, by hand.
WORDS = {
    "kimi-k2": "It's| |123|45| |\u6f22\u5b57|Ab|\u5b57|!\n",
    "seed-coder": "It|'s| |1|2|3|4|5| \u6f22\u5b57Ab\u5b57|!|\n",
    "bailingmoe": "It|'s| |1|2|3|4|5| \u6f22\u5b57Ab\u5b57|!\n",
    "afmoe": "It|'s| |12|345| |\u6f22\u5b57|Ab|\u5b57|!\n",
    "joyai-llm": "It|'s| |123|45| |\u6f22\u5b57|Ab|\u5b57|!\n",
    "minicpm5": "It|'s| |123|45| \u6f22\u5b57Ab\u5b57|!\n",
    "ufakzeka": "It|'s| |1|2|3|4|5| \u6f22\u5b57Ab\u5b57|!\n",
    "viking": "It's| |1|2|3|4|5| \u6f22\u5b57Ab\u5b57|!\n",
    "tiny_aya": "It's| |12|345| \u6f22\u5b57Ab\u5b57|!\n",
    "exaone-moe": "It|'s| |1|2|3|4|5| \u6f22\u5b57Ab\u5b57|!\n",
    "falcon": "It|'|s| |123|45| \u6f22\u5b57Ab\u5b57|!|\n",
    "laguna": "It|'s| |1|2|3|4|5| \u6f22\u5b57Ab\u5b57|!|\n",
}


@pytest.mark.parametrize("pre", WORDS)
def test_further_rules(pre: str) -> None:
    text = "It's 12345 \u6f22\u5b57Ab\u5b57!\n"
    spans = [span for _, span in PRE_TOKENIZERS[pre].pre_tokenizer().pre_tokenize_str(text)]
    assert [text[begin:end] for begin, end in spans] == WORDS[pre].split("|")


def test_every_name_cuts_texts_without_loss() -> None:
    for name, words in PRE_TOKENIZERS.items():
        backend: tokenizers.pre_tokenizers.PreTokenizer = words.pre_tokenizer()
        for text in TEXTS:
            assert sum(end - begin for _, (begin, end) in backend.pre_tokenize_str(text)) == len(text), (name, text)
