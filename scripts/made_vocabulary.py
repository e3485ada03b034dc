"""A tokenizer for a random model, which has none: of the words in llmcl's own files, and of their combinations."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

from llmcl.tokenizer import Tokenizer

END = 0  # the token that ends an answer
TRAINED = 1 / 4  # of the tokens; the others are made of two of these


def made_tokenizer(vocab_size: int) -> Tokenizer:
    """One whose tokens are parts of words, as many as the words here give, and combinations of two of them."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Backend

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=int(vocab_size * TRAINED),
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_texts(), trainer)
    vocabulary = dict(backend.get_vocab())
    trained = sorted(vocabulary, key=lambda token: vocabulary[token])[1:]
    merges = _merges(backend)
    longer = (token for token in trained if len(token) > 1)
    for a, b in product(longer, trained):
        if len(vocabulary) >= vocab_size:
            break
        if a + b not in vocabulary and len(a + b) < 16:
            vocabulary[a + b] = len(vocabulary)
            merges.append((a, b))
    backend.model = models.BPE(vocabulary, merges)
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    return Tokenizer(backend, vocab_size=vocab_size, eos_token_ids=[END])


def _texts() -> Iterable[str]:
    root = Path(__file__).parent.parent
    for folder in ("llmcl", "scripts", "docs"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".py", ".md", ".cl"):
                yield path.read_text(encoding="utf-8")


def _merges(backend: Any) -> list[tuple[str, str]]:
    merges = json.loads(backend.to_str())["model"]["merges"]
    return [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in merges]
