"""Small tokenizers of each kind, and texts for them, that the tests of tokenizers share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import tokenizers
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from llmcl.tokenizer import Tokenizer
from llmcl.tokenizer.channel_reader import MARKS
from llmcl.tokenizer.gguf_tokenizer import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED
from llmcl.tokenizer.tokenizer import byte_level_alphabet

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


# As in the families' tokenizer.json, written out here a second time.
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
GPT_4O_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

QWEN35_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def byte_level(use_regex: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def split(expression: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(expression), "isolated"), byte_level(use_regex=False)])


FAMILIES: dict[str, pre_tokenizers.PreTokenizer] = {
    "gpt-2": byte_level(use_regex=True),
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level(use_regex=True)]),
    "llama-bpe": split(LLAMA3_SPLIT),
    "llama3": split(LLAMA3_SPLIT),
    "llama-v3": split(LLAMA3_SPLIT),
    "qwen2": split(QWEN2_SPLIT),
    "qwen35": split(QWEN35_SPLIT),
    "gpt-4o": split(GPT_4O_SPLIT),
}
SPECIAL = ["<|end|>", "<|user|>"]


def trained(pre: str) -> tokenizers.Tokenizer:
    """A byte-level tokenizer of 500 tokens, special tokens first, then one user-defined token at the end."""
    tokenizer = tokenizers.Tokenizer(models.BPE(ignore_merges="llama" in pre))
    tokenizer.pre_tokenizer = FAMILIES[pre]
    tokenizer.decoder = decoders.ByteLevel()
    if pre.startswith("qwen"):
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


def byte_level_gguf() -> dict[str, Any]:
    """The metadata of byte-level BPE with a few merges, and the special tokens <s> and </s>."""
    merges = ["t h", "th e", "\u0120 the", "\u0120 \u0120", "1 2", "i n", "' s", "\u0120 f", "o x"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<s>", "</s>", *letters, *(merge.replace(" ", "") for merge in merges)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL] * 2 + [NORMAL] * (len(tokens) - 2),
        "tokenizer.ggml.merges": merges,
    }


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


CHANNEL_TEMPLATE = (
    "{% for t in tools or [] %}<|start|>developer<|message|>{{ t.function.name }}<|end|>{% endfor %}"
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{# <|channel|>final #}{% endif %}"
)


def channel_tokenizer() -> Tokenizer:
    """A token for each byte, and one for each mark of answers in channels; two of these end an answer."""
    symbols = ["<s>", "</s>", *MARKS, *byte_level_alphabet()]
    backend = tokenizers.Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(symbols)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(mark, special=True) for mark in ("<s>", "</s>", *MARKS)])
    ends = [1, *(symbols.index(mark) for mark in ("<|call|>", "<|return|>"))]
    return Tokenizer(backend, vocab_size=len(symbols), eos_token_ids=ends, chat_template=CHANNEL_TEMPLATE)
